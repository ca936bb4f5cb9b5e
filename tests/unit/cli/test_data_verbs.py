"""``mpipipe data build`` from standard input and with tokenizers, and ``data info``."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpipipe.cli import main


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))


def test_standard_input_split_at_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "t.h5"
    arguments = ["data", "build", "-", "-o", str(tokens)]
    give(monkeypatch, b"one\n--\nthree\n")
    assert main([*arguments, "--split=--"]) == 0
    assert capsys.readouterr().out == f"{tokens}: 10 tokens of 2 documents, vocabulary 256\n"
    assert main(["data", "info", str(tokens)]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "tokenizer bytes, vocabulary 256, largest id 116",
        "2 documents, in tokens: shortest 4, longest 6, mean 5.0",
    ]
    give(monkeypatch, b"")
    assert main([*arguments, "--overwrite"]) == 2
    assert "there is no byte in standard input" in capsys.readouterr().err
    assert main([*arguments[:3], str(tmp_path), *arguments[3:]]) == 2
    assert "'-', standard input, is given beside files" in capsys.readouterr().err


def test_a_trained_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    tokens, beside = tmp_path / "t.h5", tmp_path / "t.tokenizer.json"
    give(monkeypatch, b"ab ab ab ab")
    assert main(["data", "build", "-", "-o", str(tokens), "--train-bpe", "300"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == f"{beside}: the tokenizer; the token file holds it too"
    assert said[2] == "the text gives no more than 259 of the 300 token ids asked for"
    assert main(["data", "info", str(tokens), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key: shown[key] for key in shown if key not in ("path", "sources")} == {
        "tokens": 4,
        "vocab": 259,
        "max_id": 258,
        "dtype": "uint16",
        "tokenizer": str(beside),
        "has_tokenizer": True,
        "documents": 1,
        "shortest_document": 4,
        "longest_document": 4,
        "mean_document": 4.0,
    }
    give(monkeypatch, b"ab ab")
    assert main(["data", "build", "-", "-o", str(tmp_path / "u.h5"), "--tokenizer", str(beside)]) == 0
    assert main(["data", "info", str(tmp_path / "u.h5")]) == 0
    assert f"tokenizer {beside} (held in the file), vocabulary 259" in capsys.readouterr().out
    assert main(["data", "build", "-", "-o", str(tokens), "--train-bpe", "256"]) == 2

"""Text to tokens of a BPE, a run over loopback on two ranks, and text again: the run's own tokenizer is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from mpipipe.cli import main
from mpipipe.config import Config
from mpipipe.data import build_tokens
from mpipipe.errors import ConfigError, DataError
from mpipipe.formats.tokens import TokensFile, write_tokens
from mpipipe.generate import find_tokenizer, generate, prompt_tokens
from mpipipe.trainer import train_run
from mpipipe.transport import run_ranks

pytest.importorskip("tokenizers")

TEXT = "caf\u00e9 pipelines \u4e16\u754c carry on, "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file and a run that has learned its text by heart."""
    made = tmp_path_factory.mktemp("bpe")
    (made / "a.txt").write_text(TEXT * 30, encoding="utf-8")
    built = build_tokens([made / "a.txt"], made / "train.h5", bpe_vocab=300)
    config = Config.from_tables(
        {
            "run": {"seed": 3, "steps": 100, "dir": str(made / "run")},
            "model": {"layers": 2, "hidden": 32, "heads": 2, "vocab": built.train.vocab, "sequence": 7},
            "batch": {"sequences": 8, "microbatch": 4},
            "data": {"train": str(made / "train.h5")},
            "optimizer": {"lr": 5e-3},
            "trace": {"enabled": False},
        }
    )
    run_ranks(2, lambda transport: train_run(config, transport))
    return made


def test_the_text_goes_on_in_the_runs_own_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = generate(folder / "run", TEXT + "caf\u00e9", 12)
    assert found
    assert (TEXT * 9).removeprefix(TEXT + "caf\u00e9").startswith(found)
    arguments = ["generate", str(folder / "run"), "--prompt", TEXT + "caf\u00e9", "--max-tokens", "12", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["text"] == found
    assert main([*arguments, "--tokenizer", str(folder / "train.tokenizer.json")]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == found


def test_a_tokenizer_that_is_not_there(folder: Path) -> None:
    (folder / "train.h5").rename(folder / "elsewhere.h5")
    try:
        with pytest.raises(ConfigError, match=r"data\.train: the tokenizer .* does not exist .*--tokenizer FILE"):
            generate(folder / "run", "a", 1)
        for name in ("elsewhere.h5", "train.tokenizer.json"):
            assert generate(folder / "run", TEXT, 3, tokenizer=folder / name)
        with pytest.raises(DataError, match=r"none\.json does not exist"):
            generate(folder / "run", TEXT, 3, tokenizer=folder / "none.json")
    finally:
        (folder / "elsewhere.h5").rename(folder / "train.h5")


def test_which_tokenizer_is_found(folder: Path, tmp_path: Path) -> None:
    def of(vocab: int, train: Path | None) -> Config:
        return tiny.config(model__vocab=vocab, data__train=str(train) if train else [])

    named = tmp_path / "named.h5"
    document = TokensFile(folder / "train.h5").read(0, 20)
    write_tokens(named, [document], 300, "someone/elses")
    write_tokens(tmp_path / "bytes.h5", [document % 256], 256, "bytes")
    assert find_tokenizer(of(300, folder / "train.h5")).vocab == TokensFile(folder / "train.h5").vocab
    assert find_tokenizer(of(300, tmp_path / "bytes.h5")).name == "bytes"
    for train in (None, tmp_path / "none.h5", named):
        assert find_tokenizer(of(256, train)).name == "bytes"
        with pytest.raises(ConfigError, match="the tokenizer of the text is not known"):
            find_tokenizer(of(257, train))
    with pytest.raises(ConfigError, match=r"named\.h5 names its tokenizer, someone/elses, and lacks it"):
        find_tokenizer(of(300, named))
    with pytest.raises(DataError, match=r"named\.h5 names its tokenizer and lacks it"):
        find_tokenizer(of(300, None), named)
    with pytest.raises(ConfigError, match=r"the prompt holds the token id \d+, which model\.vocab = 20 does not have"):
        prompt_tokens("caf\u00e9", find_tokenizer(of(20, folder / "train.h5")), 20)

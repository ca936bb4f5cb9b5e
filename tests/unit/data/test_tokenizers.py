"""Text to ids and back, end-of-document tokens, separators, standard input, and a trained tokenizer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mpipipe.data import ByteTokenizer, TextTokenizer, TokenSource, build_tokens, load_tokenizer
from mpipipe.data.tokenizer import cut, train_bpe
from mpipipe.errors import DataError, MissingDependencyError
from mpipipe.formats.tokens import TokensFile

pytest.importorskip("tokenizers")

ODD = (
    "plain text\r\n\ttabs \u00a0 e\u0301 \u00e9 \u4e16\u754c \U0001f9ee\u200d\U0001f4bb \ufeff\ufffd\u0000\u0085\u2028 "
    "<|endoftext|> don't  \n\n  x\ny\n" + "".join(chr(code) for code in range(1, 0x250)) + "\ud7ff\U0010ffff   "
)


def word_level(path: Path, size: int, **more: object) -> Path:
    """A tokenizer file whose word ``wN`` has id N."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(size)}, "unk_token": "w0"},
        **more,
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


def file_of(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def documents_of(path: Path) -> list[list[int]]:
    file = TokensFile(path)
    return [part.tolist() for part in np.split(file.read(0, file.length), file.documents[1:])]


def test_bytes_of_any_kind_come_back(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3 + ODD.encode()
    build_tokens([file_of(tmp_path / "a.bin", content)], tmp_path / "t.h5", binary=True)
    file = TokensFile(tmp_path / "t.h5")
    ids = file.read(0, file.length)
    assert bytes(ids.astype(np.uint8)) == content
    assert ByteTokenizer().decode(ids.tolist()) == content.decode("utf-8", errors="replace")
    assert ByteTokenizer().decode([65, 256, 66]) == "A\ufffdB"
    assert (file.info.has_tokenizer, file.tokenizer_json) == (False, None)


def test_bpe_gives_the_text_back_and_is_kept_in_the_file_and_beside_it(tmp_path: Path) -> None:
    texts = [file_of(tmp_path / "a.txt", (ODD * 4).encode()), file_of(tmp_path / "b.txt", b"the then them there")]
    built = build_tokens(texts, tmp_path / "t.h5", bpe_vocab=300, binary=True)
    file = TokensFile(tmp_path / "t.h5")
    tokenizer = TextTokenizer(file.tokenizer_json or "", "t.h5")
    first, second = documents_of(tmp_path / "t.h5")
    assert first[-1] == tokenizer.end_id == 0  # between the documents, and nowhere else: the spelt one is text
    assert 0 not in first[:-1] + second
    assert tokenizer.decode(first[:-1]) == ODD * 4
    assert tokenizer.decode(second) == "the then them there"
    assert len(first) < len((ODD * 4).encode())
    assert (file.vocab, file.dtype, file.tokenizer) == (300, "<u2", str(tmp_path / "t.tokenizer.json"))
    assert (file.max_id, built.train) == (max(first + second), file.info)
    assert built.tokenizer_file == tmp_path / "t.tokenizer.json"
    assert built.tokenizer_file.read_text(encoding="utf-8") == file.tokenizer_json
    again = build_tokens(texts, tmp_path / "u.h5", tokenizer=built.tokenizer_file, binary=True)
    assert documents_of(tmp_path / "u.h5") == [first, second]
    assert again.tokenizer_file is None
    build_tokens(texts, tmp_path / "sub.h5", bpe_vocab=300, binary=True)
    assert (tmp_path / "sub.tokenizer.json").read_bytes() == built.tokenizer_file.read_bytes()


def test_held_out_text_has_the_same_tokenizer_and_no_part_in_its_training(tmp_path: Path) -> None:
    texts = [file_of(tmp_path / f"{i}.txt", b"zq zq zq zq " if i == 1 else b"ab ab ab ab ") for i in range(3)]
    built = build_tokens(texts, tmp_path / "t.h5", bpe_vocab=400, validation=tmp_path / "v.h5", validation_every=2)
    text = TokensFile(tmp_path / "v.h5").tokenizer_json
    assert text == TokensFile(tmp_path / "t.h5").tokenizer_json
    assert text is not None
    merges = [" ".join(merge) for merge in json.loads(text)["model"]["merges"]]
    assert "a b" in merges
    assert "z q" not in merges
    assert built.train.vocab == 257 + len(merges) < 400  # no more pairs than the text has


def test_pieces_have_the_tokens_of_the_whole() -> None:
    text = ("one two\nthree  \n\n four\n\tfive's\n6\n\r\nseven \nx\ny\nz" + "p\n\n\nq" * 8 + ODD) * 5
    tokenizer = train_bpe([text], 320, "test")
    whole = tokenizer.encode(np.frombuffer(text.encode(), np.uint8), "x").tolist()
    for size in (1, 2, 3, 7, 50):
        pieces = list(cut(text, size))
        assert "".join(pieces) == text
        assert len(pieces) > 5
        ids = [i for p in pieces for i in tokenizer.encode(np.frombuffer(p.encode(), np.uint8), "x").tolist()]
        assert ids == whole
    assert list(cut("\n\n a\n", 1)) == ["\n\n a\n"]
    assert list(cut("", 1)) == [""]
    assert list(cut("a\nb", 1)) == ["a\n", "b"]


def test_ids_above_65535_from_text_to_batches(tmp_path: Path) -> None:
    tokenizer = word_level(tmp_path / "words.json", 70_000)
    wanted = list(range(65_536, 70_000))
    text = file_of(tmp_path / "a.txt", " ".join(f"w{i}" for i in wanted).encode())
    built = build_tokens([text], tmp_path / "t.h5", tokenizer=tokenizer)
    assert (built.train.dtype, built.train.vocab, built.train.max_id) == ("<u4", 70_000, 69_999)
    source = TokenSource([str(tmp_path / "t.h5")], sequence=9, vocab=70_000, shuffle=False)
    batch = source.batch(0, source.num_windows)
    assert batch.inputs.reshape(-1).tolist() == wanted[: source.num_windows * 9]
    assert batch.targets[-1, -1] == wanted[source.num_windows * 9]
    with pytest.raises(DataError, match=r"holds token id 69999 .*set model\.vocab to 70000"):
        TokenSource([str(tmp_path / "t.h5")], sequence=9, vocab=69_999)


def test_a_tokenizer_that_cuts_pads_and_adds_is_kept_from_it(tmp_path: Path) -> None:
    tokens = [{"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": True} for i, c in ((8, "<s>"), (11, "</s>"))]  # fmt: skip
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}},
    }
    vocab = {**{f"w{i}": i for i in range(8)}, "<s>": 8, "</s>": 11}  # ids with a gap: the vocabulary ends at 11
    path = word_level(
        tmp_path / "t.json",
        8,
        added_tokens=tokens,
        post_processor=template,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    )
    texts = [file_of(tmp_path / f"{i}.txt", text) for i, text in enumerate([b"w1 w2 w3", b" \n", b"w4", b"w5 x w6"])]
    built = build_tokens(texts, tmp_path / "t.h5", tokenizer=path)
    assert documents_of(tmp_path / "t.h5") == [[1, 2, 3, 11], [4, 11], [5, 0, 6]]
    assert (built.train.vocab, built.train.num_documents) == (12, 3)
    assert (built.train.shortest_document, built.train.longest_document, built.train.mean_document) == (2, 4, 3.0)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_separates_documents(tmp_path: Path, end: bytes) -> None:
    lines = [b"---", b"one", b" ---", b"---", b"---", b"two--- ", b"", b"---", b"three"]
    text = file_of(tmp_path / "a.txt", end.join(lines))
    more = [file_of(tmp_path / "b.txt", b"four"), file_of(tmp_path / "c.txt", b"---\n"), file_of(tmp_path / "d", b"")]
    built = build_tokens([text, *more], tmp_path / "t.h5", split="---")
    found = [bytes(ids) for ids in documents_of(tmp_path / "t.h5")]
    assert found == [b"one" + end + b" ---" + end, b"two--- " + end + end, b"three", b"four"]
    assert [source.path for source in built.train.sources] == [str(text), str(more[0])]
    build_tokens([text], tmp_path / "v.h5", split="---", validation=tmp_path / "w.h5", validation_every=2)
    assert [bytes(ids)[:3] for ids in documents_of(tmp_path / "w.h5")] == [b"two"]
    assert [source.size_bytes for source in TokensFile(tmp_path / "w.h5").info.sources] == [len(end.join(lines))]
    build_tokens([file_of(tmp_path / "e.txt", b"a\n\nb\n")], tmp_path / "x.h5", split="")
    assert [bytes(ids) for ids in documents_of(tmp_path / "x.h5")] == [b"a\n", b"b\n"]


def test_standard_input(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    given = io.BytesIO(b"one\n##\ntwo\n")
    built = build_tokens([], tmp_path / "t.h5", lambda done, of: told.append((done, of)), standard_input=given)
    assert documents_of(tmp_path / "t.h5") == [list(b"one\n##\ntwo\n")]
    assert [(s.path, s.size_bytes) for s in built.train.sources] == [("standard input", 11)]
    assert told == [(11, 0), (11, 11)]
    given.seek(0)
    build_tokens([], tmp_path / "u.h5", standard_input=given, split="##", bpe_vocab=257)
    tokenizer = load_tokenizer(tmp_path / "u.tokenizer.json")
    assert [tokenizer.decode(ids) for ids in documents_of(tmp_path / "u.h5")] == ["one\n<|endoftext|>", "two\n"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["t.h5", "u.h5", "u.tokenizer.json"]  # nothing is left of what was kept meanwhile


def test_standard_input_that_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "t.h5"
    with pytest.raises(DataError, match="no byte in standard input"):
        build_tokens([], output, standard_input=io.BytesIO())
    with pytest.raises(DataError, match=r"standard input is no text: it holds a NUL byte; .* --binary"):
        build_tokens([], output, standard_input=io.BytesIO(b"\0"))
    with pytest.raises(DataError, match="nothing but separators"):
        build_tokens([], output, standard_input=io.BytesIO(b"#\n#"), split="#")
    with pytest.raises(DataError, match="a separator is one line"):
        build_tokens([], output, standard_input=io.BytesIO(b"#\n#"), split="#\n")
    with pytest.raises(DataError, match="nothing of 1 document with text is held out"):
        build_tokens(
            [], output, standard_input=io.BytesIO(b"a"), validation=tmp_path / "v.h5", validation_every=2
        )
    with pytest.raises(DataError, match="there is no folder"):
        build_tokens([], tmp_path / "none" / "t.h5", standard_input=io.BytesIO(b"a"))
    assert list(tmp_path.iterdir()) == []


def test_empty_files_among_good_ones(tmp_path: Path) -> None:
    texts = [file_of(tmp_path / f"{i}.txt", text) for i, text in enumerate([b"", b"ab", b"", b"cd"])]
    built = build_tokens(texts, tmp_path / "t.h5", bpe_vocab=257)
    first, second = documents_of(tmp_path / "t.h5")
    assert (len(first), first[-1], len(second), built.train.num_documents) == (3, 0, 2, 2)
    assert [source.size_bytes for source in built.train.sources] == [2, 2]


def test_what_a_tokenizer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latin = file_of(tmp_path / "latin.txt", b"caf\xe9 au lait")
    output = tmp_path / "t.h5"
    with pytest.raises(DataError, match=r"latin\.txt: byte 3 is no UTF-8 .* --tokenizer bytes"):
        build_tokens([latin], output, bpe_vocab=300)
    with pytest.raises(DataError, match="256 ids was asked for; it has at least 257"):
        build_tokens([latin], output, bpe_vocab=256)
    with pytest.raises(DataError, match="one tokenizer is taken"):
        build_tokens([latin], output, bpe_vocab=300, tokenizer="x.json")
    with pytest.raises(DataError, match=r"tokenizer file .*none\.json does not exist"):
        build_tokens([latin], output, tokenizer=tmp_path / "none.json")
    with pytest.raises(DataError, match=r"latin\.txt is no tokenizer file of JSON text"):
        build_tokens([latin], output, tokenizer=latin)
    with pytest.raises(DataError, match=r"other\.json holds no tokenizer that .* can read"):
        build_tokens([latin], output, tokenizer=file_of(tmp_path / "other.json", b'{"model": 3}'))
    file_of(tmp_path / "t.tokenizer.json", b"mine")
    with pytest.raises(DataError, match=r"t\.tokenizer\.json: the file exists"):
        build_tokens([latin], output, bpe_vocab=300)
    assert (tmp_path / "t.tokenizer.json").read_bytes() == b"mine"
    assert not output.exists()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mpipipe\[hf\]'"):
        build_tokens([file_of(tmp_path / "a.txt", b"a")], output, bpe_vocab=300, overwrite=True)

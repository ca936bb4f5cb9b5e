"""Token files from text files, and the entropies of bytes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import xxhash

from mpipipe.data import build_byte_tokens, build_tokens, byte_entropies
from mpipipe.errors import DataError
from mpipipe.formats.tokens import TokensFile


def corpus(folder: Path, *texts: bytes) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    return paths


def test_tokens_are_the_bytes_in_the_order_of_the_paths(tmp_path: Path) -> None:
    paths = corpus(tmp_path, b"abc\n", b"", "\u00e9\u4e16".encode(), b"\x00\xff")
    payload = b"abc\n"
    calls: list[tuple[int, int]] = []
    built = build_byte_tokens(
        paths[::-1], tmp_path / "tokens.h5", lambda done, total: calls.append((done, total)), binary=True
    )
    file = TokensFile(tmp_path / "tokens.h5")
    assert (
        file.read(0, file.length).tobytes()
        == np.frombuffer(b"abc\n\xc3\xa9\xe4\xb8\x96\x00\xff", np.uint8).astype("<u2").tobytes()
    )
    assert file.documents.tolist() == [0, 4, 9]
    assert (file.vocab, file.max_id, file.tokenizer, file.length, file.num_documents) == (256, 255, "bytes", 11, 3)
    assert built.train == file.info
    assert built.validation is None
    assert [(source.path, source.size_bytes) for source in file.info.sources] == [
        (str(paths[0]), 4),
        (str(paths[2]), 5),
        (str(paths[3]), 2),
    ]
    assert file.info.sources[0].checksum == f"xxh3:{xxhash.xxh3_64_hexdigest(payload)}"
    assert calls == [(4, 11), (9, 11), (11, 11)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt", "2.txt", "3.txt", "tokens.h5"]


def test_held_out_documents(tmp_path: Path) -> None:
    paths = corpus(tmp_path, b"a", b"bb", b"", b"ccc", b"dddd", b"eeeee")
    train, validation = tmp_path / "train.h5", tmp_path / "validation.h5"
    built = build_byte_tokens(paths, train, validation=validation, validation_every=2)
    assert bytes(TokensFile(train).read(0, 9).astype(np.uint8)) == b"accceeeee"
    assert bytes(TokensFile(validation).read(0, 6).astype(np.uint8)) == b"bbdddd"
    assert built.validation is not None
    assert (built.train.length, built.validation.length) == (9, 6)


def test_refusals(tmp_path: Path) -> None:
    paths = corpus(tmp_path, b"a", b"", b"b")
    output = tmp_path / "out.h5"
    with pytest.raises(DataError, match=r"missing\.txt does not exist"):
        build_byte_tokens([*paths, tmp_path / "missing.txt"], output)
    with pytest.raises(DataError, match="is a folder"):
        build_byte_tokens([tmp_path], output)
    with pytest.raises(DataError, match="no text file is named"):
        build_byte_tokens([], output)
    with pytest.raises(DataError, match=r"no byte in the 1 file named: .*1\.txt"):
        build_byte_tokens([paths[1]], output)
    with pytest.raises(DataError, match="at least 2; 1 was asked for"):
        build_byte_tokens(paths, output, validation=tmp_path / "v.h5", validation_every=1)
    with pytest.raises(DataError, match="with --validation-every 3 nothing of 2 files with text is held out"):
        build_byte_tokens(paths, output, validation=tmp_path / "v.h5", validation_every=3)
    with pytest.raises(DataError, match="for training and for validation"):
        build_byte_tokens(paths, output, validation=output, validation_every=2)
    with pytest.raises(DataError, match="no validation file is named"):
        build_byte_tokens(paths, output, validation_every=2)
    assert not output.exists()


def test_an_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    paths = corpus(tmp_path, b"new", b"text")
    output = tmp_path / "out.h5"
    output.write_bytes(b"old")
    with pytest.raises(DataError, match=r"out\.h5: the file exists; choose another name, or --overwrite"):
        build_byte_tokens(paths, output)
    with pytest.raises(DataError, match=r"out\.h5: the file exists"):
        build_byte_tokens(paths, tmp_path / "train.h5", validation=output, validation_every=2)
    assert output.read_bytes() == b"old"
    assert not (tmp_path / "train.h5").exists()
    build_byte_tokens(paths, output, overwrite=True)
    assert TokensFile(output).length == 7


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (b"a" * 8191 + b"\0", "holds a NUL byte"),
        ("text".encode("utf-16"), "holds a NUL byte"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    texts = corpus(tmp_path, b"a", b"b")
    odd, output = tmp_path / "an odd one.bin", tmp_path / "out.h5"
    odd.write_bytes(content)
    with pytest.raises(DataError) as caught:
        build_byte_tokens([*texts, odd], output)
    assert f"{odd} is no text: it {why}. Leave it out" in str(caught.value)
    assert "--exclude 'an odd one.bin'), or take its bytes as they are with --binary" in str(caught.value)
    assert not output.exists()
    assert build_byte_tokens([*texts, odd], output, binary=True).train.length == 2 + len(content)


def test_of_several_that_are_no_text_the_first_is_named_and_the_others_counted(tmp_path: Path) -> None:
    paths = corpus(tmp_path, b"a", b"\0", b"\0b", b"\0c")
    with pytest.raises(DataError, match=r"1\.txt is no text: it holds a NUL byte, and 2 files more of 4 as well"):
        build_byte_tokens(paths, tmp_path / "out.h5")


def test_text_of_any_script_and_a_nul_far_inside_are_taken(tmp_path: Path) -> None:
    paths = corpus(tmp_path, "\u4e16\u754c".encode(), b"\xff\xfe latin", b"a" * 8192 + b"\0")
    assert build_byte_tokens(paths, tmp_path / "out.h5").train.length == 6 + 8 + 8193


def test_entropies_by_hand() -> None:
    alternating = np.array([0, 1] * 50 + [0], dtype=np.uint16)
    unigram, bigram = byte_entropies(alternating)
    assert unigram == pytest.approx(-(51 * math.log(51 / 101) + 50 * math.log(50 / 101)) / 101, rel=1e-12)
    assert bigram == pytest.approx(0.0, abs=1e-12)
    # 0 is followed by 0 once and by 1 once, 1 by 0 once: ln 2 in two of three cases
    assert byte_entropies(np.array([0, 0, 1, 0]))[1] == pytest.approx(2 / 3 * math.log(2), rel=1e-12)
    uniform = np.random.default_rng(0).integers(0, 256, 2_000_000)
    assert byte_entropies(uniform)[0] == pytest.approx(math.log(256), abs=1e-3)


def test_entropies_over_several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(0, 5, 1000)
    whole = byte_entropies(tokens)
    monkeypatch.setattr("mpipipe.data.build._SLICE", 7)
    assert byte_entropies(tokens) == whole


def test_entropies_refuse() -> None:
    with pytest.raises(DataError, match="at least 2 tokens"):
        byte_entropies(np.array([1]))
    with pytest.raises(DataError, match="token id 256 is no byte"):
        byte_entropies(np.array([1, 256]))
    with pytest.raises(DataError, match="token id -3 is no byte"):
        byte_entropies(np.array([1, -3]))


def test_a_text_that_is_named_as_output_stays(tmp_path: Path) -> None:
    text, *_ = corpus(tmp_path, b"hello")
    (tmp_path / "link.txt").symlink_to(text)
    other = tmp_path / "other.h5"
    for output, validation in ((text, None), (tmp_path / "link.txt", None), (other, text)):
        every = 0 if validation is None else 2
        with pytest.raises(DataError, match="is to be read and to be written"):
            build_tokens([text], output, validation=validation, validation_every=every, overwrite=True)
    with pytest.raises(DataError, match="is to be read and to be written"):
        build_tokens([text], tmp_path / "bpe.json", tokenizer=tmp_path / "bpe.json")
    assert text.read_bytes() == b"hello"
    assert not other.exists()


def test_a_fault_in_the_validation_half_leaves_nothing(tmp_path: Path) -> None:
    paths = corpus(tmp_path, b"a", b"b", b"c")
    train, validation = tmp_path / "train.h5", tmp_path / "no" / "validation.h5"
    with pytest.raises(DataError, match="there is no folder"):
        build_tokens(paths, train, validation=validation, validation_every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt", "2.txt"]

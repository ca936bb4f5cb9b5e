"""The token file on disk: what is in it, who can read it, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpipipe.errors import DataError
from mpipipe.formats.tokens import Source, TokensFile, token_dtype, write_tokens


def test_every_object_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.h5"
    documents = [np.array([5, 6]), np.array([], dtype=np.int32), np.array([7], dtype=np.uint8)]
    info = write_tokens(path, documents, 300, "some/tokenizer.json", [Source("a.txt", 12, "xxh3:00ff")])
    with h5py.File(path) as file:
        assert file.attrs["format"] == "mpipipe-tokens"
        assert {name: int(file.attrs[name]) for name in ("version", "vocab", "max_id")} == {
            "version": 1,
            "vocab": 300,
            "max_id": 7,
        }
        assert file.attrs["tokenizer"] == "some/tokenizer.json"
        assert (file["tokens"].dtype, file["tokens"].chunks, file["tokens"][:].tolist()) == ("<u2", None, [5, 6, 7])
        assert (file["documents"].dtype, file["documents"][:].tolist()) == ("<i8", [0, 2])
        assert file["sources/path"].asstr()[:].tolist() == ["a.txt"]
        assert file["sources/size_bytes"][:].tolist() == [12]
        assert file["sources/checksum"].asstr()[:].tolist() == ["xxh3:00ff"]
    assert info == TokensFile(path).info
    assert (info.length, info.vocab, info.max_id, info.num_documents) == (3, 300, 7, 2)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (70_000, "<u4"), (2**32, "<u4")]
)
def test_dtype_follows_the_vocabulary(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab) == np.dtype(dtype)


@pytest.mark.parametrize("vocab", [0, -1, 2**32 + 1])
def test_vocabulary_that_can_not_be_stored(vocab: int) -> None:
    with pytest.raises(DataError, match="can be stored"):
        token_dtype(vocab)


def test_no_wrapping_above_65535(tmp_path: Path) -> None:
    tokens = np.arange(65_530, 70_000)
    write_tokens(tmp_path / "a.h5", [tokens], 70_000, "x")
    file = TokensFile(tmp_path / "a.h5")
    assert (file.dtype, file.max_id) == (np.dtype("<u4"), 69_999)
    assert np.array_equal(file.read(0, file.length), tokens)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            np.array([0, 1, 256]),
            r"document 1, position 2: token id 256 does not fit a vocabulary of 256 ids \(0 to 255\)",
        ),
        (np.array([0, -1], dtype=np.int16), r"document 1, position 1: token id -1 does not fit"),
        (np.array([0.5]), r"document 1 is float64 of shape \(1,\); integers"),
        (np.zeros((2, 2), dtype=np.int64), r"document 1 is int64 of shape \(2, 2\)"),
    ],
)
def test_writer_refuses_what_does_not_fit_and_leaves_nothing(
    tmp_path: Path, document: np.ndarray, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path / "a.h5", [np.array([1]), document], 256, "x")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(b"old")

    def documents() -> Iterator[np.ndarray]:
        yield np.array([1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, documents(), 256, "x", overwrite=True)
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("a.h5", b"old")]


def test_other_refusals_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="the sources hold no token"):
        write_tokens(tmp_path / "a.h5", [np.array([], dtype=np.int64)], 256, "x")
    with pytest.raises(DataError, match="there is no folder"):
        write_tokens(tmp_path / "none" / "a.h5", [np.array([1])], 256, "x")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 5, 5))
    with pytest.raises(OSError, match=r"2,000 bytes are needed and 5 are free"):
        write_tokens(tmp_path / "a.h5", [np.ones(1000, dtype=np.int64)], 256, "x")
    assert list(tmp_path.iterdir()) == []


def test_several_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.formats.tokens._SLICE", 3)
    write_tokens(tmp_path / "a.h5", [np.arange(10), np.arange(10, 14)], 256, "x")
    assert TokensFile(tmp_path / "a.h5").read(0, 14).tolist() == list(range(14))
    with pytest.raises(DataError, match="document 0, position 10: token id 256"):
        write_tokens(tmp_path / "b.h5", [np.array([1] * 10 + [256])], 256, "x")


def test_reads_are_copies_within_the_file(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.h5", [np.arange(10)], 256, "x")
    file = TokensFile(tmp_path / "a.h5")
    piece = file.read(3, 6)
    assert (piece.tolist(), piece.dtype, file.read(10, 10).tolist()) == ([3, 4, 5], np.dtype("<u2"), [])
    piece[0] = 9
    assert file.read(3, 4).tolist() == [3]
    for start, stop in ((-1, 2), (5, 11), (6, 5)):
        with pytest.raises(DataError, match="the file has 10"):
            file.read(start, stop)


def test_compressed_tokens_of_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_tokens(path, [np.arange(10)], 256, "x")
    with h5py.File(path, "r+") as file:
        tokens = file["tokens"][:]
        del file["tokens"]
        file.create_dataset("tokens", data=tokens, chunks=(4,), compression="gzip")
    assert TokensFile(path).read(2, 9).tolist() == list(range(2, 9))


def test_what_is_no_token_file(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(DataError, match="there is no such file"):
        TokensFile(path)
    path.write_bytes(b"plain text, not HDF5" * 100)
    with pytest.raises(DataError, match=r"a\.h5: can't be read as HDF5"):
        TokensFile(path)
    path.unlink()
    write_tokens(path, [np.arange(10)], 256, "x")
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 2
    with pytest.raises(DataError, match=r"version 2 found, 1 to 1 supported"):
        TokensFile(path)
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = "mpipipe-trace"
    with pytest.raises(DataError, match="'mpipipe-trace'"):
        TokensFile(path)


@pytest.mark.parametrize("name", ["tokens", "documents"])
def test_missing_dataset(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.h5"
    write_tokens(path, [np.arange(10)], 256, "x")
    with h5py.File(path, "r+") as file:
        del file[name]
    with pytest.raises(DataError, match=f"/{name} is missing or is no list of integers"):
        TokensFile(path)


def test_missing_vocabulary_and_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_tokens(path, [np.arange(200)], 256, "x")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="can't be read as HDF5"):
        TokensFile(path)
    write_tokens(path, [np.arange(10)], 256, "x", overwrite=True)
    with h5py.File(path, "r+") as file:
        del file.attrs["vocab"]
    with pytest.raises(DataError, match="the attribute vocab is missing"):
        TokensFile(path)


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        write_tokens(tmp_path / name, [np.arange(200)], 256, "x", [Source("s", 1, "xxh3:0")])
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()

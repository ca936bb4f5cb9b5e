"""The token file, ``tokens.h5``: one flat array of token ids, the documents' start offsets, and where the tokens come
from.

Layout (version 1), plain HDF5:

- attributes ``format = "mpipipe-tokens"``, ``version``, ``vocab`` (number of token ids), ``max_id`` (largest id in the
  file, -1 if empty), ``tokenizer`` (``"bytes"``, or the name or file of another tokenizer);
- ``/tokens`` uint16 (vocab up to 65536) or uint32, contiguous: readers map it into memory;
- ``/documents`` int64, the position of the first token of each document;
- ``/tokenizer`` text, only with a tokenizer other than bytes: its JSON, as the ``tokenizers`` package reads it;
- ``/sources/path`` text, ``/sources/size_bytes`` int64, ``/sources/checksum`` text (``"xxh3:"`` and 16 hex digits), one
  row a source file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mpipipe.errors import DataError
from mpipipe.formats.hdf5 import (
    check_format,
    open_file,
    read_text,
    text_attribute,
    text_dtype,
    write_format,
    write_text,
)
from mpipipe.formats.whole import Parts, sync

FORMAT = "mpipipe-tokens"
VERSION = 1
_SLICE = 1 << 22  # tokens written or copied at a time

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A file that tokens were made of. ``checksum``: ``"xxh3:"`` and 16 hex digits."""

    path: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class TokensInfo:
    """What a token file says about itself. ``max_id`` is -1 in a file without tokens; ``shortest_document`` and
    ``longest_document`` in tokens, 0 without documents; ``has_tokenizer``: the file holds the tokenizer's JSON.
    """

    path: Path
    length: int
    vocab: int
    max_id: int
    dtype: np.dtype[Any]
    tokenizer: str
    num_documents: int
    sources: tuple[Source, ...]
    shortest_document: int = 0
    longest_document: int = 0
    has_tokenizer: bool = False

    @property
    def mean_document(self) -> float:
        """Mean length of a document in tokens; 0 without documents."""
        return self.length / self.num_documents if self.num_documents else 0.0


def token_dtype(vocab: int) -> np.dtype[Any]:
    """uint16 for a vocabulary of up to 65,536 ids, else uint32. Raises DataError outside 1 .. 2^32."""
    if not 1 <= vocab <= 2**32:
        raise DataError(f"a vocabulary of {vocab} ids was asked for; 1 to {2**32} can be stored")
    return np.dtype("<u2") if vocab <= 2**16 else np.dtype("<u4")


def write_tokens(
    path: str | Path,
    documents: Iterable[Tokens],
    vocab: int,
    tokenizer: str,
    sources: Sequence[Source] | Callable[[], Sequence[Source]] = (),
    *,
    tokenizer_json: str | None = None,
    overwrite: bool = False,
    parts: Parts | None = None,
) -> TokensInfo:
    """Write a token file: under a temporary name beside ``path``, flushed to disk, then renamed; with ``parts`` the
    caller renames it, together with others.

    ``documents``: one integer array (tokens,) a document, read once, in order; empty ones are left out. ``sources``
    may be a function that is called after the last document. ``tokenizer_json``: kept in the file. Raises DataError
    for a file that exists (unless ``overwrite``), for an id outside 0 .. vocab-1 (document, position and value named),
    and where there is no token at all; OSError where the disk is too small.
    """
    path = Path(path)
    dtype = token_dtype(vocab)
    if path.exists() and not overwrite:
        raise DataError(f"{path}: the file exists; choose another name, or --overwrite to replace it")
    if not path.parent.is_dir():
        raise DataError(f"{path}: there is no folder {path.parent}")
    with Parts() as own, tempfile.TemporaryFile(dir=path.parent) as spool:  # the length comes last
        starts, length, max_id = _spool_documents(spool, documents, vocab, dtype)
        if length == 0:
            raise DataError(f"{path}: the sources hold no token")
        rows = list(sources() if callable(sources) else sources)
        _check_space(path, length * dtype.itemsize)
        part = (own if parts is None else parts).beside(path)
        _write_file(part, spool, dtype, length, starts, rows, (vocab, max_id, tokenizer, tokenizer_json))
        own.rename()
        with contextlib.suppress(OSError):  # some file systems refuse to flush a folder, which is no fault of ours
            sync(path.parent)
    lengths = _shortest_and_longest(np.asarray(starts, dtype=np.int64), length)
    has_tokenizer = tokenizer_json is not None
    return TokensInfo(
        path, length, vocab, max_id, dtype, tokenizer, len(starts), tuple(rows), *lengths, has_tokenizer
    )


def _shortest_and_longest(starts: npt.NDArray[np.int64], length: int) -> tuple[int, int]:
    if not len(starts):
        return 0, 0
    lengths = np.diff(starts, append=length)
    return int(lengths.min()), int(lengths.max())


def _spool_documents(
    spool: IO[bytes], documents: Iterable[Tokens], vocab: int, dtype: np.dtype[Any]
) -> tuple[list[int], int, int]:
    """Write all documents one after another; returns start offsets, number of tokens and largest id."""
    starts: list[int] = []
    length, max_id = 0, -1
    for number, document in enumerate(documents):
        if document.ndim != 1 or document.dtype.kind not in "iu":
            raise DataError(
                f"document {number} is {document.dtype} of shape {document.shape}; integers (tokens,) are needed"
            )
        if len(document):
            starts.append(length)
        for first in range(0, len(document), _SLICE):
            piece = np.asarray(document[first : first + _SLICE])
            low, high = int(piece.min()), int(piece.max())
            if low < 0 or high >= vocab:
                at = int(np.argmax((piece < 0) | (piece >= vocab)))
                raise DataError(
                    f"document {number}, position {first + at}: token id {int(piece[at])} does not fit "
                    f"a vocabulary of {vocab} ids (0 to {vocab - 1})"
                )
            spool.write(np.ascontiguousarray(piece, dtype=dtype).data)
            max_id = max(max_id, high)
            length += len(piece)
    return starts, length, max_id


def _check_space(path: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes + (1 << 20):
        raise OSError(f"{path}: {needed_bytes:,} bytes are needed and {free:,} are free in {path.parent}")


def _write_file(
    part: Path,
    spool: IO[bytes],
    dtype: np.dtype[Any],
    length: int,
    starts: Sequence[int],
    sources: Sequence[Source],
    about: tuple[int, int, str, str | None],
) -> None:
    """The HDF5 file from the spooled tokens; ``about`` is (vocab, max_id, tokenizer, the tokenizer's JSON)."""
    with open_file(part, "w") as file:
        write_format(file, FORMAT, VERSION)
        file.attrs["vocab"], file.attrs["max_id"] = np.int64(about[0]), np.int64(about[1])
        file.attrs["tokenizer"] = about[2]
        tokens = file.create_dataset("tokens", shape=(length,), dtype=dtype)
        spool.seek(0)
        for first in range(0, length, _SLICE):
            count = min(_SLICE, length - first)
            tokens[first : first + count] = np.frombuffer(spool.read(count * dtype.itemsize), dtype=dtype)
        file.create_dataset("documents", data=np.asarray(starts, dtype=np.int64))
        if about[3] is not None:
            write_text(file, "tokenizer", about[3])
        group = file.create_group("sources")
        group.create_dataset("path", data=[source.path for source in sources], dtype=text_dtype())
        group.create_dataset("size_bytes", data=np.asarray([source.size_bytes for source in sources], dtype=np.int64))
        group.create_dataset("checksum", data=[source.checksum for source in sources], dtype=text_dtype())
    sync(part, os.O_RDWR)


class TokensFile:
    """A token file opened for reading; it keeps no HDF5 handle open.

    ``length``, ``vocab``, ``max_id``, ``dtype``, ``tokenizer``: as in TokensInfo. ``documents``: int64 start offsets
    (read on demand). Raises DataError naming the file for a missing file, another format, a newer version or a file
    that is no HDF5.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _opened(self.path) as file:
            check_format(file, FORMAT, VERSION, DataError)
            tokens = _dataset(file, "tokens", self.path)
            self.length = int(tokens.shape[0])
            self.dtype: np.dtype[Any] = tokens.dtype
            self.vocab = _number(file, "vocab", self.path)
            self.max_id = _number(file, "max_id", self.path)
            self.tokenizer = text_attribute(file.attrs, "tokenizer") or "unknown"
            self.num_documents = int(_dataset(file, "documents", self.path).shape[0])
            self._check_width()
            offset = tokens.id.get_offset()  # None for chunked or compressed data, and for no data
        self._map: np.memmap[Any, Any] | None = None
        if offset is not None and self.length:
            self._map = np.memmap(self.path, dtype=self.dtype, mode="r", offset=offset, shape=(self.length,))

    def _check_width(self) -> None:
        """Ids of a vocabulary that the stored type can't hold have lost their high bits, or were never stored so."""
        held = int(np.iinfo(self.dtype).max) + 1
        if self.length and self.vocab > held:
            raise DataError(
                f"{self.path}: a vocabulary of {self.vocab} ids is declared, but /tokens is stored as {self.dtype}, "
                f"which holds {held}; build the file again with {token_dtype(self.vocab)}"
            )

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens start .. stop-1 in the file's dtype, a copy. Raises DataError outside the file."""
        if not 0 <= start <= stop <= self.length:
            raise DataError(f"{self.path}: tokens {start} to {stop} were asked for, the file has {self.length}")
        if self._map is not None:
            return np.array(self._map[start:stop])
        with _opened(self.path) as file:
            piece: Tokens = file["tokens"][start:stop]
        return piece

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """Position of the first token of each document."""
        with _opened(self.path) as file:
            return np.asarray(file["documents"][:], dtype=np.int64)

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer's JSON text, where the file holds one."""
        with _opened(self.path) as file:
            if "tokenizer" not in file:
                return None
            try:
                return read_text(file, "tokenizer")
            except (TypeError, UnicodeDecodeError) as error:
                raise DataError(f"{self.path}: /tokenizer is no text ({error})") from error

    @property
    def info(self) -> TokensInfo:
        """All the file says about itself."""
        with _opened(self.path) as file:
            group = file.get("sources")
            rows: list[Source] = []
            if group is not None:
                columns = (group["path"].asstr()[:], group["size_bytes"][:], group["checksum"].asstr()[:])
                rows = [Source(str(p), int(size), str(check)) for p, size, check in zip(*columns, strict=True)]
            lengths = _shortest_and_longest(np.asarray(file["documents"][:], dtype=np.int64), self.length)
            has_tokenizer = "tokenizer" in file
        about = (self.path, self.length, self.vocab, self.max_id, self.dtype, self.tokenizer, self.num_documents)
        return TokensInfo(*about, tuple(rows), *lengths, has_tokenizer)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes); it is no token file")
    try:
        file = open_file(path)
    except OSError as error:
        raise DataError(f"{path}: can't be read as HDF5 ({error})") from error
    with file:
        yield file


def _dataset(file: Any, name: str, path: Path) -> Any:
    item = file.get(name)
    shape = getattr(item, "shape", None)
    if shape is None or len(shape) != 1 or item.dtype.kind not in "iu":
        raise DataError(f"{path}: /{name} is missing or is no list of integers")
    return item


def _number(file: Any, name: str, path: Path) -> int:
    value = file.attrs.get(name)
    if not isinstance(value, int | np.integer):
        raise DataError(f"{path}: the attribute {name} is missing or is no integer")
    return int(value)

"""The documents that a token file is made of: the files, or what lies between the separator lines in them.

A document is a file unless a separator line is given; documents follow each other in the order of the files' paths.
Empty files make no document, and neither does nothing between two separators.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import xxhash

from mpipipe.errors import ConfigError, DataError
from mpipipe.formats.hdf5 import SIGNATURE
from mpipipe.formats.tokens import Source
from mpipipe.units import counted

STANDARD_INPUT = "standard input"
_SLICE = 1 << 22
_HEAD_BYTES = 8192

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TextFile:
    """A file with at least one byte; ``name`` is its path, or says that it came by standard input."""

    path: Path
    size_bytes: int
    name: str


@dataclass(frozen=True)
class Document:
    """The bytes start .. stop-1 of a file."""

    file: TextFile
    start: int
    stop: int

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.file.name if self.start == 0 else f"{self.file.name}, document from byte {self.start} on"


def find_files(entries: Sequence[str], exclude: Sequence[str] = ()) -> list[Path]:
    """The files of a list of files, folders (all files below, except hidden ones) and globs; sorted, each once.

    ``exclude``: names, with wildcards, of files and folders to leave out of what folders and globs find. Raises
    ConfigError for an entry that names no file.
    """
    found: set[Path] = set()
    for entry in entries:
        path = Path(entry)
        if path.is_dir():
            below = [file for file in path.rglob("*") if file.is_file()]
            files = [file for file in below if not _is_left_out(file.relative_to(path), (".*", *exclude))]
        elif path.exists():
            files = [path]
        else:
            root = _fixed_part(path)
            matches = [Path(match) for match in glob.glob(entry, recursive=True)]
            files = [file for file in matches if file.is_file() and not _is_left_out(file.relative_to(root), exclude)]
        if not files:
            raise ConfigError(f"{entry} names no file (current folder: {Path.cwd()})", value=entry)
        found.update(files)
    return sorted(found)


def _is_left_out(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(part, pattern) for part in path.parts for pattern in patterns)


def _fixed_part(pattern: Path) -> Path:
    """The folders of a glob before its first wildcard."""
    fixed = Path()
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def find_texts(paths: Sequence[str | Path], *, binary: bool) -> list[TextFile]:
    """Every file with at least one byte, in the order of their paths, each once.

    Raises DataError for no paths, a path that is no file, no byte at all, and without ``binary`` for a file that is no
    text: one that begins as HDF5 does, or has a NUL in its first 8192 bytes.
    """
    if not paths:
        raise DataError("no text file is named")
    files = []
    for path in sorted({Path(path) for path in paths}):
        if not path.is_file():
            what = "is a folder; name its files" if path.is_dir() else "does not exist"
            raise DataError(f"{path} {what} (current folder: {Path.cwd()})")
        files.append(TextFile(path, path.stat().st_size, str(path)))
    filled = [file for file in files if file.size_bytes]
    if not filled:
        raise DataError(f"there is no byte in the {counted(len(files), 'file')} named: {files[0].path} ...")
    if not binary:
        _refuse_binary([file.path for file in filled])
    return filled


@contextlib.contextmanager
def kept_input(stream: IO[bytes], folder: Path, progress: Progress | None, *, binary: bool) -> Iterator[TextFile]:
    """Standard input as a temporary file in ``folder``, for as long as the context lasts. ``progress(bytes, 0)``:
    the end is not known.

    Raises DataError for no byte, and without ``binary`` for what is no text.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".standard-input-") as kept:
        size = 0
        while piece := stream.read(_SLICE):
            kept.write(piece)
            size += len(piece)
            if progress is not None:
                progress(size, 0)
        kept.flush()
        if not size:
            raise DataError(f"there is no byte in {STANDARD_INPUT}; is there a program before the pipe (|)?")
        if not binary and (why := _why_no_text(Path(kept.name))) is not None:
            raise DataError(f"{STANDARD_INPUT} is no text: it {why}; take its bytes as they are with --binary")
        yield TextFile(Path(kept.name), size, STANDARD_INPUT)


def find_documents(files: Sequence[TextFile], separator: str | None) -> list[Document]:
    """All documents in order; with ``separator`` each file is cut at the lines that are exactly it, which belong to no
    document. Raises DataError for a separator of several lines, and where nothing is between the separators.
    """
    if separator is None:
        return [Document(file, 0, file.size_bytes) for file in files]
    if "\n" in separator or "\r" in separator:
        raise DataError(f"--split {separator!r}: a separator is one line, without its end")
    found = [
        Document(file, start, stop) for file in files for start, stop in _between_lines(file.path, separator.encode())
    ]
    if not found:
        raise DataError(f"--split {separator!r}: there is nothing but separators in {counted(len(files), 'file')}")
    return found


def _between_lines(path: Path, line: bytes) -> Iterator[tuple[int, int]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        size, begin, at = len(content), 0, 0
        while at < size:
            end = content.find(b"\n", at) + 1 or size
            if end - at <= len(line) + 2 and content[at:end].rstrip(b"\r\n") == line:
                if at > begin:
                    yield begin, at
                begin = end
            at = end
        if size > begin:
            yield begin, size


class Reader:
    """Maps documents one after another and reports how far it has come, over all that is read in ``total_bytes``."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.total_bytes, self.done_bytes, self.progress = total_bytes, 0, progress
        self._sources: dict[TextFile, Source] = {}

    def contents(self, documents: Sequence[Document]) -> Iterator[tuple[Document, npt.NDArray[np.uint8]]]:
        """Each document with its bytes (size,)."""
        for document in documents:
            size = document.stop - document.start
            yield (
                document,
                np.memmap(document.file.path, dtype=np.uint8, mode="r", offset=document.start, shape=(size,)),
            )
            self.done_bytes += size
            if self.progress is not None:
                self.progress(self.done_bytes, self.total_bytes)

    def sources(self, documents: Sequence[Document]) -> list[Source]:
        """One row for each file that the documents are of, in their order."""
        return [self._source(file) for file in dict.fromkeys(document.file for document in documents)]

    def _source(self, file: TextFile) -> Source:
        if file not in self._sources:
            digest = xxhash.xxh3_64()
            with file.path.open("rb") as content:
                while piece := content.read(_SLICE):
                    digest.update(piece)
            self._sources[file] = Source(file.name, file.size_bytes, f"xxh3:{digest.hexdigest()}")
        return self._sources[file]


def _refuse_binary(paths: Sequence[Path]) -> None:
    """Raise DataError where files are no text, naming the first."""
    found = [(path, why) for path in paths if (why := _why_no_text(path)) is not None]
    if not found:
        return
    path, why = found[0]
    more = f", and {counted(len(found) - 1, 'file')} more of {len(paths)} as well" if len(found) > 1 else ""
    raise DataError(
        f"{path} is no text: it {why}{more}. Leave it out (found in a folder or by a glob: --exclude "
        f"{shlex.quote(path.name)}), or take its bytes as they are with --binary"
    )


def _why_no_text(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(SIGNATURE):
        return "is an HDF5 file"
    return "holds a NUL byte" if b"\0" in head else None

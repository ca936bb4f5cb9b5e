"""Token files from text files, one token a byte, and what a model of bytes can reach at best.

A document is a file; documents follow each other in the order of their paths, byte for byte and with nothing between
them, so that the tokens of one file are the file. Their start offsets are kept in the token file. Empty files make no
document.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mpipipe.errors import DataError
from mpipipe.formats.tokens import Source, TokensInfo, write_tokens
from mpipipe.units import counted

BYTE_VOCAB = 256
BYTE_TOKENIZER = "bytes"
_SLICE = 1 << 22
_HEAD_BYTES = 8192
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BuiltTokens:
    """What was written: the training file, and the validation file where one was asked for."""

    train: TokensInfo
    validation: TokensInfo | None


def build_byte_tokens(
    paths: Sequence[str | Path],
    output: str | Path,
    progress: Progress | None = None,
    *,
    validation: str | Path | None = None,
    validation_every: int = 0,
    binary: bool = False,
    overwrite: bool = False,
) -> BuiltTokens:
    """Write ``output``, the bytes of the files as token ids 0 to 255, and the sources with sizes and xxh3 checksums.

    With ``validation`` the documents number k, 2k, 3k, ... (k = ``validation_every``, counted from 1 over the files
    that are not empty) go to that file instead. ``binary``: take the bytes of files that are no text too.
    ``progress(done_bytes, total_bytes)`` is called after each file. Nothing is written before all paths have been
    found. Raises DataError for a path that is no file, no paths, no byte at all, an output that exists, a split that
    leaves one side empty, and without ``binary`` for a file that is no text: one that begins as HDF5 does, or has a
    NUL in its first 8192 bytes.
    """
    files = _checked_files(paths)
    if not binary:
        _refuse_binary([path for path, _ in files])
    total = sum(size for _, size in files)
    reader = _Reader(total, progress)
    if validation is None:
        if validation_every:
            raise DataError(f"validation_every = {validation_every}, but no validation file is named")
        return BuiltTokens(_write(output, files, reader, overwrite), None)
    if validation_every < 2:
        raise DataError(f"{validation}: validation_every is at least 2; {validation_every} was asked for")
    if Path(validation).absolute() == Path(output).absolute():
        raise DataError(f"{output} is named for training and for validation")
    if len(files) < validation_every:
        raise DataError(
            f"{validation}: with --validation-every {validation_every} nothing of {counted(len(files), 'file')} with "
            "text is held out; give more files or a smaller number"
        )
    for name in (output, validation):  # both before either is written
        if Path(name).exists() and not overwrite:
            raise DataError(f"{name}: the file exists; choose another name, or --overwrite to replace it")
    held = files[validation_every - 1 :: validation_every]
    kept = [entry for number, entry in enumerate(files, 1) if number % validation_every]
    return BuiltTokens(_write(output, kept, reader, overwrite), _write(validation, held, reader, overwrite))


def _checked_files(paths: Sequence[str | Path]) -> list[tuple[Path, int]]:
    """(path, size) of every file with at least one byte, in the order of their paths, each once."""
    if not paths:
        raise DataError("no text file is named")
    files = []
    for path in sorted({Path(path) for path in paths}):
        if not path.is_file():
            what = "is a folder; name its files" if path.is_dir() else "does not exist"
            raise DataError(f"{path} {what} (current folder: {Path.cwd()})")
        files.append((path, path.stat().st_size))
    filled = [(path, size) for path, size in files if size]
    if not filled:
        raise DataError(f"there is no byte in the {counted(len(files), 'file')} named: {files[0][0]} ...")
    return filled


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
    if head.startswith(_HDF5_SIGNATURE):
        return "is an HDF5 file"
    return "holds a NUL byte" if b"\0" in head else None


class _Reader:
    """Maps files one after another and reports how far it has come."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.total_bytes, self.done_bytes, self.progress = total_bytes, 0, progress

    def documents(self, files: Sequence[tuple[Path, int]], sources: list[Source]) -> Iterator[npt.NDArray[Any]]:
        """The bytes of each file, uint8 (size,); appends its row to ``sources``."""
        for path, size in files:
            content = np.memmap(path, dtype=np.uint8, mode="r", shape=(size,))
            digest = xxhash.xxh3_64()
            for first in range(0, size, _SLICE):
                digest.update(content[first : first + _SLICE].tobytes())
            sources.append(Source(str(path), size, f"xxh3:{digest.hexdigest()}"))
            yield content
            self.done_bytes += size
            if self.progress is not None:
                self.progress(self.done_bytes, self.total_bytes)


def _write(output: str | Path, files: Sequence[tuple[Path, int]], reader: _Reader, overwrite: bool) -> TokensInfo:
    sources: list[Source] = []
    documents = reader.documents(files, sources)
    return write_tokens(output, documents, BYTE_VOCAB, BYTE_TOKENIZER, lambda: sources, overwrite=overwrite)


def byte_entropies(tokens: npt.NDArray[Any]) -> tuple[float, float]:
    """Unigram entropy H(x) and conditional entropy H(next | previous) of byte tokens, in nats a token, from the
    counts themselves.

    ``tokens``: integers 0 to 255 of shape (tokens,), at least 2. The conditional one is over the pairs of neighbours,
    document borders not regarded. A model that beats the second one has learned more than pairs. Raises DataError for
    fewer tokens or another id.
    """
    if tokens.ndim != 1 or len(tokens) < 2:
        raise DataError(f"entropies need at least 2 tokens; found an array of shape {tokens.shape}")
    pairs = np.zeros(BYTE_VOCAB**2, dtype=np.int64)
    singles = np.zeros(BYTE_VOCAB, dtype=np.int64)
    for first in range(0, len(tokens), _SLICE):
        piece = np.asarray(tokens[first : first + _SLICE + 1], dtype=np.int64)
        if int(piece.min()) < 0 or int(piece.max()) >= BYTE_VOCAB:
            raise DataError(f"token id {int(piece.min() if piece.min() < 0 else piece.max())} is no byte")
        singles += np.bincount(piece[:_SLICE], minlength=BYTE_VOCAB)
        pairs += np.bincount(piece[:-1] * BYTE_VOCAB + piece[1:], minlength=BYTE_VOCAB**2)
    previous = pairs.reshape(BYTE_VOCAB, BYTE_VOCAB).sum(axis=1)
    return _entropy(singles), _entropy(pairs) - _entropy(previous)


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution of the counts."""
    total = int(counts.sum())
    used = counts[counts > 0].astype(np.float64)
    return math.log(total) - math.fsum(used * np.log(used)) / total

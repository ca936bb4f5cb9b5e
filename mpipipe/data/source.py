"""Batches from token files: non-overlapping windows of ``sequence`` tokens and the token after each as the last
label.

A file of N tokens has (N - 1) // sequence windows; the tokens after its last window are not used. Samples are
numbered over the whole run; after the last window of an epoch the next epoch begins, also in the middle of a batch.
Input i and target i always come from one window, so a rank that needs only one of them still takes it from the same
place.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from mpipipe.data.sampling import sample_windows
from mpipipe.errors import DataError
from mpipipe.formats.tokens import TokensFile

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]

_LOOKED_AT = 4096
_FEWEST_PAIRS = 32


class Batch(NamedTuple):
    """``inputs`` and ``targets``: int64 (sequences, sequence), targets the inputs one token later."""

    inputs: Ids
    targets: Ids


def expand_paths(entries: Sequence[str], key: str) -> list[Path]:
    """Files of a list of paths and globs: globs sorted, entries in their order, a file named twice taken once.

    Raises DataError naming ``key`` for an empty list, a path that is no file, and a glob without a match.
    """
    if not entries:
        raise DataError(f"{key}: no file is named; give paths or globs of token files")
    found: dict[Path, None] = {}
    for entry in entries:
        if glob.has_magic(entry) and not Path(entry).exists():
            matches = sorted(Path(match) for match in glob.glob(entry, recursive=True) if Path(match).is_file())
            if not matches:
                raise DataError(f"{key}: no file matches {entry!r} (current folder: {Path.cwd()})")
            found.update(dict.fromkeys(matches))
        elif Path(entry).is_file():
            found[Path(entry)] = None
        else:
            what = "is no file" if Path(entry).exists() else "does not exist"
            raise DataError(f"{key}: {entry} {what} (current folder: {Path.cwd()})")
    return list(found)


class TokenSource:
    """All windows of one or several token files, and the batches of a run made of them.

    ``vocab`` and ``sequence`` are model.vocab and model.sequence; ``key`` names the list of files in messages
    (``data.train``). Raises DataError for a missing or empty file, one with less than one window, and one that holds
    an id the model has not.
    """

    def __init__(
        self,
        entries: Sequence[str],
        *,
        sequence: int,
        vocab: int,
        seed: int = 0,
        shuffle: bool = True,
        key: str = "data.train",
    ) -> None:
        self.sequence, self.vocab, self.seed, self.shuffle, self.key = sequence, vocab, seed, shuffle, key
        self.files = [TokensFile(path) for path in expand_paths(entries, key)]
        for file in self.files:
            self._check_file(file)
        self._ends = np.cumsum([(file.length - 1) // sequence for file in self.files])

    def _check_file(self, file: TokensFile) -> None:
        if file.length < self.sequence + 1:
            raise DataError(
                f"{self.key}: {file.path} has {file.length} tokens, less than one window of model.sequence + 1 = "
                f"{self.sequence + 1}; leave it out or use a shorter model.sequence"
            )
        if file.max_id >= self.vocab:
            raise DataError(
                f"{self.key}: {file.path} holds token id {file.max_id} (its vocabulary: {file.vocab}), but "
                f"model.vocab is {self.vocab}; set model.vocab to {max(file.vocab, file.max_id + 1)}"
            )
        if _looks_split(file):
            logger.warning(
                "%s: %s holds 0 as every second token, as when ids of 32 bits were stored or declared as %s; if they "
                "were, build the file again",
                self.key,
                file.path,
                file.dtype,
            )
        if file.vocab > self.vocab:
            logger.info("%s was made with a vocabulary of %d, model.vocab is %d", file.path, file.vocab, self.vocab)

    @property
    def num_windows(self) -> int:
        """Windows in one epoch."""
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits for what the windows are cut from: lengths and sources of the files in order, and the
        sequence. The order of a run's samples means the same only with the same fingerprint.
        """
        facts = [(file.length, [source.checksum for source in file.info.sources]) for file in self.files]
        return xxhash.xxh3_64_hexdigest(repr((self.sequence, facts)).encode())

    def batch(self, start_sample: int, count: int) -> Batch:
        """The samples start_sample .. start_sample+count-1 of the run. Raises DataError for an id outside 0 ..
        model.vocab-1.
        """
        windows = sample_windows(self.seed, start_sample, count, self.num_windows, self.shuffle)
        tokens = np.empty((count, self.sequence + 1), dtype=np.int64)
        numbers = np.searchsorted(self._ends, windows, side="right")
        for row, (window, number) in enumerate(zip(windows.tolist(), numbers.tolist(), strict=True)):
            first = self._first_token(window, number)
            tokens[row] = self.files[number].read(first, first + self.sequence + 1)
        if count and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab):
            raise self._bad_id(tokens, windows, numbers)
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())

    def _first_token(self, window: int, number: int) -> int:
        """Position in file ``number`` of the first token of a window (numbered over all files)."""
        before = int(self._ends[number - 1]) if number else 0
        return (window - before) * self.sequence

    def _bad_id(self, tokens: Ids, windows: Ids, numbers: npt.NDArray[np.intp]) -> DataError:
        row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab))[0].tolist()
        number = int(numbers[row])
        position = self._first_token(int(windows[row]), number) + column
        return DataError(
            f"{self.key}: {self.files[number].path}, position {position}: token id {int(tokens[row, column])} "
            f"is outside 0 to {self.vocab - 1} (model.vocab = {self.vocab})"
        )


def _looks_split(file: TokensFile) -> bool:
    """Whether the first tokens look like 32-bit ids read as 16-bit ones: each followed by its upper half, 0. Bytes of
    UTF-16 text look so too, and are not meant.
    """
    head = file.read(0, min(file.length, _LOOKED_AT))
    if file.dtype.itemsize > 2 or file.vocab <= 256 or len(head) < 2 * _FEWEST_PAIRS:
        return False
    return not head[1::2].any() and bool(np.count_nonzero(head[::2]) > _FEWEST_PAIRS // 2)

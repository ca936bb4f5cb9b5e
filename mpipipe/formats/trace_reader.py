"""Reading a trace file back: finished, still being written, killed or cut.

A cut file is read through a view that pretends the missing bytes are there, chunk by chunk; a record counts only if
its bytes are really in the file. Nothing is repaired: what is lost is said.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpipipe.errors import TraceFormatError
from mpipipe.formats import hdf5
from mpipipe.formats.paths import PART_SUFFIX
from mpipipe.formats.trace_layout import CLOCK_DTYPE, EVENT_DTYPE, FORMAT, STEP_DTYPE, VERSION

_BROKEN = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)  # h5py, where bytes are missing
_PRETENDED_BYTES = 1 << 40


@dataclass(frozen=True)
class TraceSchedule:
    """A ``/schedule/<id>``: one tuple of action texts a rank (compute only), the rank of each stage, predicted
    costs."""

    name: str
    rows: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    costs: dict[str, float | tuple[float, ...]]


@dataclass(frozen=True)
class TraceFile:
    """One rank's trace as kept: times are the rank's own clock.

    ``attributes``: numbers and texts of the file's root. ``events`` (EVENT_DTYPE), ``clock`` (CLOCK_DTYPE), ``steps``
    (STEP_DTYPE): arrays in file order. ``model``: array with the fields of MODEL_DTYPE, None if not kept.
    ``complete``: the run closed the file in order. ``warnings``: what is lost, and where; empty for a whole file.
    """

    path: Path
    attributes: dict[str, Any]
    events: npt.NDArray[np.void]
    clock: npt.NDArray[np.void]
    steps: npt.NDArray[np.void]
    schedules: dict[int, TraceSchedule]
    model: npt.NDArray[np.void] | None
    config: str
    complete: bool
    warnings: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.attributes["rank"])


def read_trace(path: str | Path) -> TraceFile:
    """Read a trace file, finished or ``.part``, and every whole record of a cut one.

    Raises FileNotFoundError; TraceFormatError for a file that is empty, no HDF5, of another kind, newer than this
    reader, or cut so early that its tables can't be found: the message names file, group, and the version found and
    supported.
    """
    path = Path(path)
    size = path.stat().st_size
    if not size:
        raise TraceFormatError(f"{path}: empty file (0 bytes); {FORMAT!r} version 1 to {VERSION} supported")
    warnings: list[str] = []
    with _opened(path, size, warnings) as file:
        try:
            hdf5.check_format(file, FORMAT, VERSION, TraceFormatError)
            attributes = {key: _plain(value) for key, value in file.attrs.items()}
            lacking = [key for key in ("rank", "world_size", "p", "v", "d") if key not in attributes]
        except _BROKEN as error:
            if isinstance(error, TraceFormatError):
                raise TraceFormatError(str(error).replace(str(file.filename), str(path), 1)) from None
            raise TraceFormatError(f"{path}: group /: attributes unreadable ({_short(error)})") from None
        if lacking:
            raise TraceFormatError(f"{path}: group /: attributes lacking: {', '.join(lacking)}")
        reader = _Reader(path, file, size, warnings)
        trace = TraceFile(
            path=path,
            attributes=attributes,
            events=reader.table("events", EVENT_DTYPE, needed=True),
            clock=reader.table("clock", CLOCK_DTYPE),
            steps=reader.table("steps", STEP_DTYPE),
            schedules=reader.schedules(),
            model=reader.model(),
            config=reader.config(),
            complete=bool(attributes.get("complete", False)),
            warnings=warnings,
        )
    dropped = int(attributes.get("dropped_events", 0))
    if dropped:
        warnings.append(f"{path}: {dropped} events were dropped while the run went on (the file could not be written)")
    if path.suffix == PART_SUFFIX:
        warnings.append(f"{path}: not closed: the run writes it or was killed; rows after the last flush are lost")
    return trace


@contextmanager
def _opened(path: Path, size: int, warnings: list[str]) -> Iterator[h5py.File]:
    reason = ""
    file = None
    for locking in (False, "best-effort"):  # the second for a file that this process itself still writes
        try:
            file = hdf5.open_file(path, "r", locking=locking)
            break
        except OSError as error:
            reason = reason or _short(error)
    if file is None:
        try:
            file = h5py.File(_CutFile(path, size), "r")
        except _BROKEN:
            raise TraceFormatError(
                f"{path}: no readable HDF5 file ({reason}); {FORMAT!r} version 1 to {VERSION} supported"
            ) from None
        warnings.append(f"{path}: cut after {size} bytes; whole records before the cut are read")
    with file:
        yield file


class _CutFile(io.RawIOBase):
    """A read-only file that hides its early end from HDF5, so that it opens what is left."""

    def __init__(self, path: Path, size: int) -> None:
        self._file = path.open("rb")
        self._size = size
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size + _PRETENDED_BYTES}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._size:
            raise OSError(f"bytes from {self._position} on are missing")
        self._file.seek(self._position)
        data = self._file.read(len(view))
        view[: len(data)] = data
        view[len(data) :] = b"\xff" * (len(view) - len(data))  # as zeros, HDF5 follows some lists round for ever
        self._position += len(view)
        return len(view)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Reader:
    """The tables of an open trace file; what can't be read is left out and noted in ``warnings``."""

    def __init__(self, path: Path, file: h5py.File, size: int, warnings: list[str]) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._warnings = warnings

    def table(self, name: str, dtype: np.dtype[np.void], needed: bool = False) -> npt.NDArray[np.void]:
        try:
            dataset = self._file[name]
            names = dataset.dtype.names or ()
            rows = int(dataset.shape[0])
        except _BROKEN as error:
            if needed:
                raise TraceFormatError(f"{self._path}: group /{name}: unreadable ({_short(error)})") from None
            self._warnings.append(f"{self._path}: /{name} unreadable ({_short(error)})")
            return np.zeros(0, dtype)
        lacking = [key for key in dtype.names or () if key not in names]
        if lacking:
            raise TraceFormatError(f"{self._path}: group /{name}: fields lacking: {', '.join(lacking)}; found {names}")
        found, first_lost = self._rows(dataset, dtype, rows)
        if len(found) < rows:
            self._warnings.append(
                f"{self._path}: /{name}: {rows - len(found)} of {rows} rows lost, the first of them row {first_lost}"
            )
        return found

    def _rows(self, dataset: h5py.Dataset, dtype: np.dtype[np.void], rows: int) -> tuple[npt.NDArray[np.void], int]:
        """Every row whose bytes are there, and the first lost row's number (``rows`` if none)."""
        if dataset.file.driver != "fileobj":
            try:
                return _written(_read(dataset, dtype, 0, rows), 0, rows)
            except _BROKEN:
                pass
        parts, lost = [], [rows]
        step = dataset.chunks[0] if dataset.chunks else max(rows, 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            try:
                there = self._rows_on_disk(dataset, start, stop)
                part, first = _written(_read(dataset, dtype, start, start + there), start, start + there)
            except _BROKEN:
                there, part, first = 0, np.zeros(0, dtype), start
            parts.append(part)
            if len(part) < stop - start:
                lost.append(min(first, start + there))
        return np.concatenate(parts) if parts else np.zeros(0, dtype), min(lost)

    def _rows_on_disk(self, dataset: h5py.Dataset, start: int, stop: int) -> int:
        """How many of the rows ``start`` to ``stop`` (one chunk) lie before the file's end."""
        if dataset.chunks is None:
            offset, row_bytes = dataset.id.get_offset(), dataset.dtype.itemsize
            return 0 if offset is None else int(np.clip((self._size - offset) // row_bytes, 0, stop - start))
        info = dataset.id.get_chunk_info_by_coord((start,))
        if info.byte_offset is None:
            return 0
        if dataset.compression:
            return stop - start if info.byte_offset + info.size <= self._size else 0
        return int(np.clip((self._size - info.byte_offset) // dataset.dtype.itemsize, 0, stop - start))

    def schedules(self) -> dict[int, TraceSchedule]:
        found: dict[int, TraceSchedule] = {}
        try:
            group = self._file["schedule"]
            for key in group:
                found[int(key)] = _schedule(group[key])
        except _BROKEN as error:
            self._warnings.append(f"{self._path}: /schedule unreadable ({_short(error)})")
        return found

    def model(self) -> npt.NDArray[np.void] | None:
        try:
            table: npt.NDArray[np.void] | None = self._file["model"][:] if "model" in self._file else None
        except _BROKEN as error:
            self._warnings.append(f"{self._path}: /model unreadable ({_short(error)})")
            return None
        return table

    def config(self) -> str:
        try:
            return hdf5.read_text(self._file, "config")
        except _BROKEN as error:
            self._warnings.append(f"{self._path}: /config unreadable ({_short(error)})")
            return ""


def _read(dataset: h5py.Dataset, dtype: np.dtype[np.void], start: int, stop: int) -> npt.NDArray[np.void]:
    """Rows as ``dtype``; fields are found by name, so that a later version may add some."""
    result = np.zeros(stop - start, dtype)
    if stop > start:
        dataset.read_direct(result, np.s_[start:stop])
    return result


def _written(rows: npt.NDArray[np.void], start: int, stop: int) -> tuple[npt.NDArray[np.void], int]:
    """Without the rows that were never written (a disk that kept the length and not the data): their times are
    zero."""
    names = rows.dtype.names or ()
    if "t1_ns" not in names or not len(rows):
        return rows, stop
    there = rows["t1_ns"] != 0
    return (rows, stop) if there.all() else (rows[there], start + int(np.argmin(there)))


def _schedule(group: h5py.Group) -> TraceSchedule:
    costs: dict[str, float | tuple[float, ...]] = {}
    for key, dataset in group.get("costs", {}).items():
        value = dataset[()]
        costs[key] = float(value) if np.ndim(value) == 0 else tuple(float(each) for each in value)
    rows = tuple(tuple(line.decode("utf-8").split()) for line in group["rows"][:])
    placement = tuple(int(rank) for rank in group["placement"][:])
    return TraceSchedule(hdf5.text_attribute(group.attrs, "name") or "", rows, placement, costs)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, np.generic) else value


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].strip("'\"")

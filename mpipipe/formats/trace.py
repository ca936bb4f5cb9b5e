"""Trace files: ``trace/segment-0002/rank-00003.h5``, one segment a launch, one file a rank.

While a run writes it the file's name ends in ``.part``: uncompressed, appended and flushed, so that a killed rank
loses no flushed row. :meth:`TraceWriter.close` rewrites it compressed in whole chunks, flushes it to the disk and
renames it. The layout is described in docs/formats.md.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from mpipipe.formats import hdf5
from mpipipe.formats.paths import closing_of, part_of
from mpipipe.formats.trace_layout import (
    CHUNK_ROWS,
    CLOCK,
    CLOCK_DTYPE,
    COMPUTE_KINDS,
    EVENT_DTYPE,
    EVENT_STRUCT,
    FLAG_DEVICE_TIME,
    FLAG_GRADIENT,
    FLAG_LOCAL,
    FORMAT,
    LAST_COMPUTE_KIND,
    LAST_PIPELINE_KIND,
    MODEL_DEFAULTS,
    MODEL_DTYPE,
    STEP_DTYPE,
    VERSION,
    EventKind,
)
from mpipipe.formats.trace_reader import TraceFile, TraceSchedule, read_trace
from mpipipe.formats.whole import sync

__all__ = [
    "CLOCK_DTYPE",
    "COMPUTE_KINDS",
    "EVENT_DTYPE",
    "EVENT_STRUCT",
    "FLAG_DEVICE_TIME",
    "FLAG_GRADIENT",
    "FLAG_LOCAL",
    "FORMAT",
    "LAST_COMPUTE_KIND",
    "LAST_PIPELINE_KIND",
    "MODEL_DTYPE",
    "STEP_DTYPE",
    "VERSION",
    "EventKind",
    "TraceFile",
    "TraceSchedule",
    "TraceWriter",
    "read_trace",
]

_log = logging.getLogger(__name__)
_REQUIRED = ("rank", "world_size", "p", "v", "d")
_SPARE_BYTES = 1 << 20  # kept free: HDF5 can't close a file on a full disk, and may crash the interpreter at exit


class TraceWriter:
    """Writes one rank's trace file; single-threaded.

    ``path`` is the finished file's name. ``header``: ``rank``, ``world_size``, ``p``, ``v``, ``d`` (whole numbers,
    required); ``host``, ``mpi_library``, ``run_id`` (text, one for all ranks of a run), ``segment``,
    ``pipeline_rank`` and ``replica`` (if they differ from rank % p and rank // p); ``config`` (text of the resolved
    run file, kept as a dataset). Further numbers and texts become attributes. Raises KeyError for a missing key,
    FileExistsError if either name exists (an old segment is never touched), OSError if the disk is full or the folder
    can't be made.
    """

    def __init__(self, path: str | Path, header: Mapping[str, object]) -> None:
        missing = [key for key in _REQUIRED if key not in header]
        if missing:
            raise KeyError(f"trace header lacks {', '.join(missing)}")
        self.path = Path(path)
        self.part = part_of(self.path)
        self.dropped_events = 0
        self.closed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.part):
            if path.exists():
                raise FileExistsError(errno.EEXIST, "trace file exists; a new launch writes a new segment", str(path))
        self._require_space(_SPARE_BYTES)
        self._file = hdf5.open_file(self.part, "x")
        try:
            _write_header(self._file, header)
            self._events = _Table(self._file, "events", EVENT_DTYPE, CHUNK_ROWS)
            self._clock = _Table(self._file, "clock", CLOCK_DTYPE, 256)
            self._steps = _Table(self._file, "steps", STEP_DTYPE, 512)
            self._file.create_group("schedule")
            self._file.flush()
        except BaseException:
            self.discard()
            raise

    def append_events(self, records: bytes | bytearray | memoryview | npt.NDArray[np.void]) -> None:
        """Append whole 60-byte records (EVENT_STRUCT or an array of EVENT_DTYPE); not on disk before :meth:`flush`.

        Raises ValueError if the length is no multiple of 60; OSError if it can't be written: then nothing was
        appended.
        """
        view = memoryview(records).cast("B") if not isinstance(records, np.ndarray) else records.view("u1").data
        if view.nbytes % EVENT_STRUCT.size:
            raise ValueError(f"{view.nbytes} bytes are not whole events of {EVENT_STRUCT.size} bytes")
        if view.nbytes:
            self._require_space(view.nbytes + CHUNK_ROWS * EVENT_STRUCT.size)
            self._events.append(np.frombuffer(view, EVENT_DTYPE))

    def append_clock(self, local_ns: int, offset_ns: int, rtt_ns: int) -> None:
        """A clock sample: ``offset_ns`` = rank 0's clock minus this rank's at ``local_ns``; ``rtt_ns`` the round
        trip."""
        self._clock.append(np.array([(local_ns, offset_ns, rtt_ns)], CLOCK_DTYPE))

    def append_step(self, step: int, t0_ns: int, t1_ns: int, tokens: int, loss: float | None, table: int) -> None:
        """A finished step in local time; ``loss`` None is kept as NaN; ``table`` names a ``/schedule/<id>``."""
        value = float("nan") if loss is None else loss
        self._steps.append(np.array([(step, table, t0_ns, t1_ns, tokens, value)], STEP_DTYPE))

    def add_schedule(
        self,
        table_id: int,
        rows: Sequence[Sequence[str]],
        placement: Sequence[int],
        costs: Mapping[str, float | Sequence[float]] | None = None,
        name: str = "",
    ) -> None:
        """Keep the table as executed: one row of action texts a rank (compute only), the rank of each stage,
        predicted costs.

        ``costs`` maps F, I, W, latency to a number or to one per stage, in the planner's unit. Raises ValueError for
        an id outside 0..65535 or already used.
        """
        if not 0 <= table_id <= 0xFFFF:
            raise ValueError(f"schedule id {table_id} is outside 0..65535")
        if str(table_id) in self._file["schedule"]:
            raise ValueError(f"schedule id {table_id} is already in {self.part}")
        group = self._file["schedule"].create_group(str(table_id))
        group.attrs["name"] = name
        lines = [" ".join(row) for row in rows]
        group.create_dataset("rows", data=lines, dtype=hdf5.text_dtype(), shape=(len(lines),))
        group.create_dataset("placement", data=np.asarray(placement, "<i4"))
        for key, value in (costs or {}).items():
            group.create_dataset(f"costs/{key}", data=np.asarray(value, "<f8"))
        self.flush()

    def set_model(self, stages: Sequence[Mapping[str, object]]) -> None:
        """Keep the per-stage table: dicts with ``stage`` and any of the other fields of MODEL_DTYPE.

        ``layers`` may be a list of names. Raises ValueError for an unknown field.
        """
        table = np.zeros(len(stages), MODEL_DTYPE)
        for index, stage in enumerate(stages):
            unknown = set(stage) - set(MODEL_DTYPE.names or ())
            if unknown:
                raise ValueError(f"unknown field of a stage: {sorted(unknown)}; known: {MODEL_DTYPE.names}")
            for key, value in {**MODEL_DEFAULTS, **stage}.items():
                table[key][index] = " ".join(value) if isinstance(value, list | tuple) else value
        if "model" in self._file:
            del self._file["model"]
        self._file.create_dataset("model", data=table)
        self.flush()

    def flush(self) -> None:
        """Hand every appended row to the operating system: it survives the death of this process."""
        if self._file.attrs["dropped_events"] != self.dropped_events:
            self._file.attrs.modify("dropped_events", self.dropped_events)
        self._file.flush()

    def close(self, complete: bool = True) -> None:
        """Rewrite compressed, flush to disk, rename to ``path``; a second call does nothing.

        ``complete`` says that the run ended in order, not that the file is whole. Without room on the disk for a
        second copy the file keeps its rows uncompressed and is renamed as it is. Raises OSError if the file can't be
        closed.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self._file.attrs.modify("complete", np.bool_(complete))
            self.flush()
            whole = self._compressed()
        finally:
            self._file.close()
        sync(whole)
        os.replace(whole, self.path)
        self.part.unlink(missing_ok=True)
        sync(self.path.parent)

    def _compressed(self) -> Path:
        """The file to rename: a compressed copy, or the file as it is."""
        closing = closing_of(self.path)
        try:
            self._require_space(self.part.stat().st_size)
            _rewrite(self._file, closing, self._events.rows)
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning("%s stays uncompressed: %s", self.path, error)
            closing.unlink(missing_ok=True)
            return self.part
        return closing

    def discard(self) -> None:
        """Close and remove the file; for a launch that ends before its first event."""
        self.closed = True
        try:
            self._file.close()
        finally:
            self.part.unlink(missing_ok=True)

    def _require_space(self, nbytes: int) -> None:
        disk = os.statvfs(self.path.parent)
        if disk.f_bavail * disk.f_frsize < nbytes + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes of trace", str(self.path))


class _Table:
    """An extendible dataset, appended to through the low-level calls (33 us a call; the high-level slice costs
    170-200)."""

    def __init__(self, file: h5py.File, name: str, dtype: np.dtype[np.void], chunk_rows: int) -> None:
        self._id = file.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(chunk_rows,)).id
        self._memory_type = h5py.h5t.py_create(dtype)
        self.rows = 0

    def append(self, records: npt.NDArray[np.void]) -> None:
        count = len(records)
        self._id.set_extent((self.rows + count,))
        place = self._id.get_space()
        place.select_hyperslab((self.rows,), (count,))
        self._id.write(h5py.h5s.create_simple((count,)), place, records, self._memory_type)
        self.rows += count


def _write_header(file: h5py.File, header: Mapping[str, object]) -> None:
    hdf5.write_format(file, FORMAT, VERSION)
    attributes = {"host": "", "mpi_library": "", "run_id": "", **header, "clock": CLOCK}
    config = attributes.pop("config", "")
    for key, value in attributes.items():
        file.attrs[key] = np.int64(value) if isinstance(value, int) else value
    file.attrs["dropped_events"] = np.int64(0)
    file.attrs["complete"] = np.bool_(False)
    hdf5.write_text(file, "config", str(config))


def _rewrite(source: h5py.File, path: Path, num_events: int) -> None:
    """Copy everything into ``path``; the events compressed (gzip-1 and shuffle), the other tables of fixed length."""
    path.unlink(missing_ok=True)
    with hdf5.open_file(path, "x") as target:
        for key, value in source.attrs.items():
            target.attrs[key] = value
        for name in ("config", "schedule", "model"):
            if name in source:
                source.copy(name, target)
        for name in ("clock", "steps"):
            target.create_dataset(name, data=source[name][:])
        packed = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
        events = target.create_dataset(
            "events", (num_events,), EVENT_DTYPE, maxshape=(None,), chunks=(CHUNK_ROWS,), **packed
        )
        for start in range(0, num_events, CHUNK_ROWS):
            events[start : start + CHUNK_ROWS] = source["events"][start : start + CHUNK_ROWS]

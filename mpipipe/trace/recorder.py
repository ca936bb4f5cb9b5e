"""Recorder: one rank's events of a step, packed into a preallocated buffer and handed to the trace file in batches.

Recording never stops a training: when the file can't be written the events are counted as dropped, and one warning
says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from mpipipe.formats.trace import EVENT_STRUCT, LAST_COMPUTE_KIND, TraceWriter

_log = logging.getLogger(__name__)
_FLUSH_INTERVAL_NS = 1_000_000_000
_FAILURES = (OSError, RuntimeError, ValueError)  # what h5py raises when a write fails


class Recorder:
    """Records events for one rank; not thread-safe.

    ``writer`` None: nothing is kept, the sums of the step still are. ``capacity``: events buffered before they go to
    the file ahead of the end of a step. ``busy_ns``: durations of F, B, I and W in the current step, in ns of the local
    clock. ``dropped_events`` counts over the whole life.
    """

    __slots__ = (
        "_buffer",
        "_capacity",
        "_failed",
        "_last_flush_ns",
        "_limit",
        "_pack_into",
        "_pending_steps",
        "_position",
        "_record_bytes",
        "_step",
        "_table",
        "_writer",
        "busy_ns",
        "dropped_events",
    )

    def __init__(self, writer: TraceWriter | None, *, capacity: int = 16384) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; at least one event must fit")
        self._writer: TraceWriter | None = None
        self._record_bytes = EVENT_STRUCT.size
        self._capacity = capacity
        self._buffer = bytearray()
        self._limit = 0
        self._position = 0
        self._pack_into = EVENT_STRUCT.pack_into
        self._pending_steps: list[tuple[int, int, int, int, float | None, int]] = []
        self._step = -1
        self._table = 0
        self._failed = False
        self._last_flush_ns = time.monotonic_ns()
        self.busy_ns = 0
        self.dropped_events = 0
        if writer is not None:
            self.attach(writer)

    def attach(self, writer: TraceWriter) -> None:
        """Keep what is recorded from here on, for a recorder made without a writer."""
        self._writer = writer
        self._buffer = bytearray(self._capacity * self._record_bytes)
        self._limit = len(self._buffer)

    def begin_step(self, step: int, table: int) -> None:
        """Events from here on belong to ``step`` and to the schedule table ``table``; ``busy_ns`` starts at
        zero."""
        self._step = step
        self._table = table
        self.busy_ns = 0

    def record(
        self,
        kind: int,
        t0_ns: int,
        t1_ns: int,
        row: int = -1,
        stage: int = -1,
        chunk: int = 255,
        microbatch: int = -1,
        peer: int = -1,
        nbytes: int = -1,
        sequence: int = 0,
        flags: int = 0,
        memory_bytes: int = -1,
    ) -> None:
        """One event; fields as in EVENT_DTYPE, times of CLOCK_MONOTONIC. Raises struct.error for a value out of its
        field."""
        if kind <= LAST_COMPUTE_KIND:
            self.busy_ns += t1_ns - t0_ns
        position = self._position
        if position >= self._limit:
            if self._writer is None:
                return
            self._spill()
            position = 0
        self._pack_into(
            self._buffer,
            position,
            t0_ns,
            t1_ns,
            nbytes,
            memory_bytes,
            self._step,
            row,
            microbatch,
            peer,
            sequence,
            self._table,
            stage,
            flags,
            chunk,
            kind,
        )
        self._position = position + self._record_bytes

    def end_step(self, t0_ns: int, t1_ns: int, tokens: int, loss: float | None) -> None:
        """Close the step that began last. The file is flushed once a step or once a second, whichever is later."""
        if self._writer is None:
            return
        self._pending_steps.append((self._step, t0_ns, t1_ns, tokens, loss, self._table))
        if time.monotonic_ns() - self._last_flush_ns >= _FLUSH_INTERVAL_NS:
            self.flush()

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system now."""
        writer = self._writer
        if writer is None:
            return
        self._spill()
        self._last_flush_ns = time.monotonic_ns()
        try:
            while self._pending_steps:
                writer.append_step(*self._pending_steps[0])
                del self._pending_steps[0]
            writer.dropped_events = self.dropped_events
            writer.flush()
        except _FAILURES as error:
            self._warn(error)

    def add_schedule(
        self, table_id: int, rows: Sequence[Sequence[str]], placement: Sequence[int], name: str = ""
    ) -> None:
        """Keep a compute-only table, one row of action texts a rank, under the id that ``begin_step`` names."""
        if self._writer is None:
            return
        try:
            self._writer.add_schedule(table_id, rows, placement, name=name)
        except _FAILURES as error:
            self._warn(error)

    def clock(self, local_ns: int, offset_ns: int, rtt_ns: int) -> None:
        """Keep a clock sample: rank 0's clock minus this rank's at ``local_ns``, and the round trip that bounds its
        error."""
        if self._writer is None:
            return
        try:
            self._writer.append_clock(local_ns, offset_ns, rtt_ns)
        except _FAILURES as error:
            self._warn(error)

    def close(self, complete: bool = True) -> None:
        """Write what is left and close the file; ``complete``: the run ended in order. A second call does nothing."""
        writer = self._writer
        if writer is None:
            return
        self.flush()
        self._writer = None
        self._limit = self._position = 0
        try:
            writer.close(complete)
        except _FAILURES as error:
            self._warn(error)

    def _spill(self) -> None:
        """Move the buffer's events to the file; count them as dropped if it can't be written."""
        position, self._position = self._position, 0
        if self._writer is None or not position:
            return
        try:
            with memoryview(self._buffer) as view:
                self._writer.append_events(view[:position])
        except _FAILURES as error:
            self.dropped_events += position // self._record_bytes
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("the trace can't be written, events are dropped from here on and training goes on: %s", error)

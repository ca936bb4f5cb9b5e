"""The Recorder: sums of a step, buffer to file, behaviour when the file can't be written."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

from mpipipe.formats.trace import EVENT_STRUCT, FLAG_GRADIENT, EventKind, TraceWriter, read_trace
from mpipipe.trace import Recorder

HEADER = {"rank": 0, "world_size": 1, "p": 1, "v": 1, "d": 1}


class _FailingWriter:
    """Stands for a TraceWriter whose disk is full while ``full`` is true."""

    def __init__(self) -> None:
        self.full = True
        self.dropped_events = 0
        self.events = 0

    def append_events(self, records: memoryview) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.events += len(records) // EVENT_STRUCT.size

    def append_step(self, *_: object) -> None: ...

    def flush(self) -> None:
        if self.full:
            raise RuntimeError("Unable to flush file")

    def close(self, complete: bool) -> None:
        raise OSError(28, "No space left on device")


def _step(recorder: Recorder, step: int) -> None:
    recorder.begin_step(step, 4)
    recorder.record(EventKind.LOAD_DATA, 5, 9)
    recorder.record(EventKind.RECV_WAIT, 10, 30, 0, 1, 0, 2, peer=3, nbytes=64, sequence=8, flags=FLAG_GRADIENT)
    recorder.record(EventKind.F, 30, 70, 0, 1, 0, 2, memory_bytes=1000)
    recorder.record(EventKind.B, 75, 165, 1, 1, 0, 2)
    recorder.record(EventKind.I, 165, 168, 2, 1, 0, 3)
    recorder.record(EventKind.W, 168, 170, 3, 1, 0, 3)
    recorder.record(EventKind.OPTIMIZER, 200, 300)
    recorder.end_step(1, 310, 128, 3.25)


def test_sums_of_a_step_with_and_without_a_file(tmp_path: Path) -> None:
    for recorder in (Recorder(None), Recorder(TraceWriter(tmp_path / "rank-00000.h5", HEADER))):
        for step in (1, 2):
            _step(recorder, step)
            assert recorder.busy_ns == 40 + 90 + 3 + 2
        recorder.begin_step(3, 4)
        assert recorder.busy_ns == 0
        recorder.clock(1, 2, 3)
        recorder.close()
        recorder.close()
        recorder.record(EventKind.F, 1, 2)
        assert recorder.dropped_events == 0
    found = read_trace(tmp_path / "rank-00000.h5")
    assert len(found.events) == 14
    assert found.events[1].tolist() == (10, 30, 64, -1, 1, 0, 2, 3, 8, 4, 1, 1, 0, 4)
    assert found.events[7].tolist() == (5, 9, -1, -1, 2, -1, -1, -1, 0, 4, -1, 0, 255, 7)
    assert found.steps.tolist() == [(1, 4, 1, 310, 128, 3.25), (2, 4, 1, 310, 128, 3.25)]
    assert found.clock.tolist() == [(1, 2, 3)]


def test_a_full_buffer_goes_to_the_file(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank-00000.h5", HEADER)
    recorder = Recorder(writer, capacity=8)
    recorder.begin_step(0, 0)
    for index in range(21):
        recorder.record(EventKind.F, index + 1, index + 2, row=index)
    writer.flush()
    assert len(read_trace(writer.part).events) == 16
    recorder.close(complete=False)
    found = read_trace(writer.path)
    assert np.array_equal(found.events["row"], np.arange(21))
    assert not found.complete
    with pytest.raises(ValueError, match="capacity"):
        Recorder(writer, capacity=0)


def test_flushes_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "rank-00000.h5", HEADER)
    recorder = Recorder(writer)
    now = time.monotonic_ns()
    found = []
    for seconds in (0.1, 0.9, 1.01, 1.5, 2.0, 2.02, 5.0, 8.0):
        monkeypatch.setattr(time, "monotonic_ns", lambda s=seconds: now + int(s * 1e9))
        _step(recorder, 0)
        found.append(len(read_trace(writer.part).events))
    assert found == [0, 0, 21, 21, 21, 42, 49, 56]
    recorder.close()


def test_training_goes_on_when_the_file_can_not_be_written(caplog: pytest.LogCaptureFixture) -> None:
    writer = _FailingWriter()
    recorder = Recorder(writer, capacity=10)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            _step(recorder, step)
        recorder.flush()
        assert recorder.dropped_events == 35
        writer.full = False
        _step(recorder, 5)
        recorder.flush()
        assert (writer.events, writer.dropped_events) == (7, 35)
        recorder.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_recording_is_cheap(tmp_path: Path) -> None:
    """About 0.35 us on a quiet core, most of it for the packing of the record; measured against that, since machines
    differ and are shared.
    """
    recorder = Recorder(TraceWriter(tmp_path / "rank-00000.h5", HEADER), capacity=4096)
    buffer = bytearray(EVENT_STRUCT.size)
    record, packed = 1e9, 1e9
    for _ in range(10):
        recorder.begin_step(0, 0)
        start = time.perf_counter_ns()
        for row in range(2000):
            recorder.record(4, start, start + 5, row, 3, 0, row, 2, 4096, row, 1)
        middle = time.perf_counter_ns()
        for row in range(2000):
            EVENT_STRUCT.pack_into(buffer, 0, start, start + 5, 4096, -1, 0, row, row, 2, row, 0, 3, 1, 0, 4)
        record, packed = min(record, middle - start), min(packed, time.perf_counter_ns() - middle)
        recorder.flush()
    recorder.close()
    assert record < 3 * packed

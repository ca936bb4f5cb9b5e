"""Trace files: layout, killed writers, cut files, refusals."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpipipe.errors import TraceFormatError
from mpipipe.formats import hdf5, trace
from mpipipe.formats.trace import EVENT_DTYPE, EVENT_STRUCT, FLAG_GRADIENT, EventKind, TraceWriter, read_trace

HEADER = {"rank": 3, "world_size": 4, "p": 4, "v": 2, "d": 1, "host": "node7", "mpi_library": "MPICH 4.2"}
ROOT = Path(__file__).resolve().parents[3]


def _events(count: int, first: int = 0) -> np.ndarray:
    events = np.zeros(count, EVENT_DTYPE)
    events["t0_ns"] = 1000 + 10 * np.arange(first, first + count)
    events["t1_ns"] = events["t0_ns"] + 7
    events["row"] = np.arange(first, first + count)
    events["kind"] = events["row"] % 17
    return events


def _write(path: Path, count: int, close: bool = True) -> TraceWriter:
    writer = TraceWriter(path, HEADER)
    writer.append_events(_events(count))
    writer.append_step(1, 900, 5000, 64, 2.5, 0)
    writer.append_clock(900, -5, 3000)
    writer.flush()
    if close:
        writer.close()
    return writer


def test_event_layout() -> None:
    assert EVENT_DTYPE.itemsize == EVENT_STRUCT.size == 60
    values = (1 << 40, (1 << 40) + 5, -1, 123, 7, 8, 9, 2, 4_000_000_000, 65_535, -1, 1, 255, int(EventKind.EVALUATE))
    packed = np.frombuffer(EVENT_STRUCT.pack(*values), EVENT_DTYPE)[0]
    assert packed.tolist() == values
    names = "t0_ns t1_ns nbytes memory_bytes step row microbatch peer sequence table stage flags chunk kind"
    assert EVENT_DTYPE.names == tuple(names.split())
    assert h5py.check_enum_dtype(EVENT_DTYPE["kind"]) == {kind.name: int(kind) for kind in EventKind}
    assert [kind.name for kind in EventKind][:7] == ["F", "B", "I", "W", "RECV_WAIT", "SEND_POST", "SEND_WAIT"]


def test_round_trip_and_what_plain_h5py_sees(tmp_path: Path) -> None:
    path = tmp_path / "segment-0001" / "rank-00003.h5"
    writer = TraceWriter(path, {**HEADER, "config": "x = 'ä'\n" * 20_000, "segment": 1})
    part = path.with_name("rank-00003.h5.part")
    writer.add_schedule(2, [["0F0", "0B0"], ["1F0", "1B0"]], (0, 1), {"F": [1.0, 2.0], "latency": 0.5}, "1f1b")
    writer.set_model([{"stage": 0, "layers": ["embed", "block.0"], "parameters": 7}, {"stage": 1, "peak_is_dense": 1}])
    writer.append_events(_events(20_000))
    packed = EVENT_STRUCT.pack(5, 9, 64, -1, 1, 0, 0, 2, 0, 2, 1, FLAG_GRADIENT, 1, EventKind.RECV_WAIT)
    writer.append_events(memoryview(bytearray(packed)))
    writer.append_step(1, 900, 5000, 64, None, 2)
    writer.append_clock(900, -5, 3000)
    writer.append_clock(4000, -6, 2000)
    writer.dropped_events = 12
    writer.flush()
    running = read_trace(part)
    assert not path.exists()
    assert not running.complete
    assert any("not closed" in text for text in running.warnings)
    writer.close()
    writer.close()
    assert not part.exists()
    assert sorted(each.name for each in path.parent.iterdir()) == ["rank-00003.h5"]

    found = read_trace(path)
    for one in (found, running):
        assert np.array_equal(one.events[:-1], _events(20_000))
        assert one.events[-1].tolist() == (5, 9, 64, -1, 1, 0, 0, 2, 0, 2, 1, 1, 1, 4)
        assert one.clock.tolist() == [(900, -5, 3000), (4000, -6, 2000)]
        assert one.steps[["step", "table", "t0_ns", "t1_ns", "tokens"]].tolist() == [(1, 2, 900, 5000, 64)]
        assert np.isnan(one.steps["loss"][0])
        assert one.config == "x = 'ä'\n" * 20_000
        schedule = one.schedules[2]
        assert (schedule.name, schedule.rows, schedule.placement) == (
            "1f1b",
            (("0F0", "0B0"), ("1F0", "1B0")),
            (0, 1),
        )
        assert schedule.costs == {"F": (1.0, 2.0), "latency": 0.5}
        assert one.model is not None
        assert one.model["layers"].tolist() == [b"embed block.0", b""]
        assert one.model["parameters"].tolist() == [7, -1]
    assert found.complete
    assert found.rank == 3
    assert found.attributes["host"] == "node7"
    assert found.attributes["clock"] == "CLOCK_MONOTONIC"
    assert found.warnings == [f"{path}: 12 events were dropped while the run went on (the file could not be written)"]
    with h5py.File(path, "r") as file:
        events = file["events"]
        assert (events.compression, events.compression_opts, events.shuffle) == ("gzip", 1, True)
        assert events.chunks == (8192,)
        assert h5py.check_enum_dtype(events.dtype["kind"])["EVALUATE"] == 16
        assert path.read_bytes()[8] == 0  # superblock version 0: readable by old tools


def test_refuses_existing_files_and_incomplete_headers(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = TraceWriter(path, HEADER)
    with pytest.raises(FileExistsError):
        TraceWriter(path, HEADER)
    with pytest.raises(ValueError, match="59 bytes"):
        writer.append_events(bytes(59))
    writer.add_schedule(0, [["0F0"]], (0,))
    with pytest.raises(ValueError, match="already"):
        writer.add_schedule(0, [["0F0"]], (0,))
    with pytest.raises(ValueError, match="unknown field"):
        writer.set_model([{"stage": 0, "flops": 1}])
    writer.close()
    with pytest.raises(FileExistsError):
        TraceWriter(path, HEADER)
    with pytest.raises(KeyError, match="world_size, p"):
        TraceWriter(tmp_path / "b.h5", {"rank": 0, "v": 1, "d": 1})


def test_close_without_room_keeps_the_rows_uncompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _write(path, 9000, close=False)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "_rewrite", no_room)
    with caplog.at_level(logging.WARNING):
        writer.close(complete=False)
    assert "stays uncompressed" in caplog.text
    found = read_trace(path)
    assert np.array_equal(found.events, _events(9000))
    assert not found.complete


def test_full_disk_is_an_error_before_hdf5_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _write(tmp_path / "rank-00003.h5", 10, close=False)
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((*real[:4], 0, *real[5:10]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(OSError, match=r"no room for 4915[0-9]+ bytes"):
            writer.append_events(_events(1))
    writer.append_events(_events(1, first=10))
    writer.close()
    assert np.array_equal(read_trace(writer.path).events, _events(11))


def test_killed_writer_loses_no_flushed_row(tmp_path: Path) -> None:
    script = (
        "import sys, json, numpy as np\n"
        "from mpipipe.formats.trace import TraceWriter, EVENT_DTYPE\n"
        "w = TraceWriter(sys.argv[1], dict(rank=0, world_size=1, p=1, v=1, d=1))\n"
        "n = 0\n"
        "while True:\n"
        "    e = np.zeros(997, EVENT_DTYPE); e['t1_ns'] = 1; e['row'] = np.arange(n, n + 997)\n"
        "    w.append_events(e); n += 997; w.append_step(n, 1, 2, 3, 4.0, 0); w.flush()\n"
        "    print(json.dumps(n), flush=True)\n"
        "    e['row'] += 997; w.append_events(e); n += 997\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for trial in range(3):
        path = tmp_path / f"trial-{trial}" / "rank-00000.h5"
        command = [sys.executable, "-c", script, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(20 + 31 * trial):
                line = process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        flushed = json.loads([line, *rest][-1])
        found = read_trace(path.with_name("rank-00000.h5.part"))
        assert len(found.events) >= flushed
        assert np.array_equal(found.events["row"], np.arange(len(found.events)))
        assert found.steps["step"][-1] >= flushed


@pytest.mark.parametrize("close", [True, False])
def test_cut_file_gives_every_whole_record_and_says_what_is_lost(tmp_path: Path, close: bool) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _write(path, 30_000, close)
    whole = path if close else writer.part
    data = whole.read_bytes()
    with h5py.File(whole, "r", locking="best-effort") as file:
        chunks = [file["events"].id.get_chunk_info(i) for i in range(4)]
    rng = np.random.default_rng(5)
    cut_path = tmp_path / f"cut.h5{'' if close else '.part'}"
    for cut in sorted(rng.integers(chunks[0].byte_offset, len(data) - 1, 12).tolist()):
        cut_path.write_bytes(data[:cut])
        found = read_trace(cut_path)
        expected = []
        for i, chunk in enumerate(chunks):
            rows = min(8192, 30_000 - i * 8192)
            there = (cut - chunk.byte_offset) // 60 if not close else 8192 * (cut >= chunk.byte_offset + chunk.size)
            expected.append(_events(30_000)[i * 8192 : i * 8192 + int(np.clip(there, 0, rows))])
        wanted = np.concatenate(expected)
        assert np.array_equal(found.events, wanted), cut
        assert any(f"cut after {cut} bytes" in text for text in found.warnings)
        lost = 30_000 - len(wanted)
        assert any(f"/events: {lost} of 30000 rows lost" in text for text in found.warnings) == (lost > 0)
    cut_path.write_bytes(data[:700])
    with pytest.raises(TraceFormatError, match=r"cut\.h5"):
        read_trace(cut_path)


def test_any_cut_reads_or_refuses(tmp_path: Path) -> None:
    writer = _write(tmp_path / "rank-00003.h5", 300, close=False)
    data = writer.part.read_bytes()
    path = tmp_path / "cut.h5.part"
    outcomes = set()
    for cut in [*range(0, 4000, 97), *range(4000, len(data), 9973)]:
        path.write_bytes(data[:cut])
        try:
            found = read_trace(path)
        except TraceFormatError:
            outcomes.add("refused")
        else:
            assert np.array_equal(found.events, _events(300)[: len(found.events)])
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


def test_alien_files_are_refused_by_name_and_version(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.h5")
    empty = tmp_path / "empty.h5"
    empty.write_bytes(b"")
    with pytest.raises(TraceFormatError, match=r"empty\.h5: empty file"):
        read_trace(empty)
    text = tmp_path / "text.h5"
    text.write_text("not HDF5 " * 100)
    with pytest.raises(TraceFormatError, match=r"text\.h5: no readable HDF5"):
        read_trace(text)
    for name, version, message in [
        ("mpipipe-tokens", 1, "'mpipipe-tokens' found, 'mpipipe-trace' version 1 to 1 supported"),
        ("mpipipe-trace", 2, "version 2 found, 1 to 1 supported"),
        ("mpipipe-trace", 1, "attributes lacking: rank"),
        (None, 1, "no format attribute found"),
    ]:
        path = tmp_path / f"{name}-{version}.h5"
        with hdf5.open_file(path, "w") as file:
            if name:
                hdf5.write_format(file, name, version)
        with pytest.raises(TraceFormatError, match=message) as caught:
            read_trace(path)
        assert str(path) in str(caught.value)


def test_missing_events_or_fields_name_the_group(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.h5"
    _write(path, 5)
    with h5py.File(path, "r+") as file:
        del file["events"]
    with pytest.raises(TraceFormatError, match="group /events: unreadable"):
        read_trace(path)
    with h5py.File(path, "r+") as file:
        file.create_dataset("events", data=np.zeros(3, [("t0_ns", "<i8")]))
    with pytest.raises(TraceFormatError, match="group /events: fields lacking: t1_ns"):
        read_trace(path)


def test_rows_that_never_reached_the_disk_are_not_taken_for_events(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _write(path, 20_000, close=False)
    with h5py.File(writer.part, "r", locking="best-effort") as file:
        chunk = file["events"].id.get_chunk_info(1)
    copy = tmp_path / "copy.h5.part"
    copy.write_bytes(writer.part.read_bytes())
    with copy.open("r+b") as raw:
        raw.seek(chunk.byte_offset + 60 * 100)
        raw.write(bytes(chunk.size - 60 * 100))
    found = read_trace(copy)
    assert len(found.events) == 20_000 - 8092
    assert any("8092 of 20000 rows lost, the first of them row 8292" in text for text in found.warnings)


def test_an_odd_failure_of_the_copy_leaves_the_rows_and_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-00003.h5"
    writer = _write(path, 9000, close=False)

    def torn(source: object, target: Path, rows: int) -> None:
        target.write_bytes(b"half")
        raise ValueError("h5py: not a file")

    monkeypatch.setattr(trace, "_rewrite", torn)
    writer.close()
    assert [name.name for name in tmp_path.iterdir()] == [path.name]
    assert np.array_equal(read_trace(path).events, _events(9000))


def test_a_flush_that_fails_closes_the_file_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _write(tmp_path / "rank-00003.h5", 10, close=False)

    def full() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(writer, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert not writer._file  # h5py's word for a closed file


def test_a_header_that_can_not_be_kept_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        TraceWriter(tmp_path / "rank-00003.h5", {**HEADER, "config": "a\0b"})
    assert list(tmp_path.iterdir()) == []

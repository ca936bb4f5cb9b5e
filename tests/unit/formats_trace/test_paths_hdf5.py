"""The run folder's names and the HDF5 habits."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpipipe.errors import CheckpointCorruptError
from mpipipe.formats import hdf5
from mpipipe.formats.paths import RunPaths, trace_files


def test_every_name_of_a_run() -> None:
    run = RunPaths(Path("run"))
    names = {
        run.config: "run/config.toml",
        run.status: "run/status.json",
        run.metrics: "run/metrics.jsonl",
        run.log(3): "run/logs/rank-00003.log",
        run.trace_file(2, 3): "run/trace/segment-0002/rank-00003.h5",
        run.trace_part(2, 3): "run/trace/segment-0002/rank-00003.h5.part",
        run.checkpoint(100): "run/checkpoints/step-00000100",
        run.checkpoint_part(100, "ab1"): "run/checkpoints/step-00000100.part-ab1",
        run.reports: "run/reports",
    }
    assert {str(path): text for path, text in names.items()} == {text: text for text in names.values()}


def test_segments_and_checkpoints_count_on(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert (run.segments(), run.next_segment(), run.checkpoint_steps()) == ((), 1, ())
    for name in ("segment-0001", "segment-0007", "segment-12345", "segment-x", "old-segment-0099"):
        (run.trace / name).mkdir(parents=True)
    assert run.segments() == (1, 7, 12345)
    assert run.next_segment() == 12346
    for name in ("step-00000010", "step-00000002", "step-00000020.part-a", "step-3"):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.checkpoint_steps() == (2, 10)


def test_trace_files_of_a_segment(tmp_path: Path) -> None:
    for name in ("rank-00001.h5", "rank-00000.h5.part", "rank-00001.h5.part", "rank-00002.h5.closing", "notes.h5"):
        (tmp_path / name).touch()
    found = [(rank, path.name) for rank, path in trace_files(tmp_path)]
    assert found == [(0, "rank-00000.h5.part"), (1, "rank-00001.h5"), (1, "rank-00001.h5.part")]


def test_text_and_format(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with hdf5.open_file(path, "w") as file:
        hdf5.write_text(file, "config", "old")
        hdf5.write_text(file, "config", "größe = 1\n" * 10_000)
        file["number"] = 3
        with pytest.raises(ValueError, match="NUL"):
            hdf5.write_text(file, "bad", "a\0b")
        hdf5.write_format(file, "mpipipe-checkpoint", 3)
    with hdf5.open_file(path) as file:
        assert hdf5.read_text(file, "config") == "größe = 1\n" * 10_000
        with pytest.raises(TypeError, match="/number"):
            hdf5.read_text(file, "number")
        with pytest.raises(KeyError):
            hdf5.read_text(file, "bad")
        assert hdf5.check_format(file, "mpipipe-checkpoint", 3, CheckpointCorruptError) == 3
        with pytest.raises(CheckpointCorruptError, match=r"a\.h5: group /: .*version 3 found, 1 to 2 supported"):
            hdf5.check_format(file, "mpipipe-checkpoint", 2, CheckpointCorruptError)

"""When a run must stop, and what it tells the outside world."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpipipe import lifecycle
from mpipipe.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    EngineError,
    MissingDependencyError,
    MpipipeError,
    PartitionError,
    ScheduleDeadlockError,
    TopologyError,
    TransportTimeoutError,
)
from mpipipe.lifecycle import RunLock, TimeLimit, write_status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now[0])
    return now


def test_without_a_limit_it_is_never_reached(clock: list[float]) -> None:
    limit = TimeLimit(None)
    clock[0] += 1e9
    assert not limit.reached


def test_there_is_room_for_one_and_a_half_steps_evaluations_and_saves(clock: list[float]) -> None:
    limit = TimeLimit(100.0)
    assert not limit.reached
    clock[0] += 99.9
    assert not limit.reached
    clock[0] += 0.1
    assert limit.reached
    clock[0] = 1000.0
    for seconds in (4.0, 10.0, 6.0):  # the longest of each counts
        limit.note_step(seconds)
    limit.note_save(8.0)
    limit.note_save(2.0)
    limit.note_evaluation(20.0)
    clock[0] = 1000.0 + 100.0 - 1.5 * 38.0 - 0.01
    assert not limit.reached
    clock[0] += 0.02
    assert limit.reached


def test_the_status_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_status(path, "running", exit_code=None, step=3)
    first = json.loads(path.read_text())
    assert (first["state"], first["exit_code"], first["step"]) == ("running", None, 3)
    with path.open() as reader:
        write_status(path, "done", exit_code=0, loss=1.5)
        assert json.loads(reader.read()) == first
    second = json.loads(path.read_text())
    assert (second["state"], second["exit_code"], second["loss"]) == ("done", 0, 1.5)
    assert "step" not in second
    assert set(second) >= {"host", "time"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "kind, code",
    [
        (ConfigError, 2),
        (TopologyError, 2),
        (PartitionError, 2),
        (ScheduleDeadlockError, 2),
        (DataError, 2),
        (CheckpointNotFoundError, 2),
        (MissingDependencyError, 3),
        (CheckpointCorruptError, 1),
        (TransportTimeoutError, 1),
        (EngineError, 1),
        (MpipipeError, 1),
    ],
)
def test_every_error_has_the_exit_code_that_the_command_line_gives(kind: type[MpipipeError], code: int) -> None:
    from mpipipe.cli.errors import exit_code

    assert kind.exit_code == code
    assert exit_code(kind("text")) == code
    assert exit_code(OSError("text")) == 1


def test_a_lock_that_can_not_say_who_holds_it_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            RunLock(path).acquire()
    other = RunLock(path)
    assert other.acquire() is None
    other.release()

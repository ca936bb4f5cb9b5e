"""What is printed, returned and aborted when a verb runs on several ranks (of the in-process transport, or a recording
one)."""

from __future__ import annotations

import json
import socket

import pytest

from mpipipe.cli.errors import error_object, exit_code
from mpipipe.cli.ranks import _interrupted, on_ranks
from mpipipe.cli.train import prepare_config
from mpipipe.collectives import all_gather_objects
from mpipipe.config import Config
from mpipipe.environment import check_world
from mpipipe.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    LauncherMismatchError,
    MissingDependencyError,
    ScheduleError,
    TopologyError,
    TransportError,
)
from mpipipe.transport import run_ranks

SIZES = {"layers": 4, "hidden": 8, "heads": 2, "sequence": 4}
CONFIG = Config.from_tables({"model": SIZES})


class Aborted(BaseException):
    """Stands for the end of the process."""


class Alone:
    """A transport of one rank that notes what is asked of it."""

    rank, size, local_size, library = 0, 1, 1, "none"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def configure(self, *, timeout_s: float, wait: str) -> None:
        self.calls.append(f"configure {timeout_s:g}")

    def abort(self, code: int) -> None:
        self.calls.append(f"abort {code}")
        raise Aborted

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    launchers = ("PMI_RANK", "PMI_SIZE", "PMI_FD", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    for name in (*launchers, "SLURM_STEP_ID", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mpipipe.environment.FIRST_RANK_TELLS_WITHIN_S", 0.0)
    monkeypatch.setattr("mpipipe.environment.OUTPUT_PASSES_WITHIN_S", 0.0)
    monkeypatch.setattr("mpipipe.environment.LAUNCHER_ANSWERS_WITHIN_S", 0.05)
    monkeypatch.setattr("mpipipe.cli.ranks.OUTPUT_PASSES_WITHIN_S", 0.0)


def on_all(size, prepare, work, as_json=False):
    """Exit codes of all ranks of the in-process transport."""
    return run_ranks(size, lambda transport: on_ranks(prepare, work, as_json=as_json, open_world=lambda: transport))


def ready(num_ranks):
    return CONFIG.resolve(num_ranks)


def done(config, transport):
    return 0


def alone(work, as_json=False, prepare=ready):
    """(exit code or None if aborted, transport) of one rank."""
    transport = Alone()
    try:
        code = on_ranks(prepare, work, as_json=as_json, open_world=lambda: transport)
    except Aborted:
        code = None
    return code, transport


def raising(error):
    def work(config, transport):
        raise error

    return work


def test_the_code_of_the_work_is_returned():
    assert on_all(3, ready, lambda config, transport: 75) == [75, 75, 75]
    code, transport = alone(lambda config, transport: 0)
    assert code == 0
    assert transport.calls == ["close"]


def test_a_wrong_run_file_is_printed_once(capsys, tmp_path):
    run_file = tmp_path / "a.toml"
    run_file.write_text("[model]\nlayers = 4\nhidden = 8\nheads = 2\nsequence = 4\n[batch]\nmicrobatchs = 2\n")
    codes = on_all(4, lambda n: prepare_config(run_file, [], n), done)
    said = capsys.readouterr()
    assert codes == [2, 2, 2, 2]
    assert said.out == ""
    assert said.err.count("microbatchs") == 1
    assert said.err.startswith(f"error: {run_file}: batch.microbatchs: ")
    assert "'batch.microbatch'" in said.err


def test_another_number_of_ranks_is_printed_once_as_json(capsys):
    config = CONFIG.resolve(4)
    assert on_all(3, config.resolve, done, as_json=True) == [2, 2, 2]
    said = capsys.readouterr()
    assert said.err == ""
    error = json.loads(said.out)["error"]
    assert (error["type"], error["key"]) == ("TopologyError", "pipeline.ranks")


def test_one_rank_without_the_file_ends_all_alike(capsys):
    asked = iter(range(3))

    def prepare(num_ranks):
        if next(asked) == 2:
            raise ConfigError("no such file", file="a.toml")
        return ready(num_ranks)

    assert on_all(3, prepare, done) == [2, 2, 2]
    assert capsys.readouterr().err == "error: a.toml: no such file\nSeen on rank 2 only, of 3 ranks.\n"


def test_ranks_with_different_files_are_refused(capsys):
    seeds = iter([0, 0, 1])

    def prepare(num_ranks):
        return Config.from_tables({"model": SIZES, "run": {"seed": next(seeds)}}).resolve(num_ranks)

    assert on_all(3, prepare, done) == [2, 2, 2]
    assert "reads another run file than rank 0" in capsys.readouterr().err


def test_a_fault_that_all_see_alike_is_printed_once_without_abort(capsys):
    assert on_all(3, ready, raising(DataError("data.train: too short"))) == [2, 2, 2]
    assert capsys.readouterr().err == "error: data.train: too short\n"
    code, transport = alone(raising(CheckpointNotFoundError("none")))
    assert code == 2
    assert transport.calls == ["configure 20", "close"]


def test_a_fault_said_to_be_alike_that_one_rank_has_alone_ends_the_job(capsys):
    def work(config, transport):
        if transport.rank == 1:
            raise DataError("only here")
        return 0

    with pytest.raises(TransportError):
        on_all(2, ready, work)
    assert "rank 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ValueError("a user's bug"), SystemExit(0), CheckpointError("a shard"), RecursionError("x")]
)
def test_a_failure_of_one_rank_is_told_with_its_traceback_and_aborts(capsys, error):
    code, transport = alone(raising(error))
    said = capsys.readouterr().err
    assert code is None
    assert transport.calls == ["abort 1"]
    assert said.startswith("rank 0 failed\nTraceback (most recent call last):\n")
    assert type(error).__name__ in said


def test_a_failure_with_json_has_one_object_on_standard_output(capsys):
    error = ValueError("a user's bug")
    error.add_note("rank 0, stage 2, microbatch 3")
    code, _ = alone(raising(error), as_json=True)
    said = capsys.readouterr()
    assert code is None
    assert json.loads(said.out)["error"] == {
        "type": "ValueError",
        "message": "a user's bug\nrank 0, stage 2, microbatch 3",
        "key": None,
        "allowed": None,
    }
    assert "Traceback" in said.err


def test_interrupt_aborts_without_a_traceback(capsys):
    code, transport = alone(raising(KeyboardInterrupt()))
    assert code is None
    assert transport.calls == ["abort 1"]
    assert capsys.readouterr().err == "rank 0 was interrupted\n"


def test_an_interrupt_on_all_ranks_is_told_by_rank_0_first(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr("mpipipe.cli.ranks.time.sleep", waited.append)
    error = KeyboardInterrupt()
    error.add_note("the same command goes on from step 40")
    alone(raising(error))
    assert waited == []
    assert capsys.readouterr().err == "rank 0 was interrupted; the same command goes on from step 40\n"
    monkeypatch.setattr(Alone, "rank", 1)
    with pytest.raises(Aborted):
        _interrupted(Alone(), error)
    assert waited == [1.0]
    assert capsys.readouterr().err == "rank 1 was interrupted; the same command goes on from step 40\n"


def test_a_bug_while_preparing_aborts(capsys):
    def prepare(num_ranks):
        raise ZeroDivisionError

    code, transport = alone(done, prepare=prepare)
    assert code is None
    assert transport.calls == ["abort 1"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def no_mpi():
    raise MissingDependencyError("mpi4py is missing")


@pytest.mark.parametrize(("rank", "more"), [("0", ""), ("1", "This is rank 1, on node7.\n")])
def test_a_process_without_mpi_tells_and_ends_the_launch(capsys, monkeypatch, rank, more):
    """A process that is not the launcher's first is alone with it if it is still there after a while."""
    reader, writer = socket.socketpair()
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setenv("PMI_FD", str(writer.fileno()))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert on_ranks(ready, done, as_json=False, open_world=no_mpi) == 3
    assert capsys.readouterr().err == "error: mpi4py is missing\n" + more
    with writer, reader:
        assert reader.recv(1000).splitlines() == [b"cmd=init pmi_version=1 pmi_subversion=1", b"cmd=abort exitcode=3"]


@pytest.mark.parametrize("error", [RuntimeError("no shared memory"), OSError("no such device"), KeyboardInterrupt()])
def test_any_error_before_mpi_counts_the_ranks_ends_the_launch(capsys, monkeypatch, error):
    reader, writer = socket.socketpair()
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_FD", str(writer.fileno()))
    with writer, reader:
        reader.sendall(b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n")
        assert on_ranks(ready, done, as_json=False, open_world=lambda: raising(error)(None, None)) == 1
        assert reader.recv(1000).endswith(b"cmd=abort exitcode=1\n")
    assert "This is rank 1, on " in capsys.readouterr().err


def test_an_error_of_a_process_on_its_own_is_left_to_the_caller():
    with pytest.raises(RuntimeError, match="no shared memory"):
        on_ranks(ready, done, as_json=False, open_world=lambda: raising(RuntimeError("no shared memory"))(None, None))


def test_a_wrong_launcher_is_told_by_its_first_process_only(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert on_ranks(ready, done, as_json=False, open_world=lambda: check_world(1)) == 3
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_the_ranks_meet_ends_the_job(capsys, monkeypatch):
    def interrupted(transport, mine):
        raise KeyboardInterrupt

    def work(config, transport):
        monkeypatch.setattr("mpipipe.collectives.all_gather_objects", interrupted)
        raise ConfigError("told by one rank")

    code, transport = alone(work)
    assert code is None
    assert transport.calls[-1] == "abort 1"
    assert "told by one rank" in capsys.readouterr().err


def test_a_closed_standard_error_does_not_keep_the_job(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

    monkeypatch.setattr("sys.stderr", Closed())
    code, transport = alone(raising(ValueError("x")))
    assert code is None
    assert transport.calls == ["abort 1"]


def test_processes_that_mpi_sees_alone_end_with_3(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")


    def open_world():
        check_world(1)

    assert on_ranks(lambda ranks: None, done, as_json=False, open_world=open_world) == 3
    assert "started 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (TopologyError("x"), 2),
        (ScheduleError("x"), 2),
        (DataError("x"), 2),
        (LauncherMismatchError("x"), 3),
        (MissingDependencyError("x"), 3),
        (CheckpointError("x"), 1),
        (TransportError("x"), 1),
        (OSError("x"), 1),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


def test_error_object():
    error = ConfigError("is wrong", file="a.toml", key="run.steps", allowed=("1", "2"))
    assert error_object(error)["error"] == {
        "type": "ConfigError",
        "message": "a.toml: run.steps: is wrong (allowed: 1, 2)",
        "key": "run.steps",
        "allowed": ["1", "2"],
    }


def test_prepare_config(tmp_path):
    run_file = tmp_path / "a.toml"
    run_file.write_text(CONFIG.to_toml())
    assert prepare_config(run_file, [], 2).pipeline.ranks == 2
    for setting, key in {
        "pipeline.schedule=zigzag": "pipeline.schedule",
        "pipeline.chunks=2": "pipeline.schedule",
        "pipeline.ranks=3": "pipeline.ranks",
    }.items():
        with pytest.raises(ConfigError) as caught:
            prepare_config(run_file, [setting], 2)
        assert caught.value.key == key
    with pytest.raises(ConfigError, match=r"\"1f1B\" is no schedule. Did you mean '1f1b'\? \(allowed: naive, "):
        prepare_config(run_file, ["pipeline.schedule=1f1B"], 2)
    with pytest.raises(ConfigError, match=r"--set: pipeline\.schedule = '1f1b' has one chunk per rank"):
        prepare_config(run_file, ["pipeline.chunks=2"], 2)
    with pytest.raises(ConfigError) as caught:
        prepare_config(run_file, [], 2, "data.train")
    assert caught.value.key == "data.train"


def test_a_rank_alone_with_a_fault_tells_it_while_the_others_are_in_a_gather(capsys):
    """Its exit code would be taken for what the others gather."""

    def work(config, transport):
        if transport.rank == 1:
            raise DataError("this node lacks train.h5")
        return len(all_gather_objects(transport, {"rank": transport.rank}))

    with pytest.raises(TransportError):
        on_all(3, ready, work)
    said = capsys.readouterr().err
    assert "DataError: this node lacks train.h5" in said
    assert "has no attribute" not in said

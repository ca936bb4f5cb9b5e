"""``mpipipe train`` with a fault of each kind, in each phase of a run, on the first, a middle and the last rank: the
job ends soon, not with exit code 0, the rank at fault tells first, ``status.json`` knows, and no process is left.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import REPOSITORY, Launch, launch_marked

from mpipipe.data import build_byte_tokens

pytestmark = pytest.mark.mpi

SCRIPTS = REPOSITORY / "tests" / "mpi"

RUN_FILE = """
[run]
steps = 4
dir = "{folder}/run"
[model]
layers = 4
hidden = 16
heads = 2
vocab = 128
sequence = 8
[data]
train = ["{folder}/tokens.h5"]
validation = ["{folder}/tokens.h5"]
[batch]
sequences = 4
[pipeline]
ranks = 3
[eval]
every_steps = 2
batches = 1
[checkpoint]
every_steps = 2
"""

WORDS = {
    "exception": "TheFaultError: asked for at: {phase}",
    "exit": "SystemExit: 3",
    "interrupt": "rank {rank} was interrupted",
    "kill": "signal 9",
}


def start(script: str, *arguments: str | Path) -> Launch:
    ended = launch_marked(3, SCRIPTS / script, *arguments, "MARKER")
    assert ended.returncode != 0
    return ended


def _status(run_file: Path) -> tuple[str, int | None]:
    status = json.loads((run_file.with_name("run") / "status.json").read_text())
    return status["state"], status["exit_code"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 20)
    build_byte_tokens([tmp_path / "text.txt"], tmp_path / "tokens.h5")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(folder=tmp_path))
    return path


@pytest.mark.parametrize(
    "kind, phase, rank",
    [
        ("exception", "config", 0),
        ("interrupt", "config", 2),
        ("exception", "build", 1),
        ("interrupt", "build", 0),
        ("exit", "data", 2),
        ("kill", "data", 0),
        ("interrupt", "step", 2),
        ("kill", "step", 0),
        ("kill", "step", 1),
        ("exit", "evaluation", 0),
        ("exception", "evaluation", 2),
        ("exit", "save", 1),
        ("exception", "save", 1),
        ("kill", "save", 2),
        ("exception", "exit", 1),
        ("interrupt", "exit", 0),
    ],
)
def test_a_fault_on_one_rank_ends_the_job(kind: str, phase: str, rank: int, run_file: Path) -> None:
    ended = start("faulty_run.py", kind, phase, str(rank), run_file)
    both = ended.stderr + ended.stdout
    assert WORDS[kind].format(phase=phase, rank=rank) in both, both
    if (kind, phase) == ("exception", "save"):  # gathered: every rank leaves the save alike, and rank 0 tells
        assert ended.stderr.index("Traceback") < ended.stderr.index("error: the checkpoint of step 2 was not saved: ")
        assert _status(run_file) == ("failed", 1)
        return
    told = re.findall(r"rank (\d) (?:failed|was interrupted)", ended.stderr)
    assert told[:1] == ([] if kind == "kill" else [str(rank)])
    if kind in ("exception", "exit"):
        assert ended.stderr.index(f"rank {rank} failed\nTraceback") < ended.stderr.index(WORDS[kind][:12])
    path = run_file.with_name("run") / "status.json"
    if phase == "config":
        assert not path.exists()
        return
    if kind == "kill":
        assert _status(run_file) == ("running", None)
    else:
        assert _status(run_file) == ("failed", 1)
        assert json.loads(path.read_text())["rank"] == rank


def test_a_fault_after_the_status_is_written_ends_the_job(run_file: Path) -> None:
    """All is saved and done by then, and ``status.json`` says so."""
    ended = start("faulty_run.py", "exception", "close", "1", run_file)
    assert "rank 1 failed\nTraceback" in ended.stderr
    assert _status(run_file) == ("done", 0)


@pytest.mark.parametrize(
    "how, ranks, verb, code, rank_named",
    [
        ("missing", "0,1,2", "train", 3, None),
        ("missing", "1", "script", 3, "This is rank 1, on "),
        ("late", "0", "script", 1, None),
        ("library", "0", "doctor", 3, None),
    ],
)
def test_ranks_on_which_mpi_does_not_start_end_the_launch(
    how: str, ranks: str, verb: str, code: int, rank_named: str | None, run_file: Path
) -> None:
    """The others wait in ``MPI_Init``; MPICH's launcher alone would let them."""
    words = {
        "missing": "mpi4py and an MPI library are needed to train",
        "library": "mpi4py finds no MPI library (libmpi.so.12: cannot open shared object file)",
        "late": "RuntimeError: asked for after MPI_Init",
    }
    ended = start("without_mpi4py.py", how, ranks, verb, *([run_file] if verb == "train" else []))
    both = ended.stdout + ended.stderr
    assert ended.returncode == code, both
    assert both.count(words[how]) == 1, both
    assert ("This is rank" not in both) if rank_named is None else (rank_named in both)
    assert ("Traceback" in both) == (how == "late"), both
    assert not list(run_file.with_name("run").iterdir())

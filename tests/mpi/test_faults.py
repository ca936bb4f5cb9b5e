"""A fault on one rank ends the whole job: soon, not with exit code 0, the guilty rank's traceback first, no process
left. A fault that all ranks see alike is told once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import pytest
from launch import REPOSITORY, launch_marked

from mpipipe.data import build_byte_tokens
from mpipipe.device import device_kind

pytestmark = pytest.mark.mpi

SCRIPT = REPOSITORY / "tests" / "mpi" / "faulty.py"

RUN_FILE = """
[run]
seed = 1
steps = 1000
dir = "{folder}/run"
[model]
layers = 4
hidden = 16
heads = 2
vocab = 128
sequence = 8
[data]
train = ["{folder}/train.h5"]
[batch]
sequences = 4
[pipeline]
ranks = {ranks}
"""


@pytest.mark.parametrize(
    "fault, rank, words",
    [
        ("step", 0, "asked for at: step"),
        ("step", 2, "asked for at: step"),
        ("build", 2, "asked for at: build"),
        ("loss", 2, "asked for at: loss"),
        ("thread", 1, "a thread that lives on"),
        ("exit", 1, "SystemExit: 3"),
    ],
)
def test_an_exception_on_one_rank_ends_the_job(fault: str, rank: int, words: str) -> None:
    ended = launch_marked(3, SCRIPT, fault, str(rank), "MARKER")
    assert ended.returncode != 0
    first = ended.stderr.index("Traceback")
    told = ended.stderr.index(f"mpipipe: rank {rank} failed")
    assert told < first
    assert words in ended.stderr[first:]
    assert "mpipipe: rank" not in ended.stderr[:told]
    if fault == "build":
        assert "while layer 4 was built" in ended.stderr
    if fault == "loss":
        assert "in the loss function, microbatch 0" in ended.stderr


def test_a_rank_that_is_killed_ends_the_job() -> None:
    ended = launch_marked(3, SCRIPT, "kill", "1", "MARKER")
    assert ended.returncode != 0


def test_a_batch_of_another_size_on_one_rank_ends_the_job() -> None:
    """Each rank compares itself with the one before it; without that, all would wait for comm.timeout_s."""
    ended = launch_marked(3, SCRIPT, "rows", "1", "MARKER")
    assert ended.returncode == 1, ended.stderr
    told = (
        "rank 1 was given 6 sequences, rank 0 8: every rank calls the trainer",
        "rank 2 was given 8 sequences, rank 1 6: every rank calls the trainer",
    )
    assert any(words in ended.stderr for words in told), ended.stderr


def test_an_evaluation_over_another_number_of_batches_on_one_rank_ends_the_job() -> None:
    """MPI takes what is sent before anyone asks for it: the next step would get the extra batch's activations."""
    ended = launch_marked(3, SCRIPT, "batches", "0", "MARKER")
    assert ended.returncode == 1, ended.stderr
    assert "every rank calls the trainer with the same arguments" in ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults")
    (made / "text.txt").write_text("to be or not to be, that is the question\n" * 20)
    build_byte_tokens([made / "text.txt"], made / "train.h5")
    return made


def write_run_file(folder: Path, name: str, ranks: int, more: str = "") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(RUN_FILE.format(folder=folder, ranks=ranks) + more)
    return path


@pytest.mark.parametrize(
    "name, ranks, more, key, words",
    [
        ("ranks", 4, "", "pipeline.ranks", "asks for 4 ranks, the launch has 3"),
        ("unknown", 3, "[optimizer]\nlearning_rat = 1e-3\n", "optimizer.learning_rat", "Did you mean"),
    ],
)
def test_a_wrong_run_file_is_told_once(name: str, ranks: int, more: str, key: str, words: str, folder: Path) -> None:
    path = write_run_file(folder, name, ranks, more)
    ended = launch_marked(3, "-m", "mpipipe", "train", path, "--set", "run.name=MARKER")
    both = ended.stdout + ended.stderr
    assert ended.returncode == 2, both
    assert both.count(key) >= 1
    assert both.count(words) == 1, both
    assert "Traceback" not in both
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    "device, path, words",
    [
        ("cuda", "auto", r'comm\.device = "cuda": .*(CuPy is not installed|no GPU).*comm\.device = "cpu"'),
        ("auto", "cuda-aware", r'comm\.path = "cuda-aware": no rank has a GPU .*comm\.path = "auto"'),
    ],
)
def test_a_gpu_that_is_asked_for_and_not_there_is_told_once(device: str, path: str, words: str, folder: Path) -> None:
    if device_kind("auto") == "cuda":
        pytest.skip("there is a GPU")
    given = [f'comm.device="{device}"', f'comm.path="{path}"', "run.name=MARKER"]
    sets = [word for one in given for word in ("--set", one)]
    ended = launch_marked(3, "-m", "mpipipe", "train", write_run_file(folder, "gpu", 3), *sets)
    assert ended.returncode == 3
    assert ended.stderr.count("error: ") == 1
    assert re.search(words, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert json.loads((folder / "run" / "status.json").read_text())["exit_code"] == 3


def test_bad_data_that_only_some_ranks_read_ends_the_job(folder: Path) -> None:
    """The file says that its ids are below 128, and holds 200: the middle rank reads no batch and waits."""
    with h5py.File(folder / "train.h5", "r+") as file:
        file["tokens"][...] = 65
        file["tokens"][100:] = 200
    ended = launch_marked(3, "-m", "mpipipe", "train", write_run_file(folder, "data", 3), "--set", "run.name=MARKER")
    assert ended.returncode != 0
    assert "token id 200 is outside 0 to 127" in ended.stderr
    assert f"{folder}/train.h5, position" in ended.stderr
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)

"""tools/checkpoint_show.py, as a user runs it: without mpipipe, under a folder with a space."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpipipe.checkpoint import CheckpointState, save
from mpipipe.transport import solo

SCRIPT = Path(__file__).parents[3] / "tools" / "checkpoint_show.py"


@pytest.fixture
def folder(tmp_path):
    tensors = {f"/parameters/h.{layer}.weight": np.full((2, 3), layer, np.float32) for layer in (10, 9)}
    tensors["/half"] = np.array([0x3F80, 0x4000], np.uint16)
    aliases = {"/parameters/h.9.weight": ("/parameters/tied",)}
    state = CheckpointState(tensors, {"sample": 12, "note": "x"}, aliases, "[run]\n", frozenset({"/half"}))
    return save(solo(), tmp_path / "a run" / "checkpoints", 7, state)


def show(*arguments):
    command = [sys.executable, "-I", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_everything_is_listed_in_the_order_of_numbers(folder):
    done = show(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "step 7",
        "note x",
        "sample 12",
        "/half  bfloat16  2  shard-0000.h5",
        "/parameters/h.9.weight  float32  2x3  shard-0000.h5",
        "/parameters/h.10.weight  float32  2x3  shard-0000.h5",
        "/parameters/tied  float32  2x3  shard-0000.h5  the same as /parameters/h.9.weight",
        "3 tensors, 14 elements",
    ]


def test_one_tensor_and_the_run_file(folder, tmp_path):
    done = show(folder, "/parameters/h.10.weight", "-o", tmp_path / "x.npy")
    assert done.stdout == "/parameters/h.10.weight  float32  2x3  min 10  max 10  mean 10  norm 24.4949\n"
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.full((2, 3), 10, np.float32))
    assert show(folder, "--config").stdout == "[run]\n"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "shard-0000.h5").unlink(), "shard-0000.h5"),
        (lambda folder: (folder / "checkpoint.h5").write_bytes(b""), "checkpoint.h5"),
    ],
)
def test_what_is_no_checkpoint_is_told_in_a_line(folder, spoil, message):
    spoil(folder)
    done = show(folder)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_tensor(folder):
    done = show(folder, "/parameters/h.11.weight")
    assert done.returncode == 1
    assert "no tensor '/parameters/h.11.weight'" in done.stderr

"""The proof of GPU memory in a launch inside a launch; the memory is the host's here, and the failures are real."""

from __future__ import annotations

import json

import pytest
from launch import REPOSITORY, launch, launch_marked

from mpipipe.cli.doctor_gpu import device_nodes

pytestmark = pytest.mark.mpi

PROVING = REPOSITORY / "tests" / "mpi" / "proving.py"


def prove(part: str) -> list[str]:
    """The lines that rank 0 printed."""
    ended = launch_marked(2, PROVING, part, "MARKER")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_what_can_not_be_proved_inside_a_launch() -> None:
    """All that was started is gone at the end: a launch that hangs, and one that crashes, too."""
    wrong, crashing, stuck = (json.loads(line) for line in prove("failures") if line.startswith("["))
    assert [line[1] for line in (wrong, crashing, stuck)] == [False] * 3
    assert "not proved: a message arrived wrong (8 of 8 bytes from rank" in wrong[2]
    assert "which crashed (exit code" in crashing[2], crashing
    assert "did not end within 4 s" in stuck[2]
    assert stuck[3] < 4.0 + 11.0


def test_the_path_is_proved_inside_a_launch_and_in_it() -> None:
    lines = prove("path")
    denied, proved, wrong = (json.loads(line) for line in lines if line.startswith("["))
    assert denied == ["staged", "MPIPIPE_CUDA_AWARE=0 says so"]
    assert proved == ["cuda-aware", "MPIPIPE_CUDA_AWARE=1 says so; proved by messages in a launch of its own"]
    assert "a test message out of GPU memory arrived wrong (8 of 8 bytes from rank 1" in wrong[1]
    said = [line for line in lines if line.startswith("messages leave the GPU")]
    assert said == [
        "messages leave the GPU by way of host memory (staged): MPIPIPE_CUDA_AWARE=0 says so",
        f"messages leave the GPU out of its own memory (cuda-aware): {proved[1]}",
    ]
    assert sum("if the job crashes here" in line for line in lines) == 1


@pytest.mark.skipif(bool(device_nodes()), reason="there is a GPU")
def test_the_doctor_has_two_short_lines_where_there_is_no_gpu() -> None:
    ended = launch(2, "-m", "mpipipe", "doctor", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdicts = {verdict["subject"]: verdict for verdict in json.loads(ended.stdout)["verdicts"]}
    assert verdicts["devices"]["text"].startswith("no NVIDIA device, ")
    assert verdicts["GPU messages"]["level"] == "ok"
    assert verdicts["GPU messages"]["text"].startswith("no GPU here; the MPI library takes no GPU memory, say ")
    assert "MPIX_Query_cuda_support" in verdicts["GPU messages"]["text"]

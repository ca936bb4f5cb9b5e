"""A wait that ran out is told in the words of the table by the lowest rank that waits, and ends the job; SIGUSR2 tells
the same of a live rank and changes nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import pytest
from launch import REPOSITORY, launch, launch_marked

pytestmark = pytest.mark.mpi

SCRIPT = REPOSITORY / "tests" / "mpi" / "sleeper.py"


def told_by(stderr: str, rank: int) -> str:
    """The report; it is the only one."""
    assert stderr.count("failed, the job ends") == 1, stderr
    assert stderr.count("who waits for whom:") == 1, stderr
    return stderr[stderr.index(f"mpipipe: rank {rank} failed, the job ends") :]


def test_a_rank_that_sleeps_is_named(tmp_path: Path) -> None:
    ended = launch_marked(3, SCRIPT, "sleep", "1", tmp_path, "MARKER")
    assert ended.returncode == 1, ended.stderr
    report = told_by(ended.stderr, 0)
    lines = (
        "TransportTimeoutError: rank 0 waited 2 s (comm.timeout_s) for 1SEND_B0 of rank 1",
        "rank 0 at 0RECV_B0 (row 3, step 2) waits for 1SEND_B0 of rank 1; "
        "open: 2 receives (1SEND_B1 of rank 1, 1SEND_B2 of rank 1)",
        "rank 2 at 2RECV_F1 (row 2, step 2) waits for 1SEND_F1 of rank 1; "
        "open: 2 receives (1SEND_F2 of rank 1, 1SEND_F3 of rank 1)",
        "rank 0 waits for 1SEND_B0 of rank 1, which does not answer",
        "rank 2 waits for 1SEND_F1 of rank 1, which does not answer",
        "rank 1 does not answer: it computes, or is stuck outside of MPI",
    )
    places = [report.find(line) for line in lines]
    assert -1 not in places, report
    assert places == sorted(places)
    assert "in a circle" not in report
    for rank in (0, 2):  # the ranks that told had the time to write their trace
        with h5py.File(tmp_path / "trace" / "segment-0001" / f"rank-{rank:05d}.h5") as file:
            assert len(file["/steps"]) == 1


def test_a_rank_that_computes_too_long_tells_where_it_is(tmp_path: Path) -> None:
    """It looks up between two layers."""
    ended = launch_marked(3, SCRIPT, "slow", "1", tmp_path, "MARKER")
    assert ended.returncode == 1, ended.stderr
    report = told_by(ended.stderr, 0)
    assert re.search(r"rank 1 (does not wait, it is at 1\w+|waits for .*) \(row \d+, step \d\)\n", report), report
    assert re.search(r"\nrank 1 at 1\w+ \(row \d+, step \d\)(, not waiting| waits for .*); open: ", report), report
    assert "does not answer" not in report


def test_ranks_that_wait_for_each_other_are_a_circle(tmp_path: Path) -> None:
    ended = launch_marked(3, SCRIPT, "miss", "1", tmp_path, "MARKER")
    assert ended.returncode == 1, ended.stderr
    report = told_by(ended.stderr, 0)
    assert "rank 0 waits for 1SEND_B0 of rank 1, which is after step 3\n" in report
    assert "rank 1 waits for what rank 2 has gathered; rank 2 is at 2RECV_F0 (row 0, step 4)\n" in report
    assert "they wait in a circle: rank 1 for rank 2, rank 2 for rank 1\n" in report
    assert "does not answer" not in report


@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_tells_where_a_rank_is_and_changes_nothing(rank: int, tmp_path: Path) -> None:
    quiet = launch(3, SCRIPT, "quiet", "0", tmp_path, "MARKER", timeout=120)
    ended = launch(3, SCRIPT, "signal", str(rank), tmp_path, "MARKER", timeout=120)
    assert (quiet.returncode, ended.returncode) == (0, 0), ended.stderr
    losses = re.findall(r"losses \[.*\]", quiet.stdout)
    assert len(losses) == 1
    assert re.findall(r"losses \[.*\]", ended.stdout) == losses
    assert "mpipipe: rank" not in quiet.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("mpipipe: rank")]
    place = re.compile(
        rf"mpipipe: rank {rank} (at {rank}\w+ \(row \d+, step \d\)|(at the|after|before).*)"
        r"( waits for .*|, not waiting); open: (nothing|\d (receive|send)s? \(.*\).*)"
    )
    assert all(place.fullmatch(line) for line in lines), lines
    assert any(" waits for " in line for line in lines), lines
    own = re.search(r"own handler (\d+) then (\d+)", ended.stdout)
    assert own
    assert len(lines) <= int(own[1]) <= 40
    assert int(own[2]) == int(own[1]) + 1  # the script's own handler is back

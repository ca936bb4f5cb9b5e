"""The transport's contract and the bit contract's grid over MPI: one launch for each number of ranks walks both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import transport_contract as contract
from launch import REPOSITORY, launch

pytestmark = pytest.mark.mpi

RANKS = REPOSITORY / "tests" / "mpi" / "ranks.py"
MICROBATCHES = (1, 3, 8)
"""Those of the grid in ranks.py."""


def checks_of(p: int, script: Path) -> int:
    """Checks that a launch did; all held."""
    ended = launch(p, script)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    wrong = [f"{line['check']}\n{line['error']}" for line in lines if not line["ok"]]
    assert not wrong, "\n".join(wrong)
    assert ended.returncode == 0, ended.stderr
    return len(lines)


def test_work_that_is_done_late() -> None:
    assert checks_of(2, RANKS.with_name("late_run.py")) == 10


@pytest.mark.parametrize("p", [2, 3, 4])
def test_contract_and_grid(p: int) -> None:
    found = checks_of(p, RANKS)
    grid = sum(tiny.takes(*cut, p, m) for cut in tiny.SCHEDULES for m in MICROBATCHES)
    assert grid >= 40
    assert found == len(contract.CHECKS) + 4 + grid

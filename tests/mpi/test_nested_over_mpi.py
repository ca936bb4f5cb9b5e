"""Layers that pass on a dict with a mask and document ids, over MPI: one launch walks several schedules."""

from __future__ import annotations

import json

import pytest
from launch import REPOSITORY, launch

pytestmark = pytest.mark.mpi

HEADERS = {"1f1b": 6, "gpipe": 6, "zb-h1": 6, "interleaved": 12, "zb-v": 6}
"""That rank 0 of three sends: one before each of the first step's 3 activations and of the first evaluation's 3, at
each border behind a stage of its own. The 2 microbatches of the last step, of 2 rows and of 1, have been seen.
"""


def test_a_mask_and_document_ids_cross_over_mpi() -> None:
    ended = launch(3, REPOSITORY / "tests" / "mpi" / "nested_run.py", timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert {line["schedule"]: line["headers"] for line in lines} == HEADERS
    assert all(line["ok"] for line in lines)

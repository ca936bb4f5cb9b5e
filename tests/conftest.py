"""Settings of every test run."""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """The bit contract holds for equal threads per rank; tests use one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)

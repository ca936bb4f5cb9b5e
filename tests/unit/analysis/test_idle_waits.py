"""How long a rank waited and computed nothing, where the device goes on while the host waits."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.analysis.summary import _idle_lengths
from mpipipe.formats.trace import EVENT_DTYPE


def events(*times: tuple[int, int]) -> np.ndarray:
    found = np.zeros(len(times), EVENT_DTYPE)
    found["t0_ns"], found["t1_ns"] = ([one[k] for one in times] for k in (0, 1))
    return found


@pytest.mark.parametrize(
    "wait, idle",
    [
        ((0, 10), 10),  # before all compute
        ((10, 20), 0),  # the device computes all the time
        ((5, 25), 10),
        ((12, 18), 0),
        ((15, 35), 10),  # over the gap from 20 to 30
        ((0, 60), 30),
        ((20, 30), 10),
        ((45, 60), 10),
        ((50, 60), 10),
        ((12, 12), 0),
    ],
)
def test_a_wait_counts_where_nothing_was_computed(wait: tuple[int, int], idle: int) -> None:
    compute = events((30, 50), (10, 20))
    assert _idle_lengths(events(wait), compute).tolist() == [idle]


def test_without_compute_all_of_it_counts() -> None:
    assert _idle_lengths(events((3, 9), (9, 10)), events()).tolist() == [6, 1]
    assert _idle_lengths(events(), events((1, 2))).tolist() == []

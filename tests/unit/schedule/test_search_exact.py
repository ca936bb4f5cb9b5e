"""The search against an exact solver: what it finds is the shortest there is."""

import pytest
from exact import is_possible

from mpipipe.schedule import Costs, verify
from mpipipe.schedule.search import search
from mpipipe.topology import loop_placement, zigzag_placement

EVEN, LONG_I, SHORT_W = (1, 1, 1), (2, 3, 2), (2, 2, 1)
ENDS = [(2, 2, 1), (1, 1, 1), (1, 1, 2)]
ONE_CHUNK = [
    # p, m, durations of each stage, caps, latency, split
    (2, 2, [EVEN] * 2, None, 0, True),
    (2, 3, [EVEN] * 2, [2, 1], 0, True),
    (2, 4, [LONG_I] * 2, [2, 2], 0, True),
    (2, 4, [(3, 1, 1), (1, 2, 3)], [1, 2], 1, True),
    (2, 4, [(1, 3, 2), (3, 1, 1)], [3, 1], 1, False),
    (3, 2, [LONG_I] * 3, None, 0, True),
    (3, 3, [EVEN] * 3, [2, 2, 2], 1, True),
    (3, 4, [EVEN] * 3, None, 0, True),
    (3, 4, [EVEN] * 3, [3, 3, 3], 0, True),
    (3, 4, [EVEN] * 3, [3, 2, 1], 0, True),
    (3, 4, [SHORT_W] * 3, [2, 2, 2], 0, True),
    (3, 4, ENDS, [3, 3, 2], 0, True),
    (3, 4, ENDS, [3, 2, 1], 1, True),
    (3, 4, ENDS, None, 1, False),
    (3, 4, [EVEN] * 3, [1, 1, 1], 0, True),
]
TWO_CHUNKS = [
    (2, 2, [EVEN] * 4, [3, 3], 0, True),
    (2, 2, [(2, 1, 1)] * 4, [4, 2], 0, True),
    (2, 3, [EVEN] * 4, None, 0, True),
    (2, 3, [(1, 2, 1)] * 4, [4, 3], 1, True),
    (2, 2, [EVEN] * 4, None, 10, True),
    (2, 3, [(1, 2, 1)] * 4, [4, 3], 4, False),
]


def found(p, v, m, durations, caps, latency, split):
    costs = Costs(*[[one[kind] for one in durations] for kind in range(3)])
    return search(p=p, v=v, m=m, costs=costs, cap=caps, latency=latency, split=split)


def prove(p, v, m, durations, caps, latency, split):
    result = found(p, v, m, durations, caps, latency, split)
    verify(result.table)
    makespan = round(result.simulation.makespan)
    assert result.simulation.makespan == makespan
    contiguous = tuple(stage // v for stage in range(p * v))
    placements = dict.fromkeys((loop_placement(p, v), zigzag_placement(p, v), *([contiguous] if latency else [])))
    problem = {"m": m, "durations": durations, "caps": caps, "latency": latency, "split": split}
    assert is_possible(makespan, placement=result.table.placement, **problem) is True
    for placement in placements:
        assert is_possible(makespan - 1, placement=placement, **problem) is False
    assert result.lower_bound <= makespan
    return result


@pytest.mark.parametrize("case", ONE_CHUNK, ids=str)
def test_one_chunk_is_the_shortest_and_its_bound_says_so(case):
    p, m, durations, caps, latency, split = case
    assert prove(p, 1, m, durations, caps, latency, split).gap == 0


@pytest.mark.parametrize("case", TWO_CHUNKS, ids=str)
def test_two_chunks_are_the_shortest(case):
    p, m, durations, caps, latency, split = case
    prove(p, 2, m, durations, caps, latency, split)


def test_nothing_is_lost_by_microbatches_in_order():
    problem = {"placement": (0, 1), "m": 3, "durations": [(1, 2, 1), (2, 1, 1)], "caps": [2, 2], "in_order": False}
    result = found(2, 1, 3, [(1, 2, 1), (2, 1, 1)], [2, 2], 0, True)
    makespan = round(result.simulation.makespan)
    assert is_possible(makespan, **problem) is True
    assert is_possible(makespan - 1, **problem) is False

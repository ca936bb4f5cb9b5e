"""zb-v: torch's order and the closed forms; the figures of schedules.csv are in test_oracle_figures.py."""

import numpy as np
import pytest

from mpipipe.errors import ScheduleError, TopologyError
from mpipipe.schedule import Costs, build, draw_text, find_problems, formulas_v, lower, simulate, strip
from mpipipe.schedule.families.zb_v import zb_v
from mpipipe.topology import v_placement, zigzag_placement

PICTURE = """
rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
"""
COSTS = [(f, i, w) for f in (1, 2, 3) for i in (1, 2, 3) for w in (0, 1, 2, 3)]


def test_the_picture_in_the_docstring_is_the_table():
    drawn = draw_text(build("zb-v", p=2, m=3)).splitlines()
    assert drawn == PICTURE.strip().splitlines()
    assert [line.strip() for line in zb_v.__doc__.splitlines() if " | " in line] == drawn


def test_placements():
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert zigzag_placement(2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert v_placement(1) == (0, 0)
    with pytest.raises(TopologyError, match=r"pipeline\.ranks"):
        v_placement(0)
    with pytest.raises(TopologyError, match=r"pipeline\.chunks"):
        zigzag_placement(2, 0)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_every_m_is_legal_complete_and_ordered(p):
    for m in range(1, 3 * p + 2):
        table = build("zb-v", p=p, m=m)
        assert find_problems(table) == []
        assert table.ordered
        assert np.bincount(table.kinds, minlength=4).tolist() == [2 * p * m, 0, 2 * p * m, 2 * p * m]
        lowered = lower(table)
        assert find_problems(lowered) == []
        assert strip(lowered) == table
        done = simulate(table)
        assert tuple(done.peak_activations) == formulas_v.peak_activations_zb_v(p, m)
        assert done.messages == formulas_v.messages_zigzag(p, 2, m)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("costs", COSTS)
def test_closed_forms(p, costs):
    for m in {p, max(1, 2 * p - 2), 2 * p - 1, 2 * p, 3 * p + 1}:
        done = simulate(build("zb-v", p=p, m=m), Costs(*costs))
        makespan = formulas_v.makespan_zb_v(p, m, *costs)
        span_bubble = formulas_v.span_bubble_zb_v(p, m, *costs)
        assert makespan in (None, done.makespan)
        assert span_bubble in (None, (done.span - done.busy).max())
        f, i, w = costs
        assert (makespan is None) == (not (f == i == w and m >= 2 * p - 1))
        assert (span_bubble is None) == (not (f == i >= w and m >= 2 * p - 1))


def test_one_chunk_is_refused():
    with pytest.raises(ScheduleError, match=r"'zb-v' has 2 chunks per rank.*pipeline\.chunks = 2"):
        build("zb-v", p=4, v=1, m=8)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_order_is_torchs(p):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for m in range(1, 4 * p + 3):
        stub = object.__new__(schedules.ScheduleZBVZeroBubble)
        stub.pp_group_size, stub.num_stages, stub._n_microbatches = p, 2 * p, m
        rows = build("zb-v", p=p, m=m).rows()
        for rank in range(p):
            theirs = [str(action) for action in stub._calculate_single_rank_operations(rank) if action is not None]
            assert rows[rank] == theirs, (m, rank)

"""hanayo: STRUCTURAL CHECKS ONLY. The paper prints no rule for its order and there is no oracle for its figures: what
is asserted here of times holds for our table, it is no claim about the paper's."""

import re

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, build, draw_text, find_problems, formulas_v, lower, simulate, strip
from mpipipe.schedule.families.hanayo import hanayo

PICTURE = """
rank 0 | 0F0 0F1 .   3F0 3B0---- 3F1 3B1---- .   0B0---- 0F2 .   0B1---- 3F2 3B2---- .   .   .   .   0B2----
rank 1 | .   1F0 2F0 1F1 2F1 .   2B0---- 1B0---- 2B1---- 1B1---- 1F2 2F2 .   .   .   2B2---- 1B2---- .   .
"""


def test_the_picture_in_the_docstring_is_the_table():
    drawn = draw_text(build("hanayo", p=2, m=3)).splitlines()
    assert drawn == PICTURE.strip().splitlines()
    assert [line.strip() for line in hanayo.__doc__.splitlines() if " | " in line] == drawn


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("v", [2, 4, 6])
def test_structure(p, v):
    for m in range(1, 2 * p + 3):
        table = build("hanayo", p=p, v=v, m=m)
        assert table.placement == tuple(s % p if s // p % 2 == 0 else p - 1 - s % p for s in range(p * v))
        assert find_problems(table) == []
        assert table.ordered
        assert np.bincount(table.kinds, minlength=4).tolist() == [p * v * m, p * v * m, 0, 0]
        lowered = lower(table)
        assert find_problems(lowered) == []
        assert strip(lowered) == table
        done = simulate(table)
        assert done.messages == formulas_v.messages_zigzag(p, v, m)
        assert done.peak_activations.max() <= p * v


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 4, 8])
def test_waits_of_our_table(p, v):
    for n in (1, 2, 3):
        table = build("hanayo", p=p, v=v, m=n * p)
        for f, b in ((1, 1), (1, 2), (1, 3), (2, 5), (2, 1), (3, 1)):
            done = simulate(table, Costs(f, b, 0))
            assert done.makespan - done.busy.max() == formulas_v.wait_hanayo(p, n * p, f, b)
    assert formulas_v.wait_hanayo(p, p + 1, 1, 2) is None


@pytest.mark.parametrize("v,near", [(1, "2"), (3, "2 or 4")])
def test_refusals(v, near):
    with pytest.raises(ScheduleError, match=re.escape(f"pipeline.chunks = {v} is odd: take pipeline.chunks = {near}")):
        build("hanayo", p=4, v=v, m=8)

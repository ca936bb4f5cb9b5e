"""chimera: legal for any m, the paper's bubble ratios for m = p, and the closed form for multiples of p."""

import re

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, build, draw_text, find_problems, formulas_v, lower, simulate, strip
from mpipipe.schedule.families.chimera import chimera

PICTURE = """
rank 0 | F0 F1 .  F2 B2--- F3 B3--- .  B0--- .  .  B1---
rank 1 | .  F0 F2 F1 F3 .  B2--- B0--- B3--- B1--- .  .
rank 2 | .  F2 F0 F3 F1 .  B0--- B2--- B1--- B3--- .  .
rank 3 | F2 F3 .  F0 B0--- F1 B1--- .  B2--- .  .  B3---
"""


def test_the_picture_in_the_docstring_is_the_table():
    drawn = draw_text(build("chimera", p=4, m=4)).splitlines()
    assert drawn == PICTURE.strip().splitlines()
    assert [line.strip() for line in chimera.__doc__.splitlines() if " | " in line] == drawn


@pytest.mark.parametrize("p", [2, 4, 6, 10])
def test_every_m_is_legal_within_p_activations(p):
    for m in range(1, 3 * p + 2):
        table = build("chimera", p=p, m=m)
        assert table.mirror == table.placement[::-1]
        assert find_problems(table) == []
        lowered = lower(table)
        assert find_problems(lowered) == []
        assert strip(lowered) == table
        done = simulate(table)
        assert done.peak_activations.max() <= p
        assert done.messages == formulas_v.messages_mirrored(p, m)
        if m % p == 0:
            assert tuple(done.peak_activations) == formulas_v.peak_activations_chimera(p)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_waits(p):
    for n in (1, 2, 3, 5):
        table = build("chimera", p=p, m=n * p)
        for f, b in ((1, 1), (1, 2), (1, 3), (2, 3), (1, 6), (3, 2)):
            done = simulate(table, Costs(f, b, 0))
            wait = done.makespan - done.busy.max()
            assert formulas_v.wait_chimera(p, n * p, f, b) == (wait if b >= f else None)
            if n == 1 and b >= f:
                assert wait == (p - 2) * b
    assert formulas_v.wait_chimera(p, p + 1, 1, 1) is None


@pytest.mark.parametrize("p", [4, 6, 8])
def test_the_papers_ratios_for_as_many_microbatches_as_ranks(p):
    equal = simulate(build("chimera", p=p, m=p), Costs(2, 1, 1))
    double = simulate(build("chimera", p=p, m=p), Costs(1, 1, 1))
    assert equal.bubble_fraction == pytest.approx((p - 2) / (2 * p + p - 2), abs=1e-15)
    assert double.bubble_fraction == pytest.approx((p - 2) / (1.5 * p + p - 2), abs=1e-15)


@pytest.mark.parametrize(
    "p,v,message",
    [
        (5, 1, "pipeline.ranks = 5 is odd: take pipeline.ranks = 4 or 6"),
        (1, 1, "pipeline.ranks = 1 is odd: take pipeline.ranks = 2"),
        (4, 2, "'chimera' has one chunk per rank, pipeline.chunks = 2 was asked for"),
    ],
)
def test_refusals(p, v, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        build("chimera", p=p, v=v, m=8)

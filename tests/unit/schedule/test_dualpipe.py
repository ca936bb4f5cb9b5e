"""dualpipe and dualpipe-v: pairs, copies, torch's order, and the closed forms; figures of schedules.csv are in
test_oracle_figures.py."""

import itertools
import re

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import (
    Costs,
    Kind,
    ScheduleTable,
    build,
    draw_text,
    find_problems,
    formulas_v,
    lower,
    simulate,
    strip,
)
from mpipipe.schedule.families.dualpipe import dualpipe, dualpipe_v

PICTURES = {
    dualpipe: (
        ("dualpipe", 2, 6),
        """
rank 0 | F0 F3 F1 B3--- F4&B0--- F2&B4--- F5&B1--- B5--- I2 W2
rank 1 | F3 F0 F4 B0--- F1&B3--- F5&B1--- F2&B4--- B2--- I5 W5
""",
    ),
    dualpipe_v: (
        ("dualpipe-v", 2, 4),
        """
rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1---- .   3F2&0B0---- 3B2---- .   3F3&0B1---- 3B3---- 0I2 0W2 0I3 0W3
rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0---- 2F2&1B0---- 1F3&2B1---- 2F3&1B1---- 2B2---- 1B2---- .   2I3 1I3 2W3 1W3
""",
    ),
}


@pytest.mark.parametrize("generator", PICTURES, ids=lambda generator: generator.__name__)
def test_the_picture_in_the_docstring_is_the_table(generator):
    (name, p, m), picture = PICTURES[generator]
    drawn = draw_text(build(name, p=p, m=m)).splitlines()
    assert drawn == picture.strip().splitlines()
    assert [line.strip() for line in generator.__doc__.splitlines() if " | " in line] == drawn


def test_rows_of_four_ranks():
    table = build("dualpipe", p=4, m=8)
    assert table.placement == (0, 1, 2, 3)
    assert table.mirror == (3, 2, 1, 0)
    text = [" ".join(row) for row in table.rows()]
    assert text[0] == (
        "0F0 0F1 0F2 3F4 3I4 3W4 3F5 (0F3;3B5)OVERLAP_F_B (3F6;0B0)OVERLAP_F_B "
        "3B6 (3F7;0B1)OVERLAP_F_B 3B7 0I2 0W2 0I3 0W3"
    )
    assert text[2] == (
        "1F4 2F0 1F5 2F1 1F6 2B0 (2F2;1B4)OVERLAP_F_B (1F7;2B1)OVERLAP_F_B (2F3;1B5)OVERLAP_F_B 2B2 1B6 "
        "2I3 1I7 2W3 1W7"
    )
    assert ScheduleTable.from_rows(table.rows(), placement=table.placement, mirror=table.mirror, v=1) == table


def grid(most):
    for p in range(1, most + 1):
        for m in (2 * p, 2 * p + 1, 2 * p + 2, 3 * p, 4 * p):
            if m >= 2 * p:
                yield "dualpipe-v", p, m
                if p % 2 == 0 and m % 2 == 0:
                    yield "dualpipe", p, m


def test_legal_complete_peaks_and_messages():
    for name, p, m in grid(9):
        table = build(name, p=p, m=m)
        assert find_problems(table) == []
        lowered = lower(table)
        assert find_problems(lowered) == []
        assert strip(lowered) == table
        done = simulate(table)
        if name == "dualpipe":
            assert set(done.peak_activations) == {formulas_v.peak_activations_dualpipe(p)}
            assert done.messages == formulas_v.messages_mirrored(p, m)
        else:
            assert table.ordered
            assert set(done.peak_activations) == {formulas_v.peak_activations_dualpipe_v(p)}
            assert done.messages == formulas_v.messages_zigzag(p, 2, m)


def test_each_copy_makes_its_weight_gradients_in_order():
    table = build("dualpipe", p=6, m=14)
    for rank in range(6):
        made = {rank: [], 5 - rank: []}
        for stage, kind, microbatch in table.actions(rank):
            if kind in (Kind.B, Kind.W):
                made[stage].append(microbatch)
        assert made == {rank: list(range(7)), 5 - rank: list(range(7, 14))}


def test_waits():
    """The closed forms for i <= f, and those of the README where it holds: f = i >= w."""
    costs = [c for c in itertools.product((1, 3), (0, 1, 2, 3), (0, 1, 2, 4)) if c[1] <= c[0]] + [(2, 2, 1), (2, 2, 2)]
    for p, more in ((2, 4), (4, 2), (6, 0), (8, 0)):
        for name, form, h in (
            ("dualpipe", formulas_v.wait_dualpipe, p // 2),
            ("dualpipe-v", formulas_v.wait_dualpipe_v, p),
        ):
            table = build(name, p=p, m=2 * p + more)
            for f, i, w in costs:
                b = i + w
                for fb in {None, max(f, b), f + b - 0.25 if w or i else f + b}:
                    if fb is not None and fb < max(f, b):
                        continue
                    done = simulate(table, Costs(f, i, w, FB=fb))
                    wait = done.makespan - done.busy.min()
                    assert wait == form(p, f, i, w, fb)
                    if f == i >= w:
                        assert wait == (h - 1) * ((f + b if fb is None else fb) + b - 3 * w)
                    if fb is None:
                        assert done.busy.min() == done.busy.max()


def test_waits_of_slow_input_gradients():
    """i > f: between our form and the README's; the two figures of the oracle at p = 8."""
    assert formulas_v.wait_dualpipe(8, 1, 2, 1) is None
    for p, costs in itertools.product((4, 8), ((1, 2, 1), (2, 3, 1), (1, 3, 2), (1, 2, 0))):
        f, i, w = costs
        for name, h in (("dualpipe", p // 2), ("dualpipe-v", p)):
            done = simulate(build(name, p=p, m=2 * p), Costs(*costs))
            wait = done.makespan - done.busy.max()
            assert (h - 1) * (2 * f + i - min(i, w)) <= wait <= (h - 1) * (f + 2 * i - w)
    for costs, wait in (((1, 2, 1), 11), ((3, 2, 2), 18)):
        done = simulate(build("dualpipe", p=8, m=16), Costs(*costs))
        assert done.makespan - done.busy.max() == wait


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_order_is_torchs(p):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for m in range(2 * p, 4 * p + 3):
        stub = object.__new__(schedules.ScheduleDualPipeV)
        stub.pp_group_size, stub._n_microbatches = p, m
        rows = build("dualpipe-v", p=p, m=m).rows()
        for rank in range(p):
            theirs = [str(action) for action in stub._calculate_single_rank_operations(rank) if action is not None]
            assert rows[rank] == theirs, (m, rank)


@pytest.mark.parametrize(
    "name,p,v,m,message",
    [
        ("dualpipe", 3, 1, 8, "pipeline.ranks = 3 is odd: take pipeline.ranks = 2 or 4"),
        ("dualpipe", 1, 1, 8, "pipeline.ranks = 1 is odd: take pipeline.ranks = 2"),
        ("dualpipe", 4, 1, 9, "m = 9 (from batch.sequences and batch.microbatch) were asked for: make m 8 or 10"),
        ("dualpipe", 4, 1, 6, "at least 2 * pipeline.ranks, pipeline.ranks = 4 and m = 6"),
        ("dualpipe-v", 4, 2, 7, "were asked for: make m 8"),
        ("dualpipe", 4, 2, 8, "take pipeline.schedule = 'dualpipe-v' (one copy of the model"),
        ("dualpipe-v", 4, 1, 8, "take pipeline.schedule = 'dualpipe' (two copies of the model"),
    ],
)
def test_refusals(name, p, v, m, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        build(name, p=p, v=v, m=m)


def test_half_a_million_actions():
    table = build("dualpipe-v", p=128, m=1024)
    assert table.num_actions == 128 * 4 * 1024 + np.count_nonzero(table.kinds == Kind.W)

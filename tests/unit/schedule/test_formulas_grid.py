"""The closed forms of formulas.py against the simulator over thousands of p, v, m, costs and latencies, exactly."""

from itertools import permutations, product

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, build, formulas, names, simulate

FEW = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 2, 5), (5, 1, 2)]
TRIPLES = [*permutations((1, 2, 5)), *FEW[:3], (2, 2, 1), (2, 1, 2), (1, 2, 2), (0, 1, 1), (1, 1, 0)]


def simulated(table, triple, latency=0):
    return simulate(table, Costs(*triple), latency)


def test_zb_h1():
    for p, m in product(range(1, 7), range(1, 14)):
        table = build("zb-h1", p=p, m=m)
        for triple in TRIPLES:
            assert simulated(table, triple).makespan == formulas.makespan_zb_h1(p, m, *triple), (p, m, triple)


def test_zb_h1_papers_form_under_its_conditions():
    for p, m, (f, i, w) in product(range(1, 9), range(1, 20), TRIPLES):
        bubble = formulas.makespan_zb_h1(p, m, f, i, w) - m * (f + i + w)
        holds = w <= f and w <= i and m >= p
        assert not holds or bubble == (p - 1) * (f + i - w)


def test_zb_h2():
    for p in range(1, 7):
        for m in (2 * p - 1, 2 * p, 3 * p + 1, 4 * p):
            table = build("zb-h2", p=p, m=m)
            for triple in TRIPLES:
                found = simulated(table, triple)
                assert found.makespan == formulas.makespan_zb_h2(p, m, *triple), (p, m, triple)
                assert (found.span - found.busy).max() == formulas.span_bubble_zb_h2(p, m, *triple), (p, m, triple)
                f, i, w = triple
                if w <= f and 2 * w <= f + i:
                    assert formulas.span_bubble_zb_h2(p, m, *triple) == (p - 1) * (f + i - 2 * w)
    assert formulas.makespan_zb_h2(8, 32, 1, 1, 1) == 3 * 32 + 7
    assert formulas.makespan_zb_h2(8, 14, 1, 1, 1) is formulas.span_bubble_zb_h2(8, 14, 1, 1, 1) is None


@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_zb(v):
    for p in range(1, 7):
        for m in range(1, 3 * p + 2):
            table = build("interleaved-zb", p=p, v=v, m=m)
            for triple in FEW:
                expected = formulas.makespan_interleaved_zb(p, v, m, *triple)
                assert (expected is None) == (v > 1 and m < p)
                assert expected is None or simulated(table, triple).makespan == expected, (p, m, triple)


def test_groups_do_not_change_the_makespan():
    for p, v in product(range(1, 6), (2, 3)):
        for m in range(p, 3 * p + 2):
            for group in range(p, m + 1):
                if 0 < m % group < p:
                    continue
                whole = build(f"interleaved:group={group}", p=p, v=v, m=m)
                split = build(f"interleaved-zb:group={group}", p=p, v=v, m=m)
                for f, i, w in FEW[1:3]:
                    assert simulated(whole, (f, i, w)).makespan == formulas.makespan(p, v, m, f, i + w)
                    expected = formulas.makespan_interleaved_zb(p, v, m, f, i, w)
                    assert simulated(split, (f, i, w)).makespan == expected


@pytest.mark.parametrize("per_hop", [1, 2, 3, 4])
def test_eager_with_every_latency(per_hop):
    for p, m in product(range(1, 7), range(1, 12)):
        table = build(f"eager-1f1b:per_hop={per_hop}", p=p, m=m)
        for (f, b), c in (*product([(2, 4)], (0, 1, 3, 5, 30)), ((3, 1), 2), ((1, 2), 4)):
            expected = formulas.makespan_eager_latency(p, m, f, b, c, per_hop)
            assert simulated(table, (f, b, 0), c).makespan == expected, (p, m, f, b, c)
            if 2 * c <= (per_hop - 1) * (f + b):
                assert expected == (m + p - 1) * (f + b) + 2 * c * (p - 1)


@pytest.mark.parametrize("name", ["1f1b:warmup=1", "1f1b:warmup=2", "eager-1f1b", "looped-bfs"])
def test_without_latency_all_of_them_take_as_long(name):
    for p, v, m in product(range(1, 7), (1, 2), range(1, 10)):
        if v == 1 or name == "looped-bfs":
            for f, i, w in FEW[1:3]:
                found = simulated(build(name, p=p, v=v, m=m), (f, i, w))
                assert found.makespan == formulas.makespan(p, v, m, f, i + w)


SPECS = [
    ("1f1b:warmup=1", 1),
    ("1f1b:warmup=3", 1),
    ("eager-1f1b", 1),
    ("eager-1f1b:per_hop=3", 1),
    ("looped-bfs", 1),
    ("looped-bfs", 3),
    ("interleaved:group=99", 3),
    ("zb-h1", 1),
    ("zb-h1:warmup=2", 1),
    ("zb-h2", 1),
    ("interleaved-zb", 1),
    ("interleaved-zb", 2),
    ("interleaved-zb", 3),
    ("interleaved-zb:group=99", 2),
]


@pytest.mark.parametrize("name, v", SPECS)
def test_bubble_fraction_peaks_and_messages(name, v):
    for p, m in product(range(1, 8), range(1, 18)):
        found = simulate(build(name, p=p, v=v, m=m))
        assert formulas.bubble_fraction(name, p, v, m) == pytest.approx(found.bubble_fraction, abs=1e-15)
        assert formulas.peak_activations(name, p, v, m) == tuple(found.peak_activations)
        assert formulas.peak_until_input_gradient(name, p, v, m) == tuple(found.peak_until_input_gradient)
        assert formulas.messages(p, v, m) == found.messages


def test_known_peaks():
    assert formulas.peak_activations("zb-h1", 4, 1, 8) == (4, 4, 4, 4)
    assert formulas.peak_until_input_gradient("zb-h1", 4, 1, 8) == (4, 3, 2, 1)
    assert formulas.peak_activations("zb-h2", 4, 1, 8) == (7, 7, 7, 7)
    assert formulas.peak_until_input_gradient("zb-h2", 4, 1, 8) == (7, 5, 3, 1)
    assert formulas.peak_activations("interleaved-zb", 4, 2, 9) == (9, 9, 9, 9)


@pytest.mark.parametrize("name", names())
def test_every_schedule_has_a_bubble_fraction_and_peaks(name):
    table = build(name, p=4, m=16)
    found = simulate(table)
    assert formulas.bubble_fraction(name, 4, table.v, 16) == pytest.approx(found.bubble_fraction, abs=1e-15)
    assert formulas.peak_activations(name, 4, table.v, 16) == tuple(found.peak_activations)
    assert formulas.peak_until_input_gradient(name, 4, table.v, 16) == tuple(found.peak_until_input_gradient)


def test_a_schedule_that_there_is_not():
    with pytest.raises(ScheduleError, match="'zb-h3' is unknown; did you mean 'zb-h"):
        formulas.bubble_fraction("zb-h3", 4, 1, 8)

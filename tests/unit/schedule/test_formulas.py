"""formulas.py against the simulator, exactly."""

import numpy as np
import pytest

from mpipipe.schedule import Costs, build, formulas, forward_only, simulate
from mpipipe.topology import loop_placement

COSTS = [Costs(), Costs(2, 3, 1), Costs(3, 2, 2), Costs(1, 0, 5)]


def whole(costs):
    return costs.F, costs.I + costs.W


@pytest.mark.parametrize("name,v", [("gpipe", 1), ("gpipe", 3), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
@pytest.mark.parametrize("costs", COSTS)
def test_makespan_bubble_peak_and_messages(name, v, costs):
    f, b = whole(costs)
    for p in range(1, 8):
        for m in range(1, 16):
            found = simulate(build(name, p=p, v=v, m=m), costs)
            assert found.makespan == formulas.makespan(p, v, m, f, b)
            assert found.bubble_fraction == pytest.approx(formulas.bubble_fraction(name, p, v, m), abs=1e-15)
            assert tuple(found.peak_activations) == formulas.peak_activations(name, p, v, m)
            assert found.messages == formulas.messages(p, v, m)
            assert found.lower_bound <= found.makespan


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_over_a_larger_grid(v):
    for p in range(2, 10):
        for m in range(p, 4 * p + 3):
            assert simulate(build("interleaved", p=p, v=v, m=m)).makespan == (m * v + p - 1) * 3


@pytest.mark.parametrize("costs", COSTS)
def test_naive(costs):
    f, b = whole(costs)
    for p in range(1, 6):
        for v in (1, 2, 3):
            for m in (1, 2, 5):
                found = simulate(build("naive", p=p, v=v, m=m), costs)
                assert found.makespan == formulas.makespan_naive(p, v, m, f, b) == m * p * v * (f + b)
                assert 1 - found.bubble_fraction == pytest.approx(1 / p, abs=1e-15)
                assert found.bubble_fraction == pytest.approx(formulas.bubble_fraction("naive", p, v, m), abs=1e-15)
                assert tuple(found.peak_activations) == formulas.peak_activations("naive", p, v, m)


def test_forward_only():
    for p in range(1, 6):
        for v in (1, 2, 3):
            for m in range(1, 12):
                found = simulate(forward_only(loop_placement(p, v), p, v, m), Costs(F=2))
                assert found.makespan == formulas.makespan_forward_only(p, v, m, 2)
                assert found.lower_bound == found.makespan or (v > 1 and 1 < m < p)
                assert found.messages == (m * (p * v - 1) if p > 1 else 0)


def test_gpipe_uneven_stages():
    random = np.random.default_rng(5)
    for _ in range(300):
        p, m = int(random.integers(1, 9)), int(random.integers(1, 20))
        f, i, w = (random.integers(1, 12, p).tolist() for _ in range(3))
        b = [one + two for one, two in zip(i, w, strict=True)]
        found = simulate(build("gpipe", p=p, m=m), Costs(F=f, I=i, W=w))
        assert found.makespan == formulas.makespan_gpipe_uneven(m, f, b)
        assert found.lower_bound <= found.makespan


def test_one_f_one_b_uneven_stages_are_above_the_lower_bound():
    random = np.random.default_rng(6)
    for _ in range(300):
        p, m = int(random.integers(1, 9)), int(random.integers(1, 20))
        costs = Costs(*(random.integers(1, 12, p).tolist() for _ in range(3)))
        found = simulate(build("1f1b", p=p, m=m), costs, latency=int(random.integers(0, 3)))
        assert found.lower_bound <= found.makespan
        assert found.lower_bound >= found.busy.max()


@pytest.mark.parametrize("costs", [Costs(), Costs(2, 2, 2), Costs(3, 1, 1), Costs(1, 4, 4)])
@pytest.mark.parametrize("latency", [1, 2, 5])
def test_latency(costs, latency):
    f, b = whole(costs)
    for p in range(1, 8):
        for m in range(1, 15):
            late = simulate(build("1f1b", p=p, m=m), costs, latency).makespan
            assert late == formulas.makespan_1f1b_latency(p, m, f, b, latency)
            late = simulate(build("gpipe", p=p, m=m), costs, latency).makespan
            assert late == formulas.makespan_gpipe_latency(p, m, f, b, latency)


def test_known_bubble_fractions():
    for name in ("gpipe", "1f1b"):
        assert simulate(build(name, p=4, m=8)).bubble_fraction == 3 / 11
        assert simulate(build(name, p=4, m=32)).bubble_fraction == 3 / 35
        assert simulate(build(name, p=8, m=8)).bubble_fraction == 7 / 15
    assert formulas.bubble_fraction("1f1b", 4, 1, 8) == 3 / 11
    assert formulas.bubble_ratio(4, 1, 8) == 3 / 8
    assert formulas.bubble_ratio(4, 2, 8) == 3 / 16

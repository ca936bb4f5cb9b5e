"""Costs, latency and disturbances that are no numbers, or make times that no float holds."""

import json

import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import (
    Costs,
    Disturbance,
    Hops,
    Sends,
    Shown,
    build,
    draw_text,
    figures,
    html_text,
    simulate,
    svg_text,
)
from mpipipe.schedule.exchange import chrome_text
from mpipipe.schedule.search import search

TABLE = build("zb-v", p=2, m=4)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (Costs("a"), "costs F = 'a'"),
        (Costs("1"), "costs F = '1'"),
        (Costs(None), "costs F"),
        (Costs(10**400), "costs F"),
        (Costs(10**5000), "costs F = a number of too many digits"),
        (Costs([1, "b", 1, 1]), "costs F"),
        (Costs(F=1e308), "costs F"),
        (Costs(I=1e-200), "costs I"),
        (Costs(FB=float("nan")), "costs FB"),
        (Costs(FB=[1, 2]), "costs FB"),
    ],
)
def test_costs(costs, said):
    with pytest.raises(ScheduleError, match=said):
        simulate(TABLE, costs)
    if "FB" not in said:
        with pytest.raises(ScheduleError, match=said):
            search(p=2, m=4, v=2, costs=costs)


@pytest.mark.parametrize(
    "hops",
    [Hops(1e308), Hops("a"), Hops(True), Hops(10**400), Hops(0, 1e90, 1e-90), Hops(0, 1, "x"), Hops(0, 1, -1.0)],
)
def test_hops(hops):
    with pytest.raises(ScheduleError):
        simulate(TABLE, hops=hops)


@pytest.mark.parametrize(
    "disturbance",
    [
        Disturbance(seed=-1),
        Disturbance(seed="a"),
        Disturbance(seed=1.5),
        Disturbance(jitter="a"),
        Disturbance(jitter=1e6),
        Disturbance(pause="a", pause_probability=1),
        Disturbance(pause=1, pause_probability=None),
        Disturbance(slow_ranks={"a": 2}),
        Disturbance(slow_ranks={0: 1e308}),
    ],
)
def test_disturbances(disturbance):
    with pytest.raises(ScheduleError):
        simulate(TABLE, disturbance=disturbance)


@pytest.mark.parametrize("wrong", ["3", 2.0, True, 0, -1])
def test_receive_buffers(wrong):
    with pytest.raises(ScheduleError, match="receive buffers"):
        Sends(receive_buffers=wrong)


@pytest.mark.parametrize("latency", [0, 1e-100, 1e100])
@pytest.mark.parametrize("costs", [(1e100, 1, 1e-100), (1e-100, 0, 1e100), (1e-7, 1, 1), (1e100, 1e100, 1e100)])
def test_the_largest_and_least_numbers_are_drawn(costs, latency):
    """Warnings are errors here: nothing overflows on the way to any of the forms."""
    simulation = simulate(TABLE, Costs(*costs), latency)
    assert simulation.lower_bound <= simulation.makespan
    assert json.loads(json.dumps(figures(TABLE, simulation), allow_nan=False))["makespan"] == simulation.makespan
    json.loads(chrome_text(simulation))
    html_text([Shown(TABLE, simulation)])
    svg_text(TABLE, simulation)
    assert max(map(len, draw_text(TABLE, simulation).splitlines())) <= 2009


def test_a_search_with_large_numbers_proves_what_is_true():
    result = search(p=2, m=2, costs=Costs(1e100, 1e100, 1e100), latency=1e100, effort=0)
    assert result.gap == pytest.approx(0)
    assert result.lower_bound == pytest.approx(9e100)

"""The search: its targets, its caps, its bound, and that it gives the same every time."""

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, Hops, build, names, simulate, verify
from mpipipe.schedule.search import search
from mpipipe.schedule.search.graph import make_graph, one_rank
from mpipipe.schedule.search.least import Tails, lower_bound
from mpipipe.schedule.search.list_schedule import Rule, list_schedule
from mpipipe.schedule.search.local import LocalSearch
from mpipipe.schedule.search.problem import from_table, keeps_within, make_problem, run, to_table
from mpipipe.schedule.search.rules import legal, list_schedules
from mpipipe.topology import loop_placement, zigzag_placement

pytestmark = pytest.mark.slow


def problem_of(p, v, m, cap, *, costs=None, latency=0, split=True, placement=None):
    placement = loop_placement(p, v) if placement is None else placement
    caps = [m * v if cap is None else cap] * p if not isinstance(cap, list) else cap
    return make_problem(
        p, v, m, placement, split=split, costs=costs or Costs(), hops=Hops(latency), caps=caps
    )


def bound_of(problem):
    return lower_bound(problem, Tails(problem, make_graph(problem)))


BY_RANK = [8 - rank for rank in range(8)]


@pytest.mark.parametrize(
    "costs, cap, makespan",
    [
        ((1, 1, 1), 16, 103),
        ((1, 1, 1), 8, 103),
        ((1, 1, 1), BY_RANK, 110),
        ((2, 3, 2), 16, 238),
        ((2, 3, 2), 8, 245),
        ((2, 3, 2), BY_RANK, 259),
    ],
)
def test_targets_are_proven_best(costs, cap, makespan):
    result = search(p=8, m=32, costs=Costs(*costs), cap=cap)
    verify(result.table)
    assert result.simulation.makespan == result.lower_bound == makespan
    assert result.gap == 0
    assert result.table.ordered
    assert np.all(result.simulation.peak_activations <= cap)
    assert result.simulation.makespan == simulate(result.table, Costs(*costs)).makespan


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 2)])
@pytest.mark.parametrize("cap", [16, 8, BY_RANK], ids=str)
def test_slow_ends_are_proven_best(costs, cap):
    factors = np.array([13] + [10] * 6 + [13])
    result = search(p=8, m=32, costs=Costs(*[(factors * cost).tolist() for cost in costs]), cap=cap)
    assert result.gap == 0
    assert np.all(result.simulation.peak_activations <= cap)


def test_below_the_memory_of_any_family_the_local_search_helps():
    costs = [13, *[10] * 6, 13]
    arguments = {"p": 8, "m": 32, "cap": 5, "costs": Costs(costs, costs, costs)}
    without, result = search(**arguments, effort=0), search(**arguments)
    assert result.simulation.makespan < without.simulation.makespan
    assert 0 < result.gap < 0.03
    assert result.table.name == "search"
    assert result.found_by.endswith("then local search")
    assert np.all(result.simulation.peak_activations <= 5)
    verify(result.table)


def test_two_chunks_in_a_v():
    result = search(p=4, m=8, v=2, cap=6, effort=0)
    assert result.simulation.makespan <= simulate(build("v-half", p=4, m=8)).makespan
    assert result.simulation.peak_activations.max() <= 6
    assert search(p=8, m=32, v=2, cap=16).simulation.makespan == 199


def test_the_same_arguments_give_the_same_table():
    arguments = {"p": 2, "m": 4, "v": 2, "cap": 3, "costs": Costs(2, 3, 1), "latency": 1}
    first, second = search(**arguments), search(**arguments)
    assert first.table == second.table
    assert first.tried == second.tried
    assert search(**arguments, effort=0).lower_bound == first.lower_bound


def test_what_was_tried_and_why_not():
    result = search(p=4, m=8, cap=4, effort=0)
    tried = {one.name: one for one in result.tried}
    assert tried["zb-h1"].makespan == 8 * 3 + 3
    assert (tried["zb-h1"].peak, tried["zb-h1"].reason) == (4, "")
    assert tried["gpipe"].reason == "keeps 8 activations on rank 0, its cap is 4"
    assert tried["chimera"].reason == "has two copies of every stage"
    assert "pipeline.chunks = 2" in tried["zb-v"].reason
    assert set(names()) <= {name.partition(":")[0] for name in tried}
    makespans = [one.makespan for one in result.tried if not one.reason]
    assert makespans == sorted(makespans)
    assert result.found_by == result.table.name == "zb-h1"


def test_families_alone_and_no_split():
    only = search(p=4, m=8, families=["1f1b", "zb-h1:warmup=3"], effort=0)
    assert only.table == build("zb-h2", p=4, m=8)
    whole = search(p=4, m=8, split=False)
    assert whole.table == build("1f1b", p=4, m=8)
    assert whole.gap == 0
    assert {one.reason for one in whole.tried if one.name == "zb-h1"} == {"splits the backward"}
    assert search(p=4, m=8, families=[], cap=np.int64(4)).found_by.startswith("list: ")
    with pytest.raises(ScheduleError, match="unknown"):
        search(p=4, m=8, families=["zb-h3"])


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"cap": 0}, "cap = 0 on rank 0: a rank keeps an activation of each of its one chunk at once"),
        ({"cap": [4, 4, 1], "v": 2}, "cap = 1 on rank 2.*give 2 or more"),
        ({"cap": [1, 1]}, "cap: found 2 numbers, give 1, or 3: one per rank"),
        ({"v": 0}, "v = 0"),
        ({"m": 0}, "m = 0"),
        ({"effort": -1}, "effort = -1"),
        ({"costs": Costs([1, 1])}, "costs F: found 2 numbers"),
        ({"costs": Costs(-1)}, "costs F = -1: give 0, or a number from"),
        ({"latency": -1}, "latency"),
    ],
)
def test_refusals(arguments, match):
    with pytest.raises(ScheduleError, match=match):
        search(**{"p": 3, "m": 4, **arguments})


def test_costs_of_every_stage_say_how_many_chunks():
    assert search(p=2, m=2, costs=Costs([1, 2, 1, 2]), effort=0).table.v == 2
    assert search(p=2, m=2, costs=Costs([1, 2]), effort=0).table.v == 1


@pytest.mark.parametrize("cost", [0, 1e-9, 1e9])
def test_costs_at_the_edges(cost):
    result = search(p=2, m=3, costs=Costs(cost, cost, cost), effort=0)
    assert result.gap == pytest.approx(0, abs=1e-12)
    verify(result.table)


@pytest.mark.parametrize(
    "p, v, m, cap, makespan", [(1, 1, 3, 1, 9), (1, 3, 2, 3, 18), (2, 1, 1, 1, 5), (3, 1, 1, 9, 7)]
)
def test_small_ones(p, v, m, cap, makespan):
    result = search(p=p, v=v, m=m, cap=cap)
    assert result.simulation.makespan == makespan
    assert result.gap == 0


# The bound.


@pytest.mark.parametrize(
    "cap, expected",
    [
        (None, 32 * 7 + 7 * 2),  # the last rank's work, after the forward of seven stages
        (8, 32 * 7 + 7 * 5 - 7 * 2),  # and before its last I all but 8 W, then the way back
        (1, 32 * (8 * 5 + 2)),  # one microbatch after another
    ],
)
def test_bound(cap, expected):
    assert bound_of(problem_of(8, 1, 32, cap, costs=Costs(2, 3, 2))) == expected


def test_no_table_is_below_its_bound():
    random = np.random.default_rng(5)
    for p, v, m in [(2, 1, 5), (3, 1, 4), (4, 1, 9), (2, 2, 4), (3, 2, 5), (2, 3, 3)]:
        for placement in dict.fromkeys((loop_placement(p, v), zigzag_placement(p, v))):
            for split in (True, False):
                costs = Costs(*random.integers(1, 5, (3, p * v)).tolist())
                caps = random.integers(v, m * v + 1, p).tolist()
                latency = int(random.integers(0, 3))
                problem = problem_of(p, v, m, caps, costs=costs, latency=latency, split=split, placement=placement)
                bound = bound_of(problem)
                tails = [0.0] * problem.num_actions
                for makespan, name, orders in list_schedules(problem, tails, 40):
                    assert makespan >= bound, name
                    assert legal(problem, orders), name
                    table = to_table(problem, orders, name)
                    verify(table)
                    assert table.ordered
                    simulation = simulate(table, costs, latency)
                    assert simulation.makespan == max(run(problem, orders)) <= makespan
                    assert np.all(simulation.peak_activations <= caps)
                    assert bound >= simulation.lower_bound or v > 1


@pytest.mark.parametrize("name", [name for name in names() if name not in ("dualpipe", "chimera")])
def test_families_as_problems(name):
    table = build(name, p=4, m=8)
    split = bool(np.any(table.kinds > 1))
    problem = problem_of(4, table.v, 8, None, costs=Costs(2, 3, 1), split=split, placement=table.placement)
    if not split or not np.any(table.kinds == 1):
        orders = from_table(problem, table)
        assert legal(problem, orders)
        assert max(run(problem, orders)) <= simulate(table, Costs(2, 3, 1)).makespan
        assert max(run(problem, orders)) >= bound_of(problem)


def test_jacksons_preemptive_schedule():
    assert one_rank([], [], []) == 0
    assert one_rank([0, 2], [4, 1], [0, 5]) == 8  # the second interrupts the first
    assert one_rank([3, 0], [1, 1], [0, 9]) == 10
    assert one_rank([5, 5, 5], [1, 2, 3], [0, 0, 0]) == 11


# Its parts.


def test_orders_that_wait_for_each_other():
    problem = problem_of(2, 1, 1, None)
    assert run(problem, [[0, 1, 2], [3, 4, 5]]) == [1, 4, 5, 2, 3, 4]
    assert run(problem, [[1, 0, 2], [3, 4, 5]]) is None
    assert not legal(problem, [[0, 1, 2], [3, 4]])
    assert not keeps_within(problem_of(1, 1, 2, 1), [[0, 1, 2, 4, 3, 5]])


def test_plain_list_schedules_are_1f1b_and_zb_h1_like():
    makespan, orders = list_schedule(problem_of(4, 1, 8, [4, 3, 2, 1]), Rule("plain"))
    assert makespan == 8 * 3 + 3 * 2
    problem = problem_of(4, 1, 8, 4)
    tails = Tails(problem, make_graph(problem)).tails.tolist()
    makespan, orders = list_schedule(problem, Rule("tail", "tail"), tails)
    assert makespan == 8 * 3 + 3
    assert legal(problem, orders)


def test_local_search_mends_a_bad_order():
    problem = problem_of(3, 1, 6, 3, costs=Costs(2, 3, 2))
    bound = bound_of(problem)
    tails = Tails(problem, make_graph(problem)).tails.tolist()
    naive = from_table(problem, build("naive", p=3, m=6))
    local = LocalSearch(problem, naive, tails, seed=0)
    shares = []
    local.go(2_000_000, bound, shares.append)
    assert legal(problem, local.best)
    assert max(run(problem, local.best)) == local.best_cost[0]
    assert max(run(problem, naive)) == 6 * 17
    assert local.best_cost[0] <= bound * 1.05
    assert shares == sorted(shares)


def test_long_messages_want_neighbours_on_a_rank():
    """As reported: p = v = m = 2 and latency 10; with two neighbouring stages a rank a microbatch crosses once each
    way."""
    result = search(p=2, m=2, v=2, latency=10)
    assert result.table.placement == (0, 0, 1, 1)
    assert (result.simulation.makespan, result.gap) == (34, 0)
    assert result.placements == ("loop", "zig-zag", "contiguous")
    assert search(p=2, m=2, v=2, effort=0).placements == ("loop", "zig-zag")
    assert search(p=3, m=2, latency=1, effort=0).placements == ("loop",)


def test_more_actions_than_a_search_takes():
    with pytest.raises(ScheduleError, match="a search takes at most 2,000,000: search with a smaller m"):
        search(p=1000, m=1_000_000)

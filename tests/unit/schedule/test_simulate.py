"""Times, costs, split backwards, latency inside a rank, figures for JSON."""

import json
import time

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Costs, ScheduleTable, build, figures, forward_only, lower, simulate


def words(text):
    return text.split()


def test_start_and_end_of_every_action():
    done = simulate(build("1f1b", p=2, m=2))
    assert done.start.tolist() == [0, 1, 4, 7, 1, 2, 4, 5]
    assert done.end.tolist() == [1, 2, 6, 9, 2, 4, 5, 7]
    assert done.busy.tolist() == [6, 6]
    assert done.span.tolist() == [9, 6]


def test_split_backward_and_two_ways_to_count_activations():
    table = ScheduleTable.from_rows([words("0F0 0F1 0I0 0I1 0W0 0W1"), words("1F0 1I0 1F1 1I1 1W0 1W1")])
    done = simulate(table, Costs(F=1, I=2, W=3))
    assert done.makespan == 15
    assert done.start.tolist() == [0, 1, 4, 7, 9, 12, 1, 2, 4, 5, 7, 10]
    assert done.peak_activations.tolist() == [2, 2]
    assert done.peak_until_input_gradient.tolist() == [2, 1]
    assert done.messages == 4
    assert done.lower_bound <= done.makespan
    assert table.ordered


def test_costs_per_stage():
    done = simulate(build("gpipe", p=2, m=2), Costs(F=[1, 3], I=[1, 1], W=[0, 2]))
    assert done.end.tolist() == [1, 2, 11, 14, 4, 7, 10, 13]
    assert done.busy.tolist() == [4, 12]


def test_latency_is_paid_between_ranks_only():
    rows = [words("0F0 3F0 3B0 0B0"), words("1F0 2F0 2B0 1B0")]
    assert simulate(ScheduleTable.from_rows(rows), latency=10).makespan == 12 + 4 * 10
    assert simulate(build("gpipe", p=1, v=3, m=4), latency=10).makespan == 36
    assert simulate(forward_only((0, 1, 1, 0), 2, 2, 1), latency=0.5).makespan == 5


def test_a_lowered_table_has_the_times_of_the_plain_one():
    table = build("interleaved", p=3, v=2, m=5)
    plain, lowered = simulate(table, latency=1), simulate(lower(table), latency=1)
    assert lowered.table == table
    assert np.array_equal(plain.end, lowered.end)


def test_fractional_costs():
    done = simulate(build("1f1b", p=3, m=4), Costs(F=0.1, I=0.2, W=0.1))
    assert done.makespan == pytest.approx(6 * 0.4, rel=1e-12)
    assert np.all(done.end >= done.start)
    assert done.lower_bound <= done.makespan


def test_zero_costs_have_no_bubble():
    assert simulate(build("1f1b", p=3, m=4), Costs(0, 0, 0)).bubble_fraction == 0


def test_wrong_costs_are_refused():
    table = build("gpipe", p=2, m=1)
    with pytest.raises(ScheduleError, match="costs I: found 3 numbers, give 1, or 2: one per stage"):
        simulate(table, Costs(I=[1, 2, 3]))
    with pytest.raises(ScheduleError, match="costs F = -1"):
        simulate(table, Costs(F=-1))
    with pytest.raises(ScheduleError, match="costs W"):
        simulate(table, Costs(W=float("nan")))
    with pytest.raises(ScheduleError, match="latency = -2"):
        simulate(table, latency=-2)


def test_figures_are_plain_json():
    table = build("interleaved", p=2, v=2, m=2)
    found = json.loads(json.dumps(figures(table, simulate(table, Costs(F=[1, 1, 1, 1.25], I=1, W=1), latency=0))))
    assert found["schedule"] == "interleaved"
    assert (found["p"], found["v"], found["m"], found["stages"]) == (2, 2, 2, 4)
    assert found["placement"] == [0, 1, 0, 1]
    assert found["rows"] == table.rows()
    assert found["costs"] == {"F": [1, 1, 1, 1.25], "I": 1, "W": 1}
    assert found["latency"] == 0
    assert found["makespan"] == 15.5
    assert found["busy"] == [12, 12.5]
    assert found["peak_activations"] == [4, 3]
    assert found["messages"] == 12
    assert found["ordered"] is True
    assert found["lower_bound"] <= found["makespan"]
    assert set(found) == {
        "schedule", "p", "v", "m", "stages", "placement", "rows", "costs", "latency", "makespan", "busy", "span",
        "bubble_fraction", "peak_activations", "peak_until_input_gradient", "messages", "ordered", "lower_bound",
    }  # fmt: skip
    assert isinstance(figures(table, simulate(table))["makespan"], int)


def test_whole_figures_of_a_lowered_table_show_compute_only_rows():
    table = build("1f1b", p=2, m=2)
    assert figures(lower(table), simulate(lower(table))) == figures(table, simulate(table))


def test_large_tables_take_views_and_stay_fast():
    """3.1 million actions, more than lists are used for: same figures, over 100,000 actions/s on any machine."""
    begin = time.perf_counter()
    done = simulate(build("gpipe", p=4, m=390_000))
    assert time.perf_counter() - begin < 31
    assert done.makespan == (390_000 + 3) * 3
    assert done.peak_activations.tolist() == [390_000] * 4

"""Overlapped pairs, messages with a size, disturbances, the critical path, the memory curve and the bound."""

import math
import random

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import (
    Costs,
    Disturbance,
    Hops,
    ScheduleTable,
    build,
    critical_path,
    forward_only,
    memory_curve,
    names,
    simulate,
)
from mpipipe.schedule.action import Kind

PAIRED = ScheduleTable.from_rows([["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]])


def tables():
    """Legal tables of every family, some with several chunks and few microbatches."""
    for name in names():
        for p, v, m in ((1, None, 3), (2, None, 4), (4, None, 8), (4, 2, 9), (3, 2, 2)):
            try:
                yield build(name, p=p, v=v, m=m)
            except ScheduleError:
                continue
    yield forward_only((0, 1, 2), 3, 1, 4)
    yield PAIRED


def by_brute_force(table, durations, hops):
    """Start and end of each action by repeated relaxation of the rules as they stand in the docstrings."""
    start = np.zeros(table.num_actions)
    columns = (table.stages.tolist(), table.kinds.tolist(), table.microbatches.tolist())
    where = {action: i for i, action in enumerate(zip(*columns, strict=True))}
    pair_of = {int(i): int(i) for i in table.overlaps} | {int(i) + 1: int(i) for i in table.overlaps}
    for _ in range(table.num_actions + 1):
        before = start.copy()
        for i in range(table.num_actions):
            s, kind, mb = int(table.stages[i]), int(table.kinds[i]), int(table.microbatches[i])
            rank = table.rank_of(s, mb)
            ready = 0.0
            lead = pair_of.get(i, i)
            if lead > table.offsets[rank]:
                previous = lead - 1
                ready = start[pair_of.get(previous, previous)] + durations[pair_of.get(previous, previous)]
            for one in (i,) if i not in pair_of else (lead, lead + 1):
                s, kind, mb = int(table.stages[one]), int(table.kinds[one]), int(table.microbatches[one])
                if kind == Kind.F and s > 0:
                    need, boundary = where[s - 1, Kind.F, mb], s - 1
                elif kind in (Kind.B, Kind.I) and s < table.num_stages - 1:
                    need = where.get((s + 1, Kind.B, mb), where.get((s + 1, Kind.I, mb)))
                    boundary = s
                else:
                    continue
                lead_of_need = pair_of.get(need, need)
                delay = hops[boundary] if table.rank_of(int(table.stages[need]), mb) != table.rank_of(s, mb) else 0.0
                ready = max(ready, start[lead_of_need] + durations[lead_of_need] + delay)
            start[i] = max(start[i], ready)
        if np.array_equal(before, start):
            break
    return start


@pytest.mark.parametrize("case", range(8))
def test_times_are_those_of_the_rules(case):
    random_numbers = random.Random(case)
    for table in tables():
        if table.num_actions > 80:
            continue
        stages = table.num_stages
        costs = Costs(*([random_numbers.randint(1, 5) for _ in range(stages)] for _ in range(3)))
        hops = Hops(random_numbers.randint(0, 2), [random_numbers.randint(0, 3) for _ in range(stages)], 1.0)
        done = simulate(table, costs, hops=hops)
        durations = costs.per_action(done.table)
        expected = by_brute_force(done.table, durations, hops.per_stage(stages))
        assert done.start.tolist() == expected.tolist(), table
        assert done.lower_bound <= done.makespan


def test_a_pair_starts_when_both_have_what_they_need():
    done = simulate(PAIRED, Costs(F=1, I=1, W=1, FB=2.5))
    assert done.start.tolist() == [0, 1, 4.5, 7 - 0.5, 1, 2, 2, 4.5]
    assert done.end.tolist() == [1, 2, 6.5, 8.5, 2, 4.5, 4.5, 6.5]
    assert done.busy.tolist() == [6, 5.5]
    assert done.peak_activations.tolist() == [2, 2]
    assert simulate(PAIRED).makespan == 9


def test_a_pair_takes_no_less_than_its_longer_action():
    with pytest.raises(ScheduleError, match=r"costs FB = 1\.5: two actions at once take no less than .* 2"):
        simulate(PAIRED, Costs(FB=1.5))
    assert simulate(build("1f1b", p=2, m=2), Costs(FB=0.1)).makespan == 9


def test_messages_take_their_size_over_the_bandwidth():
    table = build("gpipe", p=3, m=1)
    assert simulate(table, hops=Hops(1, 8, 4)).makespan == 9 + 4 * (1 + 2)
    assert simulate(table, hops=Hops(0, [2, 6, 100], 2)).makespan == 9 + 2 * (1 + 3)
    assert simulate(table, hops=Hops(1, 8)).makespan == 9 + 4
    for wrong, text in ((Hops(-1), "latency"), (Hops(0, 1, 0), "bandwidth"), (Hops(math.nan), "latency")):
        with pytest.raises(ScheduleError, match=text):
            simulate(table, hops=wrong)
    with pytest.raises(ScheduleError, match="message bytes: found 2"):
        simulate(table, hops=Hops(0, [1, 2]))


def test_a_disturbance_is_the_same_for_the_same_seed():
    table = build("1f1b", p=4, m=8)
    done = [simulate(table, disturbance=Disturbance(seed, jitter=0.1)).end for seed in (1, 1, 2)]
    assert np.array_equal(done[0], done[1])
    assert not np.array_equal(done[0], done[2])
    spread = np.log(Disturbance(3, jitter=0.1).apply(build("gpipe", p=4, m=5000), np.ones(40_000)))
    assert abs(spread.mean()) < 0.003
    assert spread.std() == pytest.approx(0.1, rel=0.03)


def test_a_slow_rank_and_pauses():
    table = build("1f1b", p=4, m=8)
    slow = simulate(table, disturbance=Disturbance(slow_ranks={2: 2.0}))
    assert slow.busy.tolist() == [24, 24, 48, 24]
    assert slow.end.tolist() == simulate(table, Costs(*[[1, 1, 2, 1]] * 3)).end.tolist()
    always = simulate(table, disturbance=Disturbance(pause_probability=1.0, pause=1.0))
    assert always.busy.tolist() == [40] * 4
    for wrong in ({"slow_ranks": {4: 2.0}}, {"slow_ranks": {0: 0.0}}, {"jitter": -1.0}, {"pause_probability": 2.0}):
        with pytest.raises(ScheduleError):
            simulate(table, disturbance=Disturbance(**wrong))


@pytest.mark.parametrize("latency", [0, 1, 2.5])
def test_the_critical_path_adds_up_to_the_makespan(latency):
    random_numbers = random.Random(5)
    for table in tables():
        costs = Costs(*([random_numbers.randint(1, 4) for _ in range(table.num_stages)] for _ in range(3)))
        done = simulate(table, costs, latency)
        path = critical_path(done)
        lengths = done.end[path] - done.start[path]
        waits = done.start[path[1:]] - done.end[path[:-1]]
        assert done.start[path[0]] == 0
        assert done.end[path[-1]] == done.makespan
        assert lengths.sum() + waits.sum() == pytest.approx(done.makespan, rel=1e-12)
        assert set(waits.tolist()) <= {0.0, float(latency)}
        ranks = done.table.owners()[path]
        for before, after, wait in zip(ranks[:-1], ranks[1:], waits, strict=True):
            assert (before != after) == (wait > 0) or (wait == 0 and latency == 0)


def test_the_memory_curve_has_the_peaks_of_the_table():
    for table in tables():
        done = simulate(table)
        for rank in range(table.p):
            curve = memory_curve(done, rank)
            assert np.all(np.diff(curve.times) > 0)
            assert curve.peak == done.peak_activations[rank]
            assert curve.kept[-1] == (0 if not table.forward_only else table.m)
            assert memory_curve(done, rank, weight_inputs=0).peak == done.peak_until_input_gradient[rank]


def test_the_memory_curve_in_bytes():
    table = ScheduleTable.from_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    curve = memory_curve(simulate(table), 0, activation=[10, 20], weight_inputs=[4, 5])
    assert curve.times.tolist() == [0, 4, 5]
    assert curve.kept.tolist() == [10, 4, 0]
    with pytest.raises(ScheduleError, match="part of"):
        memory_curve(simulate(table), 0, activation=1, weight_inputs=2)
    with pytest.raises(ScheduleError, match=r"ranks 0\.\.1"):
        memory_curve(simulate(table), 2)


def test_the_memory_curve_at_times_of_no_length():
    """Actions of no length happen one after the other all the same: the peaks are those of the rank's list."""
    for name in ("1f1b", "gpipe", "zb-v", "dualpipe", "dualpipe-v", "chimera"):
        table = build(name, p=2, m=4)
        for costs in (Costs(0, 0, 0), Costs(0, 1, 1), Costs(1, 0, 0), Costs(0, 1, 0)):
            done = simulate(table, costs)
            for rank in range(2):
                assert memory_curve(done, rank).peak == done.peak_activations[rank]
                assert memory_curve(done, rank, weight_inputs=0).peak == done.peak_until_input_gradient[rank]
                assert memory_curve(done, rank).kept[-1] == 0

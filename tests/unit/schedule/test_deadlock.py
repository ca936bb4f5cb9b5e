"""Deadlock under buffered sends, rendezvous sends and bounded receive buffers."""

import random

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import (
    BUFFERED,
    RENDEZVOUS,
    Kind,
    ScheduleTable,
    Sends,
    build,
    find_deadlock,
    find_problems,
    forward_only,
    lower,
    names,
    receive_buffers_needed,
)
from mpipipe.schedule.deadlock import shortest_cycle


def words(text):
    return text.split()


def runs_by_search(table, sends):
    """Whether a table runs to its end, from the definition: try every rank again until no one goes on."""
    lowered = lower(table)
    rows = [lowered.actions(rank) for rank in range(lowered.p)]
    at = [0] * lowered.p
    sent, taken = set(), [0] * lowered.p
    back = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
    there = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}
    receives = [[action for action in row if action.kind in there] for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            action = row[at[rank]]
            if action.kind in back:
                kind, step = back[action.kind]
                wanted = (action.stage + step, kind, action.microbatch)
                other = lowered.rank_of(action.stage + step, action.microbatch)
                if sends.rendezvous:
                    if at[other] == len(rows[other]) or rows[other][at[other]] != wanted:
                        continue
                    at[other] += 1
                elif wanted not in receives[other][taken[other] :][: sends.receive_buffers]:
                    continue
                sent.add(action)
            elif action.kind in there:
                kind, step = there[action.kind]
                if sends.rendezvous or (action.stage + step, kind, action.microbatch) not in sent:
                    continue
                taken[rank] += 1
            at[rank] += 1
            moved = True
    return all(at[rank] == len(row) for rank, row in enumerate(rows))


def shuffled(table, random_numbers, swaps):
    """A copy of the table with neighbours of a row exchanged, in an order that each rank alone allows."""
    rows = [list(table.actions(rank)) for rank in range(table.p)]
    for _ in range(swaps):
        row = random_numbers.choice(rows)
        if len(row) < 2:
            continue
        i = random_numbers.randrange(len(row) - 1)
        row[i], row[i + 1] = row[i + 1], row[i]
    texts = [[str(action) for action in row] for row in rows]
    return ScheduleTable.from_rows(texts, v=table.v, m=table.m, placement=table.placement, mirror=table.mirror)


def small_tables():
    for name in names():
        for p, v, m in ((2, None, 3), (2, 2, 4), (3, None, 5), (4, None, 8), (4, 2, 4)):
            try:
                yield build(name, p=p, v=v, m=m)
            except ScheduleError:
                continue


def test_three_semantics_are_those_of_the_definition():
    random_numbers = random.Random(3)
    seen = {True: 0, False: 0}
    for table in small_tables():
        for swaps in (0, 0, 3, 12):
            one = shuffled(table, random_numbers, swaps) if swaps else table
            if any(problem.kind not in ("deadlock",) for problem in find_problems(one)):
                continue
            for sends in (BUFFERED, RENDEZVOUS, *(Sends(receive_buffers=k) for k in (1, 2, 3))):
                runs = runs_by_search(one, sends)
                seen[runs] += 1
                assert (find_deadlock(one, sends) == []) == runs, (one.rows(), sends)
            assert (find_deadlock(one) == []) == (find_problems(one) == [])
    assert min(seen.values()) > 50


def test_the_cycle_is_closed_and_each_rank_waits_for_the_next():
    random_numbers = random.Random(4)
    cycles = 0
    for table in small_tables():
        for sends in (RENDEZVOUS, Sends(receive_buffers=1), BUFFERED):
            one = shuffled(table, random_numbers, 6) if sends == BUFFERED else table
            if any(problem.kind != "deadlock" for problem in find_problems(one)):
                continue
            cycle = find_deadlock(one, sends)
            cycles += bool(cycle)
            for wait, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                assert wait.other == following.rank
                assert wait.behind == following.action
            assert len({wait.rank for wait in cycle}) == len(cycle)
    assert cycles > 20


def test_1f1b_stops_with_rendezvous_sends_and_says_why():
    (first, second) = find_deadlock(build("1f1b", p=2, m=3), RENDEZVOUS)
    assert str(first) == "rank 0 at 0SEND_F1 waits for 1RECV_F1 of rank 1, which is behind 1SEND_B0"
    assert str(second) == "rank 1 at 1SEND_B0 waits for 0RECV_B0 of rank 0, which is behind 0SEND_F1"
    assert (first.row, second.row) == (1, 1)


def test_rows_are_those_of_the_given_table():
    table = build("1f1b", p=2, m=3)
    for one in (table, lower(table)):
        for wait in find_deadlock(one, RENDEZVOUS):
            action = one.actions(wait.rank)[wait.row]
            assert str(action) in (wait.action, wait.action.replace("SEND_", "").replace("RECV_", ""))


def test_tables_with_right_data_dependencies_stop_when_sends_block():
    """As reported: tables that are feasible, and stop when each send waits for its receive."""
    for name, p, v, m in (("interleaved", 2, 4, 8), ("interleaved", 4, 2, 8), ("interleaved", 2, 2, 8)):
        table = build(name, p=p, v=v, m=m)
        assert find_problems(table) == []
        assert find_deadlock(table, RENDEZVOUS)
        needed = receive_buffers_needed(table)
        assert needed is not None
        assert needed >= 1
        assert find_deadlock(table, Sends(receive_buffers=needed)) == []


@pytest.mark.parametrize(("table", "needed"), [
    (build("gpipe", p=3, m=5), 0),
    (build("naive", p=3, m=5), 0),
    (forward_only((0, 1, 2), 3, 1, 4), 0),
    (build("1f1b", p=1, m=4), 0),
    (build("1f1b", p=2, m=8), 1),
])  # fmt: skip
def test_receive_buffers_that_a_table_needs(table, needed):
    assert receive_buffers_needed(table) == needed


def test_the_number_of_receive_buffers_is_the_least():
    for table in small_tables():
        needed = receive_buffers_needed(table)
        assert needed is not None
        if needed > 0:
            assert runs_by_search(table, Sends(receive_buffers=needed))
        if needed > 1:
            assert not runs_by_search(table, Sends(receive_buffers=needed - 1))


def test_a_table_that_stops_anyway_needs_no_number():
    rows = [words("0F0 0B0 0F1 0B1"), words("1F1 1B1 1F0 1B0")]
    table = ScheduleTable.from_rows(rows)
    assert receive_buffers_needed(table) is None
    assert [wait.rank for wait in find_deadlock(table)] == [0, 1]


def test_the_shortest_of_several_cycles_is_told():
    assert shortest_cycle({0: 1, 1: 2, 2: 0, 5: 3, 3: 4, 4: 3}) == [3, 4]
    assert shortest_cycle({0: 1, 1: 2, 2: 1}) == [1, 2]
    assert shortest_cycle({7: 3, 3: 9, 9: 7}) == [3, 9, 7]


def test_a_ring_of_three_ranks():
    rows = [words("3F0 0F0 0B0 3B0"), words("1F0 4F0 4B0 1B0"), words("2F0 5F0 5B0 2B0")]
    cycle = find_deadlock(ScheduleTable.from_rows(rows, placement=(0, 1, 2) * 2))
    assert [(wait.rank, wait.action, wait.other) for wait in cycle] == [
        (0, "3RECV_F0", 2), (2, "2RECV_F0", 1), (1, "1RECV_F0", 0),
    ]  # fmt: skip


def test_an_overlapped_pair_waits_for_both():
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]]
    assert find_problems(ScheduleTable.from_rows(rows)) == []
    stuck = ScheduleTable.from_rows([["0F0", "0B0", "0F1", "0B1"], rows[1]])
    (problem,) = find_problems(stuck)
    assert problem.message == (
        "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1, which is behind 1F1; "
        "rank 1 at 1F1 waits for 0F1 of rank 0, which is behind 0B0"
    )
    assert find_deadlock(stuck)


def test_wrong_semantics_are_refused():
    for wrong in ({"receive_buffers": 0}, {"rendezvous": True, "receive_buffers": 2}):
        with pytest.raises(ScheduleError):
            Sends(**wrong)
    assert [str(sends) for sends in (BUFFERED, RENDEZVOUS, Sends(receive_buffers=1), Sends(receive_buffers=2))] == [
        "buffered sends", "rendezvous sends", "1 receive buffer a rank", "2 receive buffers a rank",
    ]  # fmt: skip


def test_time_is_linear_in_the_actions():
    """A table of 130,000 actions in each semantics: seconds, not minutes."""
    table = build("1f1b", p=16, m=2048)
    assert find_deadlock(table) == []
    assert find_deadlock(table, Sends(receive_buffers=2)) == []
    assert np.unique([wait.rank for wait in find_deadlock(table, RENDEZVOUS)]).size == 2


def test_the_least_number_of_buffers_is_that_of_trying_them_all():
    """Random orders, most of which need several buffers or stop with any number."""
    random_numbers = random.Random(11)
    found = set()
    for table in small_tables():
        for swaps in (2, 5, 20, 60):
            one = shuffled(table, random_numbers, swaps)
            if any(problem.kind != "deadlock" for problem in find_problems(one)):
                continue
            most = lower(one).num_actions
            numbers = (number for number in range(1, most + 1) if not find_deadlock(one, Sends(receive_buffers=number)))
            expected = 0 if not find_deadlock(one, RENDEZVOUS) else next(numbers, None)
            assert receive_buffers_needed(one) == expected, one.rows()
            found.add(expected)
    assert found >= {None, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("row", ["0F0 0B0 1B0", "0F0 0F0 0B0 1B0", "(1F0;0B0)OVERLAP_F_B 0F0 1B0"])
def test_two_ranks_that_wait_for_one_action_are_both_woken(row):
    """An action that stands on two ranks: both wait for the action that it needs."""
    table = ScheduleTable.from_rows([words(row), words("1F0 1B0"), words("2F0 2B0")], placement=(0, 1, 2))
    kinds = {problem.kind for problem in find_problems(table)}
    assert "owner" in kinds
    assert "duplicate" in kinds

"""Every kind of broken table is found, and every legal one passes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpipipe.errors import ScheduleDeadlockError, ScheduleError
from mpipipe.schedule import ScheduleTable, build, find_problems, lower, names, simulate, verify


def words(text):
    return text.split()


def rows_of(*texts):
    return [text.split() for text in texts]


def broken(*texts, **given):
    options = {"placement": tuple(range(len(texts))), "v": 1} | given
    return ScheduleTable.from_rows(rows_of(*texts), **options)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
BROKEN = {
    "range: stage": (("0F0 0F1 0B0 0B1 2F0", GOOD[1]), "range", 0, 4, "2F0"),
    "owner": (("0F0 0F1 0B0 0B1 1F0", GOOD[1][4:]), "owner", 0, 4, "1F0"),
    "duplicate": (("0F0 0F1 0F0 0B0 0B1", GOOD[1]), "duplicate", 0, 2, "0F0"),
    "B and I": (("0F0 0F1 0B0 0B1", "1F0 1B0 1I0 1F1 1B1"), "duplicate", 1, 2, "1I0"),
    "F missing": (("0F0 0B0 0B1", GOOD[1]), "missing", 0, None, "0F1"),
    "B missing": ((GOOD[0], "1F0 1B0 1F1"), "missing", 1, None, "1B1"),
    "W missing": ((GOOD[0], "1F0 1B0 1F1 1I1"), "missing", 1, None, "1W1"),
    "I missing": ((GOOD[0], "1F0 1B0 1F1 1W1"), "missing", 1, None, "1I1"),
    "B before F": (("0F0 0B1 0F1 0B0", GOOD[1]), "order", 0, 1, "0B1"),
    "W before I": ((GOOD[0], "1F0 1B0 1F1 1W1 1I1"), "order", 1, 3, "1W1"),
    "deadlock": ((GOOD[0], "1F1 1B1 1F0 1B0"), None, None, None, None),
}


@pytest.mark.parametrize("case", [case for case in BROKEN if BROKEN[case][1]])
def test_broken_tables(case):
    rows, kind, rank, row, action = BROKEN[case]
    table = broken(*rows, m=2)
    first = next(problem for problem in find_problems(table) if problem.kind == kind)
    assert (first.rank, first.row, first.action) == (rank, row, action)
    assert action in first.message
    with pytest.raises(ScheduleError) as caught:
        verify(table)
    assert not isinstance(caught.value, ScheduleDeadlockError)
    assert str(caught.value).splitlines()[0].startswith("schedule 'custom' is not legal: ")
    with pytest.raises(ScheduleError):
        simulate(table)


def test_microbatch_out_of_range():
    problems = find_problems(broken(*GOOD, m=1))
    assert {problem.kind for problem in problems} == {"range"}
    assert [problem.action for problem in problems] == ["0F1", "0B1", "1F1", "1B1"]


def test_a_stage_before_its_input_on_one_rank():
    table = ScheduleTable.from_rows(rows_of("1F0 0F0 1B0 0B0"))
    assert [(problem.kind, problem.row) for problem in find_problems(table)] == [("order", 0)]
    with pytest.raises(ScheduleError, match="comes before 0F0, which it needs"):
        simulate(table)


def test_deadlock_names_the_cycle_and_marks_the_grid():
    table = broken("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    (problem,) = find_problems(table)
    assert (problem.kind, problem.rank, problem.row, problem.action) == ("deadlock", 0, 1, "0B0")
    assert problem.message == (
        "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1, which is behind 1F1; "
        "rank 1 at 1F1 waits for 0F1 of rank 0, which is behind 0B0"
    )
    with pytest.raises(ScheduleDeadlockError) as caught:
        verify(table)
    assert str(caught.value).splitlines()[1:] == [
        "rank 0 | 0F0   [0B0] 0F1   0B1",
        "rank 1 | 1F1   1B1   1F0   1B0",
    ]
    assert (caught.value.rank, caught.value.row, caught.value.action) == (0, 1, "0B0")
    with pytest.raises(ScheduleDeadlockError, match="rank 1 at 1F1 waits for 0F1"):
        simulate(table)


def test_the_cycle_is_without_the_ranks_that_only_wait_for_it():
    table = build("1f1b", p=6, m=6)
    rows = table.rows()
    rows[3][:2] = ["3F1", "3F0"]  # slower, and still legal: stage 4 waits
    assert find_problems(ScheduleTable.from_rows(rows)) == []
    rows = table.rows()
    rows[1] = words("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5")
    rows[2] = words("2F1 2F0 2B1 2B0 2F2 2F3 2B2 2B3 2F4 2F5 2B4 2B5")
    (problem,) = find_problems(ScheduleTable.from_rows(rows))
    assert problem.message == (
        "deadlock: rank 1 at 1B0 waits for 2B0 of rank 2, which is behind 2F1; "
        "rank 2 at 2F1 waits for 1F1 of rank 1, which is behind 1B0"
    )


def test_large_tables_are_shown_in_part():
    table = build("1f1b", p=32, m=64)
    kinds = table.kinds.copy()
    row = table.row_of(20)
    kinds[row.start + 50] = 1 - kinds[row.start + 50]
    bad = replace(table, name="bad", kinds=kinds)
    with pytest.raises(ScheduleError) as caught:
        verify(bad)
    text = str(caught.value)
    assert len(text.splitlines()) == 11
    assert max(len(line) for line in text.splitlines()[1:]) < 150
    assert text.count("[") == 1
    assert text.splitlines()[-1] == "(rows 43..58 of 128, ranks 16..24 of 32)"


def test_limit_of_problems():
    table = ScheduleTable.from_rows([["0F0"]], m=50)
    assert len(find_problems(table)) == 49
    assert len(find_problems(table, limit=5)) == 5


def test_evaluation_tables_are_legal_but_must_be_whole():
    assert find_problems(broken("0F0 0F1", "1F0 1F1")) == []
    assert [problem.action for problem in find_problems(broken("0F0 0F1", "1F0"))] == ["1F1"]


def lowered_rows():
    return lower(ScheduleTable.from_rows(rows_of(*GOOD))).rows()


@pytest.mark.parametrize(
    "change,kind,action",
    [
        (lambda rows: rows[0].remove("0SEND_F1"), "message", "0SEND_F1"),
        (lambda rows: rows[1].remove("1RECV_F0"), "message", "1RECV_F0"),
        (lambda rows: rows[1].append("1SEND_F0"), "message", "1SEND_F0"),
        (lambda rows: rows[0].append("0SEND_F0"), "duplicate", "0SEND_F0"),
        (lambda rows: rows[0].reverse(), "order", "0SEND_F0"),
        (lambda rows: rows[1].append(rows[1].pop(0)), "order", "1F0"),
    ],
)
def test_broken_lowered_tables(change, kind, action):
    rows = lowered_rows()
    assert find_problems(ScheduleTable.from_rows(rows)) == []
    change(rows)
    found = [(problem.kind, problem.action) for problem in find_problems(ScheduleTable.from_rows(rows))]
    assert (kind, action) in found


def test_lowered_deadlock_is_receive_against_send():
    rows = rows_of(
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )
    (problem,) = find_problems(ScheduleTable.from_rows(rows))
    assert problem.kind == "deadlock"
    assert "rank 1 at 1RECV_F1 waits for 0SEND_F1 of rank 0, which is behind 0RECV_B0" in problem.message


@given(st.data())
def test_a_changed_table_is_found_or_runs(data):
    """Swap two actions of one rank: either find_problems says so, or an independent interpreter runs it to the end."""
    name = data.draw(st.sampled_from(names()))
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    try:
        good = build(name, p=p, v=data.draw(st.sampled_from((None, 2))), m=m)
    except ScheduleError:
        assume(False)
    rows = good.rows(pairs=False)
    row = rows[data.draw(st.integers(0, p - 1))]
    first, second = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[first], row[second] = row[second], row[first]
    table = ScheduleTable.from_rows(rows, placement=good.placement, mirror=good.mirror, v=good.v, m=m)
    problems = find_problems(table)
    assert runs(table) == (problems == [])
    if not problems:
        done = simulate(table)
        assert np.all(done.start >= 0)
        assert done.makespan >= done.lower_bound
        assert find_problems(lower(table)) == []


def runs(table):
    """Plain interpreter: any rank whose next action has its inputs does it, until nothing moves."""
    done, at = set(), [0] * table.p
    rows = [table.actions(rank) for rank in range(table.p)]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                stage, kind, microbatch = row[at[rank]]
                needs = {("F", stage - 1, microbatch)} if kind.name == "F" and stage else set()
                if kind.name in "BI":
                    needs = {("F", stage, microbatch)}
                    needs |= {("I", stage + 1, microbatch)} if stage + 1 < table.num_stages else set()
                if kind.name == "W":
                    needs = {("I", stage, microbatch)}
                if not needs <= done:
                    break
                done.add(("I" if kind.name == "B" else kind.name, stage, microbatch))
                at[rank] += 1
                moved = True
    return at == [len(row) for row in rows]

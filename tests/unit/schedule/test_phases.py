"""Warm-up, steady, cool-down."""

import numpy as np
import pytest

from mpipipe.schedule import (
    Phase,
    ScheduleTable,
    action_phases,
    build,
    forward_only,
    lower,
    names,
    phase_bounds,
    simulate,
)

LETTERS = "wsc"


def letters(table):
    """A letter an action, a word a rank."""
    phases = action_phases(table)
    return ["".join(LETTERS[phase] for phase in phases[table.row_of(rank)]) for rank in range(table.p)]


def test_the_staircase_of_1f1b():
    table = build("1f1b", p=3, m=4)
    assert letters(table) == ["wwwssccc", "wwsssscc", "wssssssc"]
    assert phase_bounds(simulate(table)).tolist() == [[0, 7, 10, 18], [0, 5, 11, 16], [0, 3, 12, 14]]


def test_gpipe_has_no_steady_phase():
    table = build("gpipe", p=3, m=4)
    assert letters(table) == ["wwwwcccc"] * 3
    bounds = phase_bounds(simulate(table))
    assert bounds[0].tolist() == [0, 10, 10, 18]
    assert np.array_equal(bounds[:, 1], bounds[:, 2])


def test_a_pair_is_steady_even_where_its_parts_are_the_first_backward_and_the_last_forward():
    table = ScheduleTable.from_rows([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    assert letters(table) == ["wssc"]
    assert phase_bounds(simulate(table)).tolist() == [[0, 1, 4, 6]]


def test_split_backwards_count_as_backwards():
    row = ["0F0", "0F1", "0I0", "0F2", "0W0", "0I1", "0W1", "0I2", "0W2"]
    assert letters(ScheduleTable.from_rows([row])) == ["wwssccccc"]


def test_an_evaluation_is_steady_throughout():
    table = forward_only((0, 1), p=2, v=1, m=3)
    assert letters(table) == ["sss", "sss"]
    assert phase_bounds(simulate(table)).tolist() == [[0, 0, 3, 3], [0, 0, 4, 4]]


def test_a_rank_without_actions_has_no_phase():
    table = ScheduleTable.from_rows([["0F0", "1F0", "1B0", "0B0"], []], v=1, placement=(0, 0))
    assert letters(table) == ["wwcc", ""]
    assert phase_bounds(simulate(table))[1].tolist() == [0, 0, 0, 0]


def test_messages_have_the_phase_of_their_place():
    table = lower(build("1f1b", p=2, m=2))
    assert table.rows()[1] == ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]
    assert letters(table)[1] == "wwsssscc"


@pytest.mark.parametrize("name", names())
def test_phases_come_one_after_the_other(name):
    table = build(name, p=4, m=8)
    assert all("".join(sorted(word, key=LETTERS.index)) == word for word in letters(table))
    bounds = phase_bounds(simulate(table))
    assert np.all(np.diff(bounds, axis=1) >= 0)
    assert [phase.title for phase in Phase] == ["warm-up", "steady", "cool-down"]

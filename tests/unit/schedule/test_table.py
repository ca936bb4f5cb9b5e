"""Actions, tables, their text and their immutability."""

from dataclasses import replace

import numpy as np
import pytest

from mpipipe.errors import ScheduleError
from mpipipe.schedule import Action, Kind, ScheduleTable, build, figures, find_problems, lower, simulate, strip
from mpipipe.topology import chunk_of, loop_placement, stages_on


@pytest.mark.parametrize("kind", list(Kind))
def test_action_text_goes_round(kind):
    action = Action(12, kind, 305)
    assert str(action) == f"12{kind.name}305"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "1F0 2F0", "(0F3;3B1)OVERLAP_F_B"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action"):
        Action.parse(text)


def test_kind_numbers_are_fixed():
    assert [(kind.name, kind.value) for kind in Kind] == [
        ("F", 0), ("B", 1), ("I", 2), ("W", 3), ("SEND_F", 4), ("RECV_F", 5), ("SEND_B", 6), ("RECV_B", 7),
    ]  # fmt: skip


@pytest.mark.parametrize("name,v", [("gpipe", 2), ("1f1b", 1), ("interleaved", 3)])
def test_rows_go_round(name, v):
    table = build(name, p=3, v=v, m=5)
    again = ScheduleTable.from_rows(table.rows())
    assert again == table
    assert hash(again) == hash(table)
    assert (again.name, again.p, again.v, again.m) == ("custom", 3, v, 5)
    assert ScheduleTable.from_rows(lower(table).rows()) == lower(table)


def test_from_rows_leaves_out_empty_cells_and_keeps_what_is_given():
    table = ScheduleTable.from_rows([["", " 0F0", ""], ["1F0 ", " "]], name="x", m=4)
    assert table.rows() == [["0F0"], ["1F0"]]
    assert (table.name, table.m, table.v) == ("x", 4, 1)


def test_from_rows_refuses_what_it_cannot_place():
    with pytest.raises(ScheduleError, match="no rank names stage 1"):
        ScheduleTable.from_rows([["0F0"], ["2F0"]])
    with pytest.raises(ScheduleError, match="3 stages do not go evenly on 2 ranks"):
        ScheduleTable.from_rows([["0F0", "1F0"], ["2F0"]])
    with pytest.raises(ScheduleError, match="at least one row"):
        ScheduleTable.from_rows([])
    with pytest.raises(ScheduleError, match=r"one rank of 0\.\.1 for each of the p\*v = 2 stages"):
        ScheduleTable.from_rows([["0F0"], ["1F0"]], placement=(0, 2))
    with pytest.raises(ScheduleError, match="stages go up to 32767"):
        ScheduleTable.from_rows([["40000F0"]], placement=(0,))


def test_arrays_are_csr_and_read_only():
    table = build("1f1b", p=3, m=4)
    assert (table.offsets.dtype, table.kinds.dtype, table.stages.dtype, table.microbatches.dtype) == (
        np.int64, np.uint8, np.int16, np.int32,
    )  # fmt: skip
    assert table.num_actions == 24
    assert table.row_of(1) == slice(8, 16)
    assert table.actions(2)[1] == (2, Kind.B, 0)
    for array in (table.offsets, table.kinds, table.stages, table.microbatches):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        table.m = 5


def test_equality_is_of_what_is_done():
    table = build("1f1b", p=2, m=2)
    assert table != build("1f1b", p=2, m=3)
    assert table != build("gpipe", p=2, m=2)
    assert table != lower(table)
    assert build("gpipe", p=1, m=1) == build("naive", p=1, m=1)
    assert table != "1f1b"


def test_ordered_looks_at_weight_gradients_of_each_stage():
    def ordered(text):
        return ScheduleTable.from_rows([text.split()]).ordered

    assert ordered("0F0 0F1 0B0 0B1")
    assert not ordered("0F0 0F1 0B1 0B0")
    assert ordered("0F0 0F1 0I1 0I0 0W0 0W1")
    assert not ordered("0F0 0F1 0I0 0I1 0W1 0W0")
    assert ordered("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1")
    assert not ordered("0F0 1F0 0F1 1F1 1B1 1B0 0B0 0B1")


def test_shape_is_checked():
    table = build("gpipe", p=2, m=1)
    good = {"name": "x", "p": 2, "v": 1, "m": 1, "placement": (0, 1), "lowered": False, "kinds": table.kinds}
    good["stages"] = table.stages
    with pytest.raises(ScheduleError, match="offsets must rise"):
        ScheduleTable(**good, offsets=np.array([0, 3, 2]), microbatches=table.microbatches)
    with pytest.raises(ScheduleError, match="arrays do not fit"):
        ScheduleTable(**good, offsets=table.offsets, microbatches=table.microbatches[:3])
    with pytest.raises(ScheduleError, match="holds F, B, I and W only"):
        ScheduleTable(**good | {"kinds": table.kinds + 4}, offsets=table.offsets, microbatches=table.microbatches)


def test_placement():
    placement = loop_placement(3, 2)
    assert placement == (0, 1, 2, 0, 1, 2)
    assert stages_on(placement, 1) == (1, 4)
    assert chunk_of(placement, 4) == 1
    assert [chunk_of((0, 1, 1, 0), stage) for stage in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"pipeline\.chunks"):
        loop_placement(3, 0)


def test_repr_is_short():
    assert repr(lower(build("1f1b", p=2, m=2))) == "<ScheduleTable 1f1b p=2 v=1 m=2 actions=16 lowered>"


def test_a_pair_of_overlapped_actions_is_one_cell_and_two_actions():
    rows = [["0F0", "0F1", "0B0", "0B1", "0UNSHARD"], ["1F0", "(1B0;1F1)OVERLAP_F_B", "1B1"]]
    table = ScheduleTable.from_rows(rows)
    assert table.overlaps.tolist() == [5]
    assert table.rows() == [rows[0][:-1], rows[1]]
    assert table.rows(pairs=False)[1] == ["1F0", "1B0", "1F1", "1B1"]
    assert table.extras == ((0, 4, "0UNSHARD"),)
    assert ScheduleTable.from_rows(table.rows()) == table
    assert ScheduleTable.from_rows(table.rows(pairs=False)) != table
    lowered = lower(table)
    assert lowered.rows()[1] == ["1RECV_F0", "1F0", "1RECV_F1", "(1B0;1F1)OVERLAP_F_B", "1SEND_B0", "1B1", "1SEND_B1"]
    assert strip(lowered) == table


@pytest.mark.parametrize("cell", ["(0F0;0F1)OVERLAP_F_B", "(0F0;0I1)OVERLAP_F_B", "(0F0)OVERLAP_F_B", "0PREFETCH"])
def test_what_is_no_cell(cell):
    with pytest.raises(ScheduleError):
        ScheduleTable.from_rows([[cell]])


def test_a_pair_does_not_reach_over_the_end_of_a_row():
    table = ScheduleTable.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])
    with pytest.raises(ScheduleError, match="one right after the other"):
        replace(table, overlaps=np.array([1]))
    with pytest.raises(ScheduleError, match="share"):
        replace(table, overlaps=np.array([2, 3]))


def test_two_copies_of_a_stage_share_the_microbatches():
    rows = [["0F0", "1F1", "1B1", "0B0"], ["1F0", "0F1", "1B0", "0B1"]]
    good = ScheduleTable.from_rows(rows, placement=(0, 1), mirror=(1, 0))
    assert good.first_mirrored == 1
    assert [good.rank_of(0, microbatch) for microbatch in (0, 1)] == [0, 1]
    assert find_problems(good) == []
    assert lower(good).rows()[0] == ["0F0", "0SEND_F0", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "0RECV_B0", "0B0"]
    assert find_problems(lower(good)) == []
    assert simulate(good).messages == 4
    assert figures(good, simulate(good))["placement"] == [[0, 1], [1, 0]]
    assert good != ScheduleTable.from_rows(rows, placement=(0, 1))
    assert {problem.kind for problem in find_problems(replace(good, mirror=None))} == {"owner"}

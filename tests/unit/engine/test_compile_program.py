"""From tables to programs: what both ends of a message must agree on without having spoken."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from mpipipe.engine import Op, RankProgram, compile_program
from mpipipe.errors import ScheduleError
from mpipipe.schedule import Kind, ScheduleTable, build, forward_only, names
from mpipipe.topology import loop_placement, stages_on
from mpipipe.transport import MESSAGE_TAGS

SENDS = (Kind.SEND_F, Kind.SEND_B)
COMPUTING = (Kind.F, Kind.B, Kind.I, Kind.W)
GRID = [(name, p, v, m) for name in names() for v in (1, 2, 3) for p in (1, 2, 3, 4) for m in (1, 2, 5, 8)]


def tables() -> list[ScheduleTable]:
    trained = []
    for name, p, v, m in GRID:
        with suppress(ScheduleError):  # what the family does not take
            trained.append(build(name, p=p, v=v, m=m))
    trained = [table for table in trained if table.mirror is None]
    evaluated = [forward_only(loop_placement(p, v), p, v, m) for p in (1, 2, 3) for v in (1, 2) for m in (1, 4)]
    return trained + evaluated


def name_of(table: ScheduleTable) -> str:
    return f"{table.name}-p{table.p}-v{table.v}-m{table.m}"


def messages(programs: list[RankProgram], sending: bool) -> dict[tuple[int, int, str], Op]:
    """By sender, receiver and the message's name."""
    found = {}
    for program in programs:
        for op in program.ops:
            if op.kind in COMPUTING or (op.kind in SENDS) != sending:
                continue
            pair = (program.rank, op.peer) if sending else (op.peer, program.rank)
            assert (*pair, op.name) not in found
            found[(*pair, op.name)] = op
    return found


@pytest.mark.parametrize("table", tables(), ids=name_of)
def test_both_ends_agree_and_tags_are_unique(table: ScheduleTable) -> None:
    programs = [compile_program(table, rank) for rank in range(table.p)]
    sent, received = messages(programs, True), messages(programs, False)
    assert sent.keys() == received.keys()
    crossings = sum(a != b for a, b in zip(table.placement, table.placement[1:], strict=False))
    assert len(sent) == crossings * table.m * (1 if table.forward_only else 2)
    tags: dict[tuple[int, int], list[int]] = {}
    ordinals: dict[tuple[int, int], list[int]] = {}
    for key, op in sent.items():
        other = received[key]
        assert (op.tag, op.ordinal, op.microbatch) == (other.tag, other.ordinal, other.microbatch)
        assert 0 <= op.tag < MESSAGE_TAGS - 1
        tags.setdefault(key[:2], []).extend((op.tag, op.tag + 1))  # of the message and of its header
        ordinals.setdefault(key[:2], []).append(other.ordinal)
    for pair, used in tags.items():
        assert len(set(used)) == len(used), pair
        assert sorted(ordinals[pair]) == list(range(len(ordinals[pair])))


@pytest.mark.parametrize("table", tables(), ids=name_of)
def test_computing_rows_are_the_table_s(table: ScheduleTable) -> None:
    for rank, row in enumerate(table.rows(pairs=False)):
        program = compile_program(table, rank)
        computing = [op for op in program.ops if op.kind in COMPUTING]
        assert [str(op) for op in computing] == row
        assert [op.row for op in computing] == list(range(len(row)))
        for op in computing:
            assert stages_on(table.placement, rank)[op.chunk] == op.stage
            assert (op.peer, op.tag) == (-1, -1)
        for before, op, after in zip(program.ops, program.ops[1:], program.ops[2:], strict=False):
            if op.kind in SENDS:  # right after what makes it
                assert (before.row, before.stage, before.microbatch) == (op.row, op.stage, op.microbatch)
            elif op.kind not in COMPUTING:  # right before what needs it
                assert (after.row, after.stage, after.microbatch) == (op.row, op.stage, op.microbatch)
        receives = [op for op in program.ops if op.kind in (Kind.RECV_F, Kind.RECV_B)]
        assert list(program.receives) == receives
        for peer in range(table.p):  # numbers rise as the receiver takes the messages
            numbers = [op.ordinal for op in receives if op.peer == peer]
            assert numbers == list(range(len(numbers)))


def test_the_names_of_a_message_are_its_sender_s() -> None:
    program = compile_program(build("1f1b", p=3, m=1), 1)
    assert [(str(op), op.name) for op in program.ops] == [
        ("1RECV_F0", "0SEND_F0"),
        ("1F0", "1F0"),
        ("1SEND_F0", "1SEND_F0"),
        ("1RECV_B0", "2SEND_B0"),
        ("1B0", "1B0"),
        ("1SEND_B0", "1SEND_B0"),
    ]


def test_a_table_with_two_copies_of_a_stage_is_refused() -> None:
    table = build("dualpipe", p=2, m=4)
    with pytest.raises(ScheduleError, match="keeps every stage on two ranks"):
        compile_program(table, 1)


def test_halves_of_a_backward_and_pairs_are_operations_of_their_own() -> None:
    table = ScheduleTable.from_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    assert [str(op) for op in compile_program(table, 0).ops] == ["0F0", "0SEND_F0", "0RECV_B0", "0I0", "0W0"]
    assert [op.row for op in compile_program(table, 0).ops] == [0, 0, 1, 1, 2]
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]]
    ops = [str(op) for op in compile_program(ScheduleTable.from_rows(rows), 1).ops]
    assert ops == ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"]



def one_way(first: np.ndarray, second: np.ndarray) -> ScheduleTable:
    """Forwards of two ranks in the given orders."""
    m = len(first)
    return ScheduleTable(
        name="one-way",
        p=2,
        v=1,
        m=m,
        placement=(0, 1),
        lowered=False,
        offsets=np.array([0, m, 2 * m], dtype=np.int64),
        kinds=np.full(2 * m, Kind.F, dtype=np.uint8),
        stages=np.repeat(np.array([0, 1], dtype=np.int16), m),
        microbatches=np.concatenate((first, second)).astype(np.int32),
    )


def test_tags_repeat_only_where_messages_keep_their_order() -> None:
    m = MESSAGE_TAGS // 2 + 3
    in_order = np.arange(m)
    programs = [compile_program(one_way(in_order, in_order), rank) for rank in (0, 1)]
    sent = [op for op in programs[0].ops if op.kind == Kind.SEND_F]
    assert [op.tag for op in sent] == [op.tag for op in programs[1].receives]
    assert sent[0].tag == sent[m - 3].tag
    assert max(op.tag for op in sent) + 1 < MESSAGE_TAGS
    for rank in (0, 1):
        with pytest.raises(ScheduleError, match="overtake"):
            compile_program(one_way(in_order[::-1], in_order), rank)
    few = np.arange(100)
    assert len(compile_program(one_way(few[::-1], few), 0).ops) == 200


def test_no_gradient_goes_to_the_stages_before_the_first_trained_one() -> None:
    table = build("1f1b", p=3, m=1)
    programs = [compile_program(table, rank, 1) for rank in range(3)]
    assert [[str(op) for op in program.ops] for program in programs] == [
        ["0F0", "0SEND_F0", "0B0"],
        ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0"],
        ["2RECV_F0", "2F0", "2B0", "2SEND_B0"],
    ]
    assert [[op.row for op in program.ops] for program in programs] == [[0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("table", tables(), ids=name_of)
def test_both_ends_leave_out_the_same_messages(table: ScheduleTable) -> None:
    for first in range(table.num_stages):
        programs = [compile_program(table, rank, first) for rank in range(table.p)]
        sent, received = messages(programs, True), messages(programs, False)
        assert sent.keys() == received.keys()
        assert all((op.tag, op.ordinal) == (received[key].tag, received[key].ordinal) for key, op in sent.items())
        assert all(op.stage > first for op in sent.values() if op.kind == Kind.SEND_B)

"""Tables as torch.distributed.pipelining reads them: rows without a header, compute only or with messages.

Letters: m = num_microbatches, A = number of actions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.check import verify
from mpipipe.schedule.depends import find, in_range
from mpipipe.schedule.exchange.cells import rows_text
from mpipipe.schedule.lower import lower, strip
from mpipipe.schedule.table import Extra, ScheduleTable


def torch_text(table: ScheduleTable) -> str:
    """torch's ``compute_only`` format: F, B, I, W and overlapped pairs.

    A lowered table loses its messages and its UNSHARD, RESHARD and REDUCE_GRAD, which torch's reader of this format
    refuses; a table that was not lowered keeps what it came with. Raises ScheduleError for a bidirectional table: in
    torch a stage lives on one rank.
    """
    _check_copies(table, "torch-csv")
    return rows_text(replace(strip(table), extras=()) if table.lowered else table)


def torch_comms_text(table: ScheduleTable) -> str:
    """torch's ``compute_comms`` format: with SEND and RECV, put in where the table has none.

    torch's messages carry no name: those from one rank to another are received in the order in which they are sent. A
    table that is lowered here gets its RECV in that order; one that was lowered before stays as it is. UNSHARD, RESHARD
    and REDUCE_GRAD stay where they are; none are added. Raises ScheduleError for a bidirectional table and for one with
    stages that do not exist.
    """
    _check_copies(table, "torch-comms-csv")
    if table.lowered:
        return rows_text(table)
    if not bool(np.all(in_range(table))):
        verify(table)
    return rows_text(in_sending_order(lower(table)))


def _check_copies(table: ScheduleTable, form: str) -> None:
    if table.mirror is not None:
        raise ScheduleError(
            f"'{table.name}' has each stage on two ranks, which torch's files can't say: take the format csv or h5 "
            f"instead of {form}"
        )


def in_sending_order(table: ScheduleTable) -> ScheduleTable:
    """A lowered table in which every rank receives the messages of another in the order in which they are sent.

    A RECV is moved forward, to right before that of the first message sent after it that is needed earlier; nothing
    else moves.
    """
    sends, receives = _messages(table)
    ranks = np.repeat(np.arange(table.p), np.diff(table.offsets))
    ways = ranks[sends] * table.p + ranks[receives]
    place = np.arange(table.num_actions)
    turn = np.zeros(table.num_actions, dtype=np.int64)
    turn[receives] = np.arange(receives.size)
    for way in np.unique(ways).tolist():
        mine = receives[ways == way]
        place[mine] = np.minimum.accumulate(mine[::-1])[::-1]
    order = np.lexsort((turn, place))
    new = np.empty_like(order)
    new[order] = np.arange(order.size)
    return replace(
        table,
        kinds=table.kinds[order],
        stages=table.stages[order],
        microbatches=table.microbatches[order],
        overlaps=new[table.overlaps],
        extras=tuple(_moved(extra, table.row_of(extra.rank), new) for extra in table.extras),
    )


def _messages(table: ScheduleTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Flat indices of every SEND, rank after rank in its order, and of the RECV of each; those without are left out."""
    sends = np.flatnonzero((table.kinds == Kind.SEND_F) | (table.kinds == Kind.SEND_B))
    forward = table.kinds[sends] == Kind.SEND_F
    stages = table.stages[sends] + np.where(forward, 1, -1)
    there = (stages >= 0) & (stages < table.num_stages)
    cells = np.where(there, stages, 0) * table.m + table.microbatches[sends]
    receives = np.where(forward, find(table, Kind.RECV_F)[cells], find(table, Kind.RECV_B)[cells]).astype(np.int64)
    there &= receives >= 0
    return sends[there], receives[there]


def _moved(extra: Extra, row: slice, new: NDArray[np.int64]) -> Extra:
    at = row.start + extra.row
    return extra if at >= row.stop else extra._replace(row=int(new[at]) - row.start)

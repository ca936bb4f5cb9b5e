"""Lowering: SEND and RECV actions put into a compute-only table, and taken out again. Letters: A = number of
actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.depends import action_crossings
from mpipipe.schedule.table import Extra, ScheduleTable, frozen


def lower(table: ScheduleTable) -> ScheduleTable:
    """The table with its messages: RECV right before the action that uses the data, SEND right after the one that
    makes it; around both actions of an overlapped pair.

    Only where the two stages live on different ranks. The gradient is sent by the B or I that makes it: ``2SEND_B3``
    after ``2B3``, ``1RECV_B3`` before ``1B3``. A lowered table is returned as it is. Every stage must exist
    (``verify`` first).
    """
    if table.lowered:
        return table
    before, after = action_crossings(table)
    kinds = table.kinds
    is_forward = kinds == Kind.F
    is_backward = (kinds == Kind.B) | (kinds == Kind.I)
    receives = np.where(is_forward, before, is_backward & after)
    sends = np.where(is_forward, after, is_backward & before)
    width = 1 + receives.astype(np.int64) + sends
    place = np.cumsum(width) - width + receives
    source = np.repeat(np.arange(table.num_actions), width)
    new_kinds = np.repeat(kinds, width)
    new_kinds[place[receives] - 1] = np.where(is_forward[receives], Kind.RECV_F, Kind.RECV_B)
    new_kinds[place[sends] + 1] = np.where(is_forward[sends], Kind.SEND_F, Kind.SEND_B)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(width)))
    for first in table.overlaps.tolist():
        _join(new_kinds, source, int(starts[first]), int(starts[first + 2]))
    pairs = table.overlaps
    return replace(
        table,
        lowered=True,
        offsets=starts[table.offsets],
        kinds=frozen(new_kinds),
        stages=frozen(table.stages[source]),
        microbatches=frozen(table.microbatches[source]),
        overlaps=starts[pairs] + receives[pairs] + receives[pairs + 1],
        extras=_moved_extras(table, starts),
    )


def _moved_extras(table: ScheduleTable, places: NDArray[np.int64]) -> tuple[Extra, ...]:
    """The extras of ``table``, before the same actions as they were. ``places`` int64 (A+1,): the new flat index of
    each action, and of the end."""
    moved = []
    for extra in table.extras:
        row = table.row_of(extra.rank)
        place = places[min(row.start + extra.row, row.stop)] - places[row.start]
        moved.append(extra._replace(row=int(place)))
    return tuple(moved)


def _join(kinds: NDArray[np.uint8], source: NDArray[np.int64], begin: int, end: int) -> None:
    """Put the receives of an overlapped pair before both of its actions, and the sends after both."""
    part = kinds[begin:end]
    turn = np.where((part == Kind.RECV_F) | (part == Kind.RECV_B), 0, np.where(part <= Kind.W, 1, 2))
    order = begin + np.argsort(turn, kind="stable")
    kinds[begin:end], source[begin:end] = kinds[order], source[order]


def computing(table: ScheduleTable) -> NDArray[np.int64]:
    """Flat indices of the F, B, I and W actions of a table, int64 (n,)."""
    return np.flatnonzero(table.kinds <= Kind.W)


def strip(table: ScheduleTable) -> ScheduleTable:
    """The compute-only table: without SEND and RECV. ``strip(lower(table)) == table``."""
    if not table.lowered:
        return table
    kept = computing(table)
    return replace(
        table,
        lowered=False,
        offsets=np.searchsorted(kept, table.offsets).astype(np.int64),
        kinds=frozen(table.kinds[kept]),
        stages=frozen(table.stages[kept]),
        microbatches=frozen(table.microbatches[kept]),
        overlaps=np.searchsorted(kept, table.overlaps).astype(np.int64),
        extras=_moved_extras(table, np.searchsorted(kept, np.arange(table.num_actions + 1))) if table.extras else (),
    )

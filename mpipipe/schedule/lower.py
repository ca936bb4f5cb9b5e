"""Lowering: SEND and RECV actions put into a compute-only table, and taken out again. Letters: A = number of
actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.depends import crossings
from mpipipe.schedule.table import ScheduleTable


def lower(table: ScheduleTable) -> ScheduleTable:
    """The table with its messages: RECV right before the action that uses the data, SEND right after the one that
    makes it.

    Only where the two stages live on different ranks. The gradient is sent by the B or I that makes it: ``2SEND_B3``
    after ``2B3``, ``1RECV_B3`` before ``1B3``. A lowered table is returned as it is. Every stage must exist
    (``verify`` first).
    """
    if table.lowered:
        return table
    before, after = crossings(table)
    kinds, stages = table.kinds, table.stages
    is_forward = kinds == Kind.F
    is_backward = (kinds == Kind.B) | (kinds == Kind.I)
    receives = np.where(is_forward, before[stages], is_backward & after[stages])
    sends = np.where(is_forward, after[stages], is_backward & before[stages])
    width = 1 + receives.astype(np.int64) + sends
    place = np.cumsum(width) - width + receives
    new_kinds = np.repeat(kinds, width)
    new_kinds[place[receives] - 1] = np.where(is_forward[receives], Kind.RECV_F, Kind.RECV_B)
    new_kinds[place[sends] + 1] = np.where(is_forward[sends], Kind.SEND_F, Kind.SEND_B)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(width)))
    return replace(
        table,
        lowered=True,
        offsets=starts[table.offsets],
        kinds=new_kinds,
        stages=np.repeat(stages, width),
        microbatches=np.repeat(table.microbatches, width),
    )


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
        kinds=table.kinds[kept],
        stages=table.stages[kept],
        microbatches=table.microbatches[kept],
    )

"""A makespan that no schedule of the same actions on the same placement can beat.

Letters: p = num_ranks, S = number of stages, A = number of actions. Times are in the unit of the costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.depends import crossings
from mpipipe.schedule.table import ScheduleTable


def lower_bound(
    table: ScheduleTable, per_stage: NDArray[np.float64], hops: NDArray[np.float64], durations: NDArray[np.float64]
) -> float:
    """The longer of one microbatch's way through all stages, and each rank's work with the shortest way to it and back
    from it.

    ``per_stage`` float64 (4, S) as ``Costs.per_stage`` gives it, ``hops`` float64 (S,) the time of a message from stage
    s to s+1, ``durations`` float64 (A,). A rank's way there is the forward of all stages before its first; its way back
    the backward of the same stages. A W has no way back: where a rank splits its backward, the way back counts from its
    last I. Forward only: the way back is the forward of all later stages.
    """
    forward_cost = per_stage[Kind.F]
    split = np.zeros(table.num_stages, dtype=bool)
    split[np.unique(table.stages[table.kinds == Kind.I])] = True
    back_cost = np.where(split, per_stage[Kind.I], per_stage[Kind.B])
    busy = sums(table, durations)
    late = sums(table, np.where(table.kinds == Kind.W, durations, 0.0))
    used = copies_used(table)
    before, _ = crossings(table)
    bound = 0.0
    heads = np.full(table.p, np.inf)
    tails = np.full(table.p, np.inf)
    for copy in used:
        ranks = np.asarray(table.placement if copy == 0 else table.mirror)
        way = np.concatenate(([0.0], np.cumsum(np.where(before[copy][1:], hops[:-1], 0.0))))
        there = np.concatenate(([0.0], np.cumsum(forward_cost)[:-1])) + way
        back = np.concatenate(([0.0], np.cumsum(back_cost)[:-1])) + way
        if table.forward_only:
            whole = float(there[-1] + forward_cost[-1])
            tail = whole - there - forward_cost
        else:
            last_weight = float(per_stage[Kind.W][0]) if split[0] else 0.0
            whole = float(there[-1] + forward_cost[-1] + back[-1] + back_cost[-1] + last_weight)
            tail = back
        bound = max(bound, whole)
        np.minimum.at(heads, ranks, there)
        np.minimum.at(tails, ranks, tail)
    some = np.isfinite(heads)
    with_head = heads[some] + busy[some]
    return float(max(bound, with_head.max(initial=0.0), (with_head - late[some] + tails[some]).max(initial=0.0)))


def copies_used(table: ScheduleTable) -> tuple[int, ...]:
    """Which of the two copies of the stages have microbatches: both need m > 1."""
    return (0, 1) if table.mirror is not None and table.first_mirrored < table.m else (0,)


def sums(table: ScheduleTable, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 (p,): the sum of ``values`` (A,) over each rank's actions."""
    return np.array([values[table.row_of(rank)].sum() for rank in range(table.p)])

"""How many activations a rank keeps, over time. Letters: p = num_ranks, S = number of stages, n = number of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.costs import per_stage
from mpipipe.schedule.simulate import Simulation


class MemoryCurve(NamedTuple):
    """``kept[i]`` holds from ``times[i]`` until ``times[i+1]``. Both float64 (n,), times rising.

    ``peak``: the most that is kept, in the order of the rank's list: what is kept for no time at all counts too.
    """

    times: NDArray[np.float64]
    kept: NDArray[np.float64]
    peak: float


def memory_curve(
    simulation: Simulation,
    rank: int,
    *,
    activation: float | Sequence[float] = 1.0,
    weight_inputs: float | Sequence[float] | None = None,
) -> MemoryCurve:
    """What ``rank`` keeps of its forwards, over the time of the step.

    A chunk's activation lives from the start of its F to the end of its B. Where the backward is split, part of it is
    freed by I and the rest by W: ``weight_inputs`` is what W still needs; None: all of it, until W. Both are sizes
    in any one unit, one number or one per stage; 1.0 counts chunk activations. What happens at one time happens in
    the order of the rank's list; in an overlapped pair the forward's activation comes before the backward's goes.
    Raises ScheduleError for a rank that the table lacks.
    """
    table = simulation.table
    if not 0 <= rank < table.p:
        raise ScheduleError(f"rank {rank} is none of the table's ranks 0..{table.p - 1}")
    row = table.row_of(rank)
    kinds, stages = table.kinds[row], table.stages[row]
    whole = per_stage("activation", activation, table.num_stages)
    late = whole if weight_inputs is None else per_stage("weight_inputs", weight_inputs, table.num_stages)
    if np.any(late > whole):
        raise ScheduleError("weight_inputs is a part of activation: it can't be more")
    change = np.zeros((4, table.num_stages))
    change[Kind.F], change[Kind.B] = whole, -whole
    change[Kind.I], change[Kind.W] = late - whole, -late
    times = np.where(kinds == Kind.F, simulation.start[row], simulation.end[row])
    order = np.arange(times.size)
    pairs = table.overlaps[(table.overlaps >= row.start) & (table.overlaps < row.stop)] - row.start
    backward_first = pairs[kinds[pairs] != Kind.F]
    order[backward_first], order[backward_first + 1] = backward_first + 1, backward_first
    times = times[order]
    kept = np.cumsum(change[kinds, stages][order])
    last_of_its_time = np.append(np.diff(times) > 0, True) if times.size else np.empty(0, dtype=bool)
    return MemoryCurve(times[last_of_its_time], kept[last_of_its_time], float(kept.max(initial=0.0)))

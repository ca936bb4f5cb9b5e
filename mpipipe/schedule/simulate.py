"""When each action of a table runs, and the figures that follow.

Letters: p = num_ranks, m = num_microbatches, S = number of stages, A = number of actions. Times are in the unit of the
costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleDeadlockError, ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.check import is_sound, verify
from mpipipe.schedule.depends import NONE, Progress, action_crossings, advance, cross_dependencies, crossings
from mpipipe.schedule.lower import strip
from mpipipe.schedule.table import ScheduleTable


@dataclass(frozen=True)
class Costs:
    """Duration of one chunk's forward (F), input gradient (I) and weight gradient (W): one number, or one per stage. B
    costs I + W."""

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741
    W: float | Sequence[float] = 1.0

    def per_stage(self, num_stages: int) -> NDArray[np.float64]:
        """float64 (4, S): durations of F, B, I and W of every stage. Raises ScheduleError for a wrong length or a
        negative duration."""
        rows = {}
        for name, given in (("F", self.F), ("I", self.I), ("W", self.W)):
            row = np.asarray(given, dtype=np.float64)
            if row.ndim > 1 or (row.ndim == 1 and row.shape[0] != num_stages):
                raise ScheduleError(f"costs {name}: found {row.size} numbers, give 1, or {num_stages}: one per stage")
            if not np.all(np.isfinite(row)) or np.any(row < 0):
                raise ScheduleError(f"costs {name} = {given!r}: durations are finite numbers, 0 or more")
            rows[name] = np.broadcast_to(row, (num_stages,))
        return np.stack((rows["F"], rows["I"] + rows["W"], rows["I"], rows["W"]))


@dataclass(frozen=True, eq=False)
class Simulation:
    """A table with times. ``table`` is compute-only; ``start`` and ``end`` float64 (A,) go with its flat arrays.

    ``makespan``: first start to last end over all ranks (the clock starts at 0). ``busy``, ``span`` float64 (p,): work
    of each rank, and first start to last end on it. ``bubble_fraction``: 1 - sum(busy) / (p * makespan).
    ``peak_activations`` int64 (p,): most chunk activations alive at once, from F until B or W;
    ``peak_until_input_gradient``: from F until B or I. ``messages``: crossings between ranks, both directions.
    ``lower_bound``: no schedule of these actions with this placement is shorter.
    """

    table: ScheduleTable
    costs: Costs
    latency: float
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    makespan: float
    busy: NDArray[np.float64]
    span: NDArray[np.float64]
    bubble_fraction: float
    peak_activations: NDArray[np.int64]
    peak_until_input_gradient: NDArray[np.int64]
    messages: int
    lower_bound: float


def simulate(table: ScheduleTable, costs: Costs | None = None, latency: float = 0.0) -> Simulation:
    """Run every action as early as its rank's order and its data allow.

    ``costs`` defaults to F = I = W = 1. ``latency`` is one way, per hop between two ranks, 0 inside a rank. SEND and
    RECV of a lowered table are left out. Forward-only tables are welcome. Exact for whole-number costs. Raises
    ScheduleError for a table that is not legal.
    """
    table = strip(table)
    costs = Costs() if costs is None else costs
    if not (math.isfinite(latency) and latency >= 0):
        raise ScheduleError(f"latency = {latency!r} must be a finite number, 0 or more")
    per_stage = costs.per_stage(table.num_stages)
    if not is_sound(table):
        _refuse(table)
    durations = per_stage[table.kinds, table.stages]
    needs = between_ranks(table)
    progress = advance(table, needs, durations, latency)
    if not np.array_equal(progress.reached, table.offsets[1:]):
        _refuse(table)
    start = _starts(table, needs, progress, latency)
    end = progress.ends
    makespan = float(end.max(initial=0.0))
    busy = per_rank_sum(table, durations)
    return Simulation(
        table=table,
        costs=costs,
        latency=float(latency),
        start=start,
        end=end,
        makespan=makespan,
        busy=busy,
        span=_spans(table, start, end),
        bubble_fraction=float((table.p * makespan - busy.sum()) / (table.p * makespan)) if makespan > 0 else 0.0,
        peak_activations=_peaks(table, (Kind.B, Kind.W)),
        peak_until_input_gradient=_peaks(table, (Kind.B, Kind.I)),
        messages=count_messages(table),
        lower_bound=_not_above(makespan, _lower_bound(table, per_stage, latency, busy)),
    )


def between_ranks(table: ScheduleTable) -> NDArray[np.int32]:
    """int32 (A,): the needs for actions of other ranks, of a sound table. Raises ScheduleError where one comes too
    late on its own rank."""
    needs = cross_dependencies(table)
    before, after = action_crossings(table)
    crosses = np.where(table.kinds == Kind.F, before, after)
    if bool(np.any(~crosses & (needs > np.arange(table.num_actions, dtype=np.int32)))):
        _refuse(table)
    needs[~crosses] = NONE
    return needs


def per_rank_sum(table: ScheduleTable, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 (p,): the sum of ``values`` (A,) over each rank's actions."""
    return np.array([values[table.row_of(rank)].sum() for rank in range(table.p)])


def count_messages(table: ScheduleTable) -> int:
    """Messages between ranks in one step, forward and backward, of a compute-only table."""
    before, after = action_crossings(table)
    forward = np.count_nonzero(before & (table.kinds == Kind.F))
    backward = np.count_nonzero(after & ((table.kinds == Kind.B) | (table.kinds == Kind.I)))
    return int(forward + backward)


def _refuse(table: ScheduleTable) -> None:
    verify(table)
    raise ScheduleDeadlockError(f"{table!r} can't run to its end")


def _starts(table: ScheduleTable, needs: NDArray[np.int32], progress: Progress, latency: float) -> NDArray[np.float64]:
    """The start of each action: the later of the end of the one before it on its rank and the arrival of what it
    needs."""
    start = np.empty_like(progress.ends)
    start[1:] = progress.ends[:-1]
    start[table.offsets[:-1][np.diff(table.offsets) > 0]] = 0.0
    where = np.flatnonzero(needs >= 0)
    start[where] = np.maximum(start[where], progress.ends[needs[where]] + latency)
    return start


def _not_above(makespan: float, bound: float) -> float:
    """The bound, without what rounding of fractional costs puts it above the makespan."""
    return min(bound, makespan) if bound <= makespan * (1 + 1e-9) else bound


def _spans(table: ScheduleTable, start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    spans = np.zeros(table.p)
    full = np.flatnonzero(np.diff(table.offsets) > 0)
    spans[full] = end[table.offsets[1:][full] - 1] - start[table.offsets[:-1][full]]
    return spans


def _peaks(table: ScheduleTable, freeing: tuple[Kind, ...]) -> NDArray[np.int64]:
    change = np.zeros(len(Kind), dtype=np.int64)
    change[Kind.F] = 1
    change[list(freeing)] = -1
    peaks = np.zeros(table.p, dtype=np.int64)
    for rank in range(table.p):
        peaks[rank] = np.cumsum(change[table.kinds[table.row_of(rank)]]).max(initial=0)
    return peaks


def _lower_bound(
    table: ScheduleTable, per_stage: NDArray[np.float64], latency: float, busy: NDArray[np.float64]
) -> float:
    """The longer of one microbatch's way through all stages, and each rank's work with the shortest way to it and back
    from it.

    A rank's way there is the forward of all stages before its first; its way back the backward of the same stages. A W
    has no way back: where a rank splits its backward, the way back counts from its last I, or not at all. Forward
    only: the way back is the forward of all later stages.
    """
    before, _ = crossings(table)
    hops = np.cumsum(before[0]) * latency
    forward = np.concatenate(([0.0], np.cumsum(per_stage[Kind.F]))) + np.concatenate((hops, hops[-1:]))
    by_rank = [np.flatnonzero(np.asarray(table.placement) == rank) for rank in range(table.p)]
    if table.forward_only:
        tails = [forward[-1] - forward[s[-1]] - per_stage[Kind.F][s[-1]] for s in by_rank if s.size]
        heads = [forward[s[0]] for s in by_rank if s.size]
        works = [busy[rank] for rank, s in enumerate(by_rank) if s.size]
        return float(max(forward[-1], *(h + w + t for h, w, t in zip(heads, works, tails, strict=True))))
    split = np.zeros(table.num_stages, dtype=bool)
    split[np.unique(table.stages[table.kinds == Kind.I])] = True
    back = np.where(split, per_stage[Kind.I], per_stage[Kind.B])
    backward = np.concatenate(([0.0], np.cumsum(back))) + np.concatenate((hops, hops[-1:]))
    last_weight = float(per_stage[Kind.W][0]) if split[0] else 0.0
    bound = float(forward[-1] + backward[-1] + last_weight)
    late_work = per_rank_sum(table, np.where(table.kinds == Kind.W, per_stage[Kind.W][table.stages], 0.0))
    for rank, stages in enumerate(by_rank):
        if stages.size:
            first = stages[0]
            bound = max(bound, float(forward[first] + busy[rank]))
            bound = max(bound, float(forward[first] + busy[rank] - late_work[rank] + backward[first]))
    return bound

"""When each action of a table runs, and the figures that follow.

Letters: p = num_ranks, m = num_microbatches, S = number of stages, A = number of actions. Times are in the unit of the
costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleDeadlockError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.bound import lower_bound, sums
from mpipipe.schedule.check import is_sound, verify
from mpipipe.schedule.costs import Costs, Disturbance, Hops
from mpipipe.schedule.depends import NONE, Progress, action_crossings, advance, cross_dependencies
from mpipipe.schedule.lower import strip
from mpipipe.schedule.table import ScheduleTable


@dataclass(frozen=True, eq=False)
class Simulation:
    """A table with times. ``table`` is compute-only; ``start`` and ``end`` float64 (A,) go with its flat arrays.

    ``needs`` int32 (A,): the flat index of the action of another rank that each action waits for, -1 for none.

    ``makespan``: first start to last end over all ranks (the clock starts at 0). ``busy``, ``span`` float64 (p,): work
    of each rank, and first start to last end on it. ``bubble_fraction``: 1 - sum(busy) / (p * makespan).
    ``peak_activations`` int64 (p,): most chunk activations alive at once, from F until B or W;
    ``peak_until_input_gradient``: from F until B or I. ``messages``: crossings between ranks, both directions.
    ``lower_bound``: no schedule of these actions with this placement is shorter.
    """

    table: ScheduleTable
    costs: Costs
    latency: float
    hops: Hops
    needs: NDArray[np.int32]
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


def simulate(
    table: ScheduleTable,
    costs: Costs | None = None,
    latency: float = 0.0,
    *,
    hops: Hops | None = None,
    disturbance: Disturbance | None = None,
) -> Simulation:
    """Run every action as early as its rank's order and its data allow.

    ``costs`` defaults to F = I = W = 1. ``latency`` is one way, per hop between two ranks, 0 inside a rank; ``hops``
    says more about messages and then holds the latency too. The two actions of an overlapped pair start when both have
    what they need, and end together. SEND and RECV of a lowered table are left out. Forward-only tables are welcome.
    Exact for whole-number costs. Raises ScheduleError for a table that is not legal and numbers out of range.
    """
    table = strip(table)
    costs = Costs() if costs is None else costs
    hops = Hops(latency) if hops is None else hops
    delays = hops.per_stage(table.num_stages)
    per_stage = costs.per_stage(table.num_stages)
    if not is_sound(table):
        _refuse(table)
    durations = costs.per_action(table)
    if disturbance is not None:
        durations = disturbance.apply(table, durations)
    needs = between_ranks(table)
    arrival = _arrival_delays(table, delays)
    progress = advance(table, needs, durations, arrival)
    if not np.array_equal(progress.reached, table.offsets[1:]):
        _refuse(table)
    start = _starts(table, needs, progress, arrival)
    makespan = float(progress.ends.max(initial=0.0))
    busy = sums(table, durations)
    return Simulation(
        table=table,
        costs=costs,
        latency=float(hops.latency),
        hops=hops,
        needs=needs,
        start=start,
        end=progress.ends,
        makespan=makespan,
        busy=busy,
        span=_spans(table, start, progress.ends),
        bubble_fraction=float((table.p * makespan - busy.sum()) / (table.p * makespan)) if makespan > 0 else 0.0,
        peak_activations=peaks(table, (Kind.B, Kind.W)),
        peak_until_input_gradient=peaks(table, (Kind.B, Kind.I)),
        messages=count_messages(table),
        lower_bound=_not_above(makespan, lower_bound(table, per_stage, delays, durations)),
    )


def _arrival_delays(table: ScheduleTable, delays: NDArray[np.float64]) -> float | NDArray[np.float64]:
    """The time of the message that each action waits for: one number where all are alike, else float64 (A,)."""
    if table.num_stages < 2 or bool(np.all(delays[:-1] == delays[0])):
        return float(delays[0])
    before = np.concatenate(([0.0], delays[:-1]))
    return np.where(table.kinds == Kind.F, before[table.stages], delays[table.stages])


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


def count_messages(table: ScheduleTable) -> int:
    """Messages between ranks in one step, forward and backward, of a compute-only table."""
    before, after = action_crossings(table)
    forward = np.count_nonzero(before & (table.kinds == Kind.F))
    backward = np.count_nonzero(after & ((table.kinds == Kind.B) | (table.kinds == Kind.I)))
    return int(forward + backward)


def _refuse(table: ScheduleTable) -> None:
    verify(table)
    raise ScheduleDeadlockError(f"{table!r} can't run to its end")


def _starts(
    table: ScheduleTable,
    needs: NDArray[np.int32],
    progress: Progress,
    arrival: float | NDArray[np.float64],
) -> NDArray[np.float64]:
    """The start of each action: the later of the end of the one before it on its rank and the arrival of what it
    needs."""
    start = np.empty_like(progress.ends)
    start[1:] = progress.ends[:-1]
    start[table.offsets[:-1][np.diff(table.offsets) > 0]] = 0.0
    where = np.flatnonzero(needs >= 0)
    delay = arrival if isinstance(arrival, float) else arrival[where]
    start[where] = np.maximum(start[where], progress.ends[needs[where]] + delay)
    pairs = table.overlaps
    for action in (pairs, pairs + 1):
        ready = progress.ends[needs[action]] + (arrival if isinstance(arrival, float) else arrival[action])
        start[pairs] = np.maximum(start[pairs], np.where(needs[action] >= 0, ready, 0.0))
    start[pairs + 1] = start[pairs]
    return start


def _not_above(makespan: float, bound: float) -> float:
    """The bound, without what rounding of fractional costs puts it above the makespan."""
    return min(bound, makespan) if bound <= makespan * (1 + 1e-9) else bound


def _spans(table: ScheduleTable, start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    spans = np.zeros(table.p)
    full = np.flatnonzero(np.diff(table.offsets) > 0)
    spans[full] = end[table.offsets[1:][full] - 1] - start[table.offsets[:-1][full]]
    return spans


def peaks(table: ScheduleTable, freeing: tuple[Kind, ...]) -> NDArray[np.int64]:
    """int64 (p,): most chunk activations alive at once on each rank, from F until one of the kinds ``freeing``.

    In an overlapped pair the forward's activation comes before the backward's goes.
    """
    change = np.zeros(len(Kind), dtype=np.int64)
    change[Kind.F] = 1
    change[list(freeing)] = -1
    changes = change[table.kinds]
    pairs = table.overlaps
    changes[pairs], changes[pairs + 1] = np.ones_like(pairs), -np.ones_like(pairs)
    return np.array([np.cumsum(changes[table.row_of(rank)]).max(initial=0) for rank in range(table.p)], dtype=np.int64)

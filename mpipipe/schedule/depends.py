"""Who waits for whom in a table, and the order in which its actions can run.

Letters: p = num_ranks, m = num_microbatches, S = number of stages, A = number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.table import ScheduleTable

NONE = -1
"""In an array of flat indices: there is no such action."""

_LISTS_UP_TO = 3_000_000


def in_range(table: ScheduleTable) -> NDArray[np.bool_]:
    """bool (A,): stage and microbatch of the action exist."""
    stages = (table.stages >= 0) & (table.stages < table.num_stages)
    good: NDArray[np.bool_] = stages & (table.microbatches >= 0) & (table.microbatches < table.m)
    return good


def find(table: ScheduleTable, *kinds: Kind) -> NDArray[np.int32]:
    """Flat index of the first action of one of ``kinds`` for each stage and microbatch, int32 (S*m,) at s*m +
    microbatch; NONE if absent."""
    index = np.full(table.num_stages * table.m, NONE, dtype=np.int32)
    wanted = in_range(table)
    wanted &= np.isin(table.kinds, np.array(kinds, dtype=np.uint8))
    where = np.flatnonzero(wanted)[::-1]
    index[_cells(table, where)] = where
    return index


def cross_dependencies(table: ScheduleTable) -> NDArray[np.int32]:
    """Flat index of the action of another stage whose result each action needs, int32 (A,); NONE if it needs none or
    the table lacks it.

    F of stage s needs F of s-1; B and I of s need B or I of s+1. In a lowered table, a need between two ranks is that
    of the RECV for the SEND of the other stage.
    """
    needs = np.full(table.num_actions, NONE, dtype=np.int32)
    good = in_range(table)
    backward = (Kind.B, Kind.I)
    if table.lowered:
        local = _same_rank(table)
        _fill(table, needs, good & local[0], (Kind.F,), (Kind.F,), -1)
        _fill(table, needs, good & local[1], backward, backward, +1)
        _fill(table, needs, good, (Kind.RECV_F,), (Kind.SEND_F,), -1)
        _fill(table, needs, good, (Kind.RECV_B,), (Kind.SEND_B,), +1)
    else:
        _fill(table, needs, good, (Kind.F,), (Kind.F,), -1)
        _fill(table, needs, good, backward, backward, +1)
    return needs


def _cells(table: ScheduleTable, where: NDArray[np.int64]) -> NDArray[np.int64]:
    return table.stages[where].astype(np.int64) * table.m + table.microbatches[where]


def _fill(
    table: ScheduleTable,
    needs: NDArray[np.int32],
    allowed: NDArray[np.bool_],
    kinds: tuple[Kind, ...],
    makers: tuple[Kind, ...],
    step: int,
) -> None:
    stages = table.stages
    edge = stages > 0 if step < 0 else stages < table.num_stages - 1
    where = np.flatnonzero(allowed & edge & np.isin(table.kinds, np.array(kinds, dtype=np.uint8)))
    if where.size:
        needs[where] = find(table, *makers)[_cells(table, where) + step * table.m]


def _same_rank(table: ScheduleTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool (A,) twice: the stage before (after) an action's stage is on the same rank as that stage."""
    before, after = crossings(table)
    stages = np.clip(table.stages, 0, table.num_stages - 1)
    copies = copies_of(table)
    return ~before[copies, stages], ~after[copies, stages]


def copies_of(table: ScheduleTable) -> NDArray[np.intp] | int:
    """Which copy of its stage does each action: intp (A,) of 0 and 1; plain 0 where every stage exists once."""
    if table.mirror is None:
        return 0
    copies: NDArray[np.intp] = (table.microbatches >= table.first_mirrored).astype(np.intp)
    return copies


def crossings(table: ScheduleTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool (copies, S) twice: stage s-1 (s+1) exists and is on another rank than stage s.

    One copy, or two where the table has a mirror: a microbatch stays with one copy of every stage.
    """
    placements = np.array([table.placement] if table.mirror is None else [table.placement, table.mirror])
    differs = placements[:, 1:] != placements[:, :-1]
    edge = np.zeros((len(placements), 1), dtype=bool)
    return np.concatenate((edge, differs), axis=1), np.concatenate((differs, edge), axis=1)


def action_crossings(table: ScheduleTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool (A,) twice: as ``crossings``, for the stage and copy of each action. Stages must be in range."""
    before, after = crossings(table)
    copies = copies_of(table)
    return before[copies, table.stages], after[copies, table.stages]


class Progress(NamedTuple):
    """How far the ranks came. ``ends`` float64 (A,), negative where an action did not run; ``reached`` int64 (p,): the
    flat index of the action at which each rank stands, the end of its list when it is through."""

    ends: NDArray[np.float64]
    reached: NDArray[np.int64]


def advance(
    table: ScheduleTable,
    needs: NDArray[np.int32],
    costs: NDArray[np.float64],
    latency: float | NDArray[np.float64],
) -> Progress:
    """Run every rank's list, each action as early as its rank and its need allow.

    ``needs`` int32 (A,) holds needs between ranks only; ``costs`` float64 (A,) the durations, of an overlapped pair the
    whole duration at its first action; ``latency``, one number or one for each action (A,), is added to the end of the
    action that is needed. Time is linear in A. Exact where costs and latency are whole numbers (below 2**53).
    """
    ends = np.full(table.num_actions, -1.0)
    reached = table.offsets[:-1].copy()
    stops: list[int] = table.offsets[1:].tolist()
    given = (_indexable(needs), _indexable(costs), memoryview(ends.data))
    if isinstance(latency, np.ndarray) or table.overlaps.size:
        delays = np.broadcast_to(np.asarray(latency, dtype=np.float64), (table.num_actions,)).copy()
        _advance_pairs(reached, stops, *given, _indexable(delays), frozenset(table.overlaps.tolist()))
    else:
        _advance(reached, stops, *given, float(latency))
    return Progress(ends, reached)


def _indexable(array: NDArray[Any]) -> Sequence[Any]:
    """The numbers for plain Python to read: a list (faster), for many a view (smaller)."""
    return cast(list[Any], array.tolist()) if array.size <= _LISTS_UP_TO else memoryview(array.data)


def _advance(
    reached: NDArray[np.int64],
    stops: list[int],
    needs: Sequence[int],
    costs: Sequence[float],
    ends: memoryview[Any],
    latency: float,
) -> None:
    """A rank runs until the action it needs has not ended; it leaves its number there (as -2 - rank) and is called
    when that action ends. What stood there before it keeps in ``behind``: two ranks wait for one action in a table with
    duplicates."""
    position = reached.tolist()
    behind = [-1.0] * len(stops)
    clock = [0.0] * len(stops)
    runnable = list(range(len(stops)))[::-1]
    while runnable:
        rank = runnable.pop()
        now = clock[rank]
        at, stop = position[rank], stops[rank]
        while at < stop:
            need = needs[at]
            if need >= 0:
                ready = ends[need]
                if ready < 0.0:
                    behind[rank] = ready
                    ends[need] = -2.0 - rank
                    break
                ready += latency
                if ready > now:
                    now = ready
            now += costs[at]
            waiting = ends[at]
            ends[at] = now
            while waiting < -1.0:
                runnable.append(int(-2.0 - waiting))
                waiting = behind[runnable[-1]]
            at += 1
        position[rank] = at
        clock[rank] = now
    reached[:] = position


def _advance_pairs(
    reached: NDArray[np.int64],
    stops: list[int],
    needs: Sequence[int],
    costs: Sequence[float],
    ends: memoryview[Any],
    delays: Sequence[float],
    pairs: frozenset[int],
) -> None:
    """As ``_advance``, with a delay for each action and overlapped pairs: ``pairs`` holds their first actions."""
    position = reached.tolist()
    behind = [-1.0] * len(stops)
    clock = [0.0] * len(stops)
    runnable = list(range(len(stops)))[::-1]
    while runnable:
        rank = runnable.pop()
        now = clock[rank]
        at, stop = position[rank], stops[rank]
        while at < stop:
            after = at + 2 if at in pairs else at + 1
            start = now
            for one in range(at, after):
                need = needs[one]
                if need >= 0:
                    ready = ends[need]
                    if ready < 0.0:
                        behind[rank] = ready
                        ends[need] = -2.0 - rank
                        break
                    start = max(start, ready + delays[one])
            else:
                now = start + costs[at]
                for one in range(at, after):
                    waiting = ends[one]
                    ends[one] = now
                    while waiting < -1.0:
                        runnable.append(int(-2.0 - waiting))
                        waiting = behind[runnable[-1]]
                at = after
                continue
            break
        position[rank] = at
        clock[rank] = now
    reached[:] = position

"""List scheduling: whenever a rank is free, it does the first in a fixed order of preference of what is ready.

Letters as in ``problem``.

A forward of a rank's chunk j (from 0) begins only if v - j activations more fit under the cap: so that there is room
for one forward of every later chunk. With that no schedule gets stuck. Suppose the oldest microbatch that is not
through waits with the forward of chunk j. All that its rank keeps are then activations of earlier chunks (those of j
and later are of older microbatches, which are through), the last of which left v - (j-1) - 1 = v - j free.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from mpipipe.schedule.search.problem import NONE, Orders, Problem


class Rule(NamedTuple):
    """What a rank prefers.

    ``first``: "I" (before F), "F" (before I) or "tail" (what has the longest time after it at least; W too).
    ``late_chunks``: of two forwards the one of the later chunk, else of the earlier. ``limits``: most activations of
    each rank whose I is not done. ``lag``: a W comes before F and I when so many of the rank, more than ``lag[rank]``,
    wait; else when nothing else is ready or fits. ``patience``: a W does not begin when something else is known to come
    within this part of its duration.
    """

    name: str
    first: str = "I"
    late_chunks: bool = True
    limits: tuple[int, ...] | None = None
    lag: tuple[int, ...] | None = None
    patience: float = 0.0


class _State:
    """How far each stream is, and what has been made when."""

    def __init__(self, problem: Problem) -> None:
        self.arrived: list[list[float]] = [[] for _ in range(problem.num_stages * 2)]
        """Of stage s at 2s when its inputs, at 2s+1 when its gradients are there."""
        self.arrived[0] = [0.0] * problem.m
        self.done = [[0] * problem.kinds for _ in range(problem.num_stages)]
        self.kept = [0] * problem.p
        self.open = [0] * problem.p
        self.free = [0.0] * problem.p


def list_schedule(problem: Problem, rule: Rule, tails: Sequence[float] = ()) -> tuple[float, Orders]:
    """The makespan and the orders of a rule. Caps must be at least v. ``tails`` (N,) for ``first`` = "tail"."""
    state = _State(problem)
    orders: Orders = [[] for _ in range(problem.p)]
    events: list[tuple[float, int]] = [(0.0, rank) for rank in range(problem.p)]
    choose = _by_tail if rule.first == "tail" else _by_kind
    while events:
        now, rank = heapq.heappop(events)
        while events and events[0] == (now, rank):
            heapq.heappop(events)
        if state.free[rank] > now:
            continue
        chosen, wake = choose(problem, rule, state, rank, now, tails)
        if chosen == NONE:
            if wake > now:
                heapq.heappush(events, (wake, rank))
            continue
        end = now + problem.lengths[chosen]
        orders[rank].append(chosen)
        state.free[rank] = end
        heapq.heappush(events, (end, rank))
        woken = _account(problem, state, rank, chosen, end)
        if woken is not None:
            heapq.heappush(events, woken)
    return max(state.free), orders


def _account(problem: Problem, state: _State, rank: int, action: int, end: float) -> tuple[float, int] | None:
    """Note that an action was begun; the time and rank that its result reaches."""
    s, kind = divmod(action // problem.m, problem.kinds)
    state.done[s][kind] += 1
    if kind == 0:
        state.kept[rank] += 1
        state.open[rank] += 1
        if s == problem.num_stages - 1:
            state.arrived[2 * s + 1].append(end)
            return None
        to, at, slot = s + 1, end + problem.delays[s], 2 * (s + 1)
    else:
        if kind == problem.kinds - 1:
            state.kept[rank] -= 1
        if kind != 1:
            return None
        state.open[rank] -= 1
        if s == 0:
            return None
        to, at, slot = s - 1, end + problem.delays[s - 1], 2 * (s - 1) + 1
    state.arrived[slot].append(at)
    return (at, problem.placement[to]) if problem.placement[to] != rank else None


def _ready(problem: Problem, state: _State, s: int, kind: int) -> float:
    """When the next F or I of a stage has what it needs, infinity if that is not known."""
    k = state.done[s][kind]
    there = state.arrived[2 * s + kind]
    if k >= len(there) or (kind == 1 and k >= state.done[s][0]):
        return float("inf")
    return there[k]


def _fits(problem: Problem, rule: Rule, state: _State, rank: int, chunk: int) -> bool:
    limit = problem.caps[rank] if rule.limits is None else rule.limits[rank]
    room = problem.v - chunk
    return problem.caps[rank] - state.kept[rank] >= room and max(limit, problem.v) - state.open[rank] >= room


def _by_kind(
    problem: Problem, rule: Rule, state: _State, rank: int, now: float, tails: Sequence[float]
) -> tuple[int, float]:
    """The action that a rank begins now, or NONE and the time at which to look again."""
    stages = problem.stages[rank]
    weight = _next_weight(problem, state, rank)
    if weight != NONE and rule.lag is not None:
        waiting = sum(state.done[s][1] - state.done[s][2] for s in stages)
        if waiting > rule.lag[rank]:
            return weight, now
    soon = float("inf")
    for kind in (1, 0) if rule.first == "I" else (0, 1):
        chunks = range(problem.v - 1, -1, -1) if rule.late_chunks and kind == 0 else range(problem.v)
        for chunk in chunks:
            s = stages[chunk]
            ready = _ready(problem, state, s, kind)
            if ready == float("inf") or (kind == 0 and not _fits(problem, rule, state, rank, chunk)):
                continue
            if ready <= now:
                return problem.number(s, kind, state.done[s][kind]), now
            soon = min(soon, ready)
    if weight != NONE and soon >= now + rule.patience * problem.lengths[weight]:
        return weight, now
    return NONE, soon if soon < float("inf") else now


def _next_weight(problem: Problem, state: _State, rank: int) -> int:
    """The W that waits for longest, by microbatch; NONE if there is none."""
    if not problem.split:
        return NONE
    best, chosen = problem.m, NONE
    for s in reversed(problem.stages[rank]):
        k = state.done[s][2]
        if k < state.done[s][1] and k < best:
            best, chosen = k, problem.number(s, 2, k)
    return chosen


def _by_tail(
    problem: Problem, rule: Rule, state: _State, rank: int, now: float, tails: Sequence[float]
) -> tuple[int, float]:
    """As ``_by_kind``: what is ready with the longest tail. With patience also what comes within that part of the
    duration of the one that would begin now, if its tail is longer."""
    best, chosen, soon = -1.0, NONE, float("inf")
    coming: list[tuple[float, float]] = []
    for chunk, s in enumerate(problem.stages[rank]):
        done = state.done[s]
        for kind in range(problem.kinds):
            if kind == 2:
                ready = now if done[2] < done[1] else float("inf")
            elif kind == 0 and not _fits(problem, rule, state, rank, chunk):
                continue
            else:
                ready = _ready(problem, state, s, kind)
            if ready == float("inf"):
                continue
            action = problem.number(s, kind, done[kind])
            tail = tails[action] + problem.lengths[action]
            if ready <= now:
                if tail > best:
                    best, chosen = tail, action
            else:
                coming.append((ready, tail))
                soon = min(soon, ready)
    if chosen == NONE:
        return NONE, soon if soon < float("inf") else now
    for ready, tail in coming:
        if tail > best and ready < now + rule.patience * problem.lengths[chosen]:
            return NONE, ready
    return chosen, now

"""Repeated building blocks: one microbatch's way through all stages, begun anew every period.

Letters as in ``problem``; P the period. A block gives each F, I and W of a microbatch a time; microbatch k has all of
them k P later. Blocks whose actions of one rank do not meet modulo P repeat without a wait; the shorter the way, the
fewer activations. The idea is that of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362);
here the block is not given but searched, for any costs and placement: a beam search puts the F and I of the way, one
after another, at the first or a later free place of their rank, and keeps the shortest ways. Then each rank does its
actions in the order of their times, as early as can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from mpipipe.schedule.search.list_schedule import Rule, list_schedule
from mpipipe.schedule.search.problem import Orders, Problem, keeps_within, run
from mpipipe.schedule.search.rules import Found, needed

_BEAM = 48
_PLACES = 3
_BLOCKS = 12
_PERIODS = (1.0, 1.02, 1.05, 1.09, 1.14, 1.2, 1.28, 1.38, 1.5)
_FEW_PERIODS = _PERIODS[::4]
_MANY_STAGES = 32
_PATIENCE = (0.0, 0.5, 1.0)
_CLOSE = 1e-9

Taken = tuple[tuple[float, float], ...]
"""Start modulo P and length of what a rank does in a period."""


class _Way(NamedTuple):
    """The begin of a block: the time reached, of each rank what is taken, the starts of F and I so far."""

    time: float
    taken: tuple[Taken, ...]
    starts: tuple[float, ...]


def blocks(problem: Problem) -> Iterator[Found]:
    """What repeated blocks give under the caps, for some periods."""
    for period in periods(problem):
        for number, way in enumerate(_ways(problem, period)):
            orders = _orders(problem, period, way)
            if not keeps_within(problem, orders):
                continue
            ends = run(problem, orders)
            if ends is not None:
                yield max(ends), f"block: period {period:g}, number {number}", orders


def again(problem: Problem, name: str, orders: Orders) -> Iterator[Found]:
    """List schedules that prefer what ended earlier in given orders: they close its gaps at both ends."""
    ends = run(problem, orders)
    if ends is None:
        return
    latest = max(ends)
    earlier = [latest - end for end in ends]
    for patience in _PATIENCE:
        rule = Rule(f"{name}, listed, patience {patience:g}", "tail", patience=patience)
        makespan, found = list_schedule(problem, rule, earlier)
        yield makespan, rule.name, found


def periods(problem: Problem) -> list[float]:
    """From the least that the busiest rank's work and the caps allow, rounded up to whole numbers where all durations
    are whole."""
    kinds = problem.kinds
    work = max(
        sum(sum(problem.durations[s * kinds : (s + 1) * kinds]) for s in stages) for stages in problem.stages
    )
    least = work * max(1.0, *(need / cap for need, cap in zip(needed(problem), problem.caps, strict=True)))
    if least <= 0:
        return []
    whole = all(float(one).is_integer() for one in (*problem.durations, *problem.delays))
    some = [least * factor for factor in (_PERIODS if problem.num_stages <= _MANY_STAGES else _FEW_PERIODS)]
    return sorted({float(math.ceil(one - _CLOSE)) for one in some}) if whole else some


def _ways(problem: Problem, period: float) -> list[_Way]:
    """The shortest ways that the beam search finds."""
    last = problem.num_stages - 1
    steps = [(s, 0) for s in range(last + 1)] + [(s, 1) for s in range(last, -1, -1)]
    beam = [_Way(0.0, ((),) * problem.p, ())]
    for s, kind in steps:
        rank, length = problem.placement[s], problem.durations[s * problem.kinds + kind]
        delay = 0.0
        if kind == 0 and s:
            delay = problem.delays[s - 1]
        elif kind == 1 and s < last:
            delay = problem.delays[s]
        longer: dict[tuple[tuple[Taken, ...], float], _Way] = {}
        for way in beam:
            for start in _free(way.taken[rank], way.time + delay, length, period, _PLACES):
                here = tuple(sorted((*way.taken[rank], (_modulo(start, period), length))))
                taken = (*way.taken[:rank], here, *way.taken[rank + 1 :])
                longer.setdefault((taken, start), _Way(start + length, taken, (*way.starts, start)))
        beam = sorted(longer.values(), key=lambda way: (way.time, way.starts))[:_BEAM]
    return beam[:_BLOCKS]


def _modulo(time: float, period: float) -> float:
    rest = math.fmod(time, period)
    return 0.0 if period - rest < _CLOSE else rest


def _free(taken: Taken, ready: float, length: float, period: float, places: int) -> list[float]:
    """The first times from ``ready`` on, within a period, at which a rank is free for ``length``: ``ready`` itself and
    where something ends."""
    rest = _modulo(ready, period)
    times = {ready}
    for start, size in taken:
        end = _modulo(start + size, period)
        times.add(ready + (end - rest if end >= rest - _CLOSE else end - rest + period))
    found = []
    for time in sorted(times):
        begin = _modulo(time, period)
        if all(_apart(begin, length, start, size, period) for start, size in taken):
            found.append(time)
            if len(found) == places:
                break
    return found


def _apart(a: float, length: float, b: float, size: float, period: float) -> bool:
    """Whether two stretches do not meet modulo the period."""
    ahead = _modulo(b - a + period, period)
    return ahead >= length - _CLOSE and ahead + size <= period + _CLOSE


def _orders(problem: Problem, period: float, way: _Way) -> Orders:
    """Each rank's actions by their times. A W stands at the first free place after its I."""
    stages, kinds, m = problem.num_stages, problem.kinds, problem.m
    times: dict[tuple[int, int], float] = {}
    for s in range(stages):
        times[s, 0], times[s, 1] = way.starts[s], way.starts[2 * stages - 1 - s]
    for rank in range(problem.p) if problem.split else ():
        taken = way.taken[rank]
        for s in sorted(problem.stages[rank], key=lambda s: times[s, 1]):
            ready, length = times[s, 1] + problem.durations[s * kinds + 1], problem.durations[s * kinds + 2]
            free = _free(taken, ready, length, period, 1)
            times[s, 2] = free[0] if free else ready + period / 2
            taken = (*taken, (_modulo(times[s, 2], period), length))
    orders: Orders = []
    for mine in problem.stages:
        timed = [
            (times[s, kind] + k * period, kind, s, problem.number(s, kind, k))
            for s in mine
            for kind in range(kinds)
            for k in range(m)
        ]
        orders.append([action for *_, action in sorted(timed)])
    return orders

"""The rules that list scheduling is tried with. Letters as in ``problem``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from mpipipe.schedule.search.list_schedule import Rule, list_schedule
from mpipipe.schedule.search.problem import Orders, Problem, keeps_within

FACTORS = (math.inf, 1.0, 1.25, 1.5, 2.0, 3.0, 0.75)
"""Limits of the open activations, in what a rank needs to be never without work."""
_PATIENCE = (0.5, 1.0)
_REFINED = 6

Found = tuple[float, str, Orders]
"""Makespan, what made it, orders."""


def lives(problem: Problem) -> list[float]:
    """For each stage the least time from the start of an F to the end of its W (or B)."""
    kinds, durations = problem.kinds, problem.durations
    result, way = [0.0] * problem.num_stages, 0.0
    for s in reversed(range(problem.num_stages)):
        way += durations[s * kinds] + durations[s * kinds + 1]
        if s < problem.num_stages - 1:
            way += 2 * problem.delays[s]
        result[s] = way + (durations[s * kinds + 2] if problem.split else 0.0)
    return result


def needed(problem: Problem) -> list[float]:
    """For each rank how many activations it keeps at least while no rank waits: what is kept of a microbatch, times
    how long, over the work of the busiest rank on one."""
    life, kinds = lives(problem), problem.kinds
    work = [sum(sum(problem.durations[s * kinds : (s + 1) * kinds]) for s in stages) for stages in problem.stages]
    period = max(work) or 1.0
    return [sum(life[s] for s in stages) / period for stages in problem.stages]


def rules(problem: Problem) -> Iterator[Rule]:
    """Every rule of the first round."""
    need = needed(problem)
    seen: set[Rule] = set()
    orders = (True, False) if problem.v > 1 else (True,)
    for factor, first, late in itertools.product(FACTORS, ("I", "F", "tail"), orders):
        limits = tuple(
            cap if math.isinf(factor) else max(problem.v, min(cap, math.ceil(factor * one - 1e-9)))
            for cap, one in zip(problem.caps, need, strict=True)
        )
        lags: list[tuple[int, ...] | None] = [None]
        if problem.split and first != "tail":
            lags += [tuple(cap - limit for cap, limit in zip(problem.caps, limits, strict=True)), (0,) * problem.p]
            lags.append(tuple(min(rank, cap - 1) for rank, cap in enumerate(problem.caps)))
        for lag in lags:
            rule = Rule("", first, late, limits, lag)
            if rule not in seen:
                seen.add(rule)
                yield rule._replace(name=_name(first, late, factor, lag, problem))


def _name(first: str, late: bool, factor: float, lag: tuple[int, ...] | None, problem: Problem) -> str:
    parts = ["longest tail first" if first == "tail" else f"{first} first"]
    if problem.v > 1:
        parts.append("late chunks first" if late else "early chunks first")
    if not math.isinf(factor):
        parts.append(f"warm-up {factor:g}")
    if lag is not None:
        parts.append("W at once" if not any(lag) else f"W {max(lag)} behind")
    return "list: " + ", ".join(parts)


def list_schedules(problem: Problem, tails: Sequence[float], most: int) -> Iterator[Found]:
    """What the rules find, at most ``most`` of them; the best few once more with patience."""
    found: list[tuple[float, int, Rule]] = []
    for number, rule in enumerate(itertools.islice(rules(problem), most)):
        makespan, orders = list_schedule(problem, rule, tails)
        found.append((makespan, number, rule))
        yield makespan, rule.name, orders
    if not problem.split:
        return
    for _, _, rule in sorted(found)[: min(_REFINED, most // 8)]:
        for patience in _PATIENCE:
            patient = rule._replace(patience=patience, name=f"{rule.name}, patience {patience:g}")
            makespan, orders = list_schedule(problem, patient, tails)
            yield makespan, patient.name, orders


def legal(problem: Problem, orders: Orders) -> bool:
    """Whether every action is there once and the caps are kept."""
    return sorted(itertools.chain(*orders)) == list(range(problem.num_actions)) and keeps_within(problem, orders)

"""What must come before what: the earliest start of each action and the least time after it, in any schedule.

Letters as in ``problem``; c the cap of a rank.

Edges, all with microbatches in order (see ``problem``): the F (I, W) of a stage one after another; F before I before W;
the messages; and from the cap

- W k-c of a stage before its F k: else c+1 of its activations were kept at once.
- Where n stages of the rank come up to stage s, s itself among them, I k - floor(c/n) of s before F k of s: when that F
  runs, each of the n has done k+1 F, so that at most c are kept means that n(k+1) - c of their W are done; then one of
  the n has done k+1 - floor(c/n) of them, each after its I, which comes after the I of s.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.search.problem import NONE, Problem


class Graph(NamedTuple):
    """``before[a]``: (action that ends before a starts, least time between). ``order``: a topological order."""

    before: list[list[tuple[int, float]]]
    after: list[list[tuple[int, float]]]
    order: list[int]


def make_graph(problem: Problem) -> Graph:
    """The edges of all schedules of the problem."""
    count, m, frees = problem.num_actions, problem.m, problem.kinds - 1
    before: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for s in range(problem.num_stages):
        rank = problem.placement[s]
        cap = problem.caps[rank]
        chunks = problem.stages[rank].index(s) + 1
        for kind in range(problem.kinds):
            for k in range(m):
                action = problem.number(s, kind, k)
                edges = before[action]
                if k:
                    edges.append((action - 1, 0.0))
                if kind:
                    edges.append((problem.number(s, kind - 1, k), 0.0))
                if problem.needs[action] != NONE:
                    edges.append((problem.needs[action], problem.lags[action]))
                if kind == 0 and k >= cap:
                    edges.append((problem.number(s, frees, k - cap), 0.0))
                if kind == 0 and chunks > 1 and k >= cap // chunks:
                    edges.append((problem.number(s, 1, k - cap // chunks), 0.0))
    after: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for action, edges in enumerate(before):
        for one, lag in edges:
            after[one].append((action, lag))
    return Graph(before, after, _topological(before, after))


def _topological(before: list[list[tuple[int, float]]], after: list[list[tuple[int, float]]]) -> list[int]:
    missing = [len(edges) for edges in before]
    ready = [action for action, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        action = ready.pop()
        order.append(action)
        for later, _ in after[action]:
            missing[later] -= 1
            if missing[later] == 0:
                ready.append(later)
    return order


def earliest(problem: Problem, graph: Graph, *, reverse: bool = False, machines: bool = True) -> NDArray[np.float64]:
    """float64 (N,): no schedule starts an action earlier; with ``reverse``, no schedule ends less than that after the
    end of the action.

    With ``machines``, not before all work of its own rank that must precede it, done one after another from its
    earliest starts on.
    """
    before = graph.after if reverse else graph.before
    order = graph.order[::-1] if reverse else graph.order
    lengths = np.array(problem.lengths)
    heads = np.zeros(problem.num_actions)
    counts, streams = _prefixes(problem, before, order, reverse) if machines else (None, [])
    for action in order:
        head = max((heads[one] + problem.lengths[one] + lag for one, lag in before[action]), default=0.0)
        if counts is not None:
            mine = _preceding(problem, counts[action], streams[problem.rank_of(action)], reverse)
            head = max(head, _one_after_another(heads[mine], lengths[mine]))
        heads[action] = head
    return heads


def _prefixes(
    problem: Problem, before: list[list[tuple[int, float]]], order: list[int], reverse: bool
) -> tuple[NDArray[np.int32], list[list[int]]]:
    """int32 (N, S*K): how many actions of each stream (stage and kind) must precede each action, and the streams of
    each rank."""
    m = problem.m
    counts = np.zeros((problem.num_actions, problem.num_stages * problem.kinds), dtype=np.int32)
    for action in order:
        row = counts[action]
        for one, _ in before[action]:
            np.maximum(row, counts[one], out=row)
        for one, _ in before[action]:
            stream, k = divmod(one, m)
            row[stream] = max(row[stream], m - k if reverse else k + 1)
    streams = [[s * problem.kinds + kind for s in stages for kind in range(problem.kinds)] for stages in problem.stages]
    return counts, streams


def _preceding(
    problem: Problem, counts: NDArray[np.int32], streams: Sequence[int], reverse: bool
) -> NDArray[np.int64]:
    m = problem.m
    parts = []
    for stream in streams:
        n = int(counts[stream])
        begin = stream * m + (m - n if reverse else 0)
        parts.append(np.arange(begin, begin + n))
    return np.concatenate(parts)


def _one_after_another(heads: NDArray[np.float64], lengths: NDArray[np.float64]) -> float:
    """The earliest end of all of a set of actions of one rank."""
    if not heads.size:
        return 0.0
    by_head = np.argsort(heads, kind="stable")
    rest = np.cumsum(lengths[by_head][::-1])[::-1]
    return float((heads[by_head] + rest).max())


def one_rank(heads: Sequence[float], lengths: Sequence[float], tails: Sequence[float]) -> float:
    """The least makespan of one rank whose actions may be interrupted: Jackson's preemptive schedule (of those that
    are there, the one with the longest tail)."""
    arriving = sorted(range(len(heads)), key=lambda action: heads[action])
    here: list[tuple[float, int]] = []
    left = list(lengths)
    now, best, at = 0.0, 0.0, 0
    while here or at < len(arriving):
        if not here:
            now = max(now, heads[arriving[at]])
        while at < len(arriving) and heads[arriving[at]] <= now:
            heapq.heappush(here, (-tails[arriving[at]], arriving[at]))
            at += 1
        tail, action = here[0]
        until = heads[arriving[at]] if at < len(arriving) else float("inf")
        if now + left[action] <= until:
            now += left[action]
            heapq.heappop(here)
            best = max(best, now - tail)
        else:
            left[action] -= until - now
            now = until
    return best

"""A makespan that no schedule on a placement beats that keeps the caps.

Letters as in ``problem``; c the cap of a rank, f, i, w the durations of a stage's F, I and W (i the whole backward, w
none where it is not split).

Four arguments, the largest wins:

- *One rank*. For each action ``earliest`` gives the least time before it and after it, with all that the cap forces
  (``graph``). A rank that could interrupt its actions would do no better than Jackson's preemptive schedule of them.
- *Last input gradient*. When the last I of a rank ends, that of its lowest stage, all its F and I are done and at most
  c W are not: the activations kept. The time after that I follows.
- *Kept activations*. One of stage s is kept for at least L_s: the forward from s to the last stage, the input gradients
  back to s, and w. The sum of L over all microbatches and the rank's stages is at most what the rank can keep between
  its first F and its last W: c at any time, less at the begin, where F come no faster than one in f, and at the end, no
  faster than one W in w: c (length) - c(c-1)/2 (f + w).
- The same without any cap, where the problem is too large for the first: work of a rank, and the way of one microbatch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.search.graph import Graph, earliest, one_rank
from mpipipe.schedule.search.problem import Problem

DETAILED_UP_TO = 8192
"""Actions of a problem up to which all work of a rank before and after each action is summed up; the time for it grows
with the square of the actions of a rank."""


class Tails:
    """``heads`` and ``tails`` float64 (N,): the least time before the start and after the end of each action."""

    def __init__(self, problem: Problem, graph: Graph) -> None:
        detailed = problem.num_actions <= DETAILED_UP_TO
        self.heads: NDArray[np.float64] = earliest(problem, graph, machines=detailed)
        self.tails: NDArray[np.float64] = earliest(problem, graph, reverse=True, machines=detailed)


def lower_bound(problem: Problem, times: Tails) -> float:
    """The largest of the bounds above."""
    lengths = np.array(problem.lengths)
    bound = float((times.heads + lengths + times.tails).max())
    for rank in range(problem.p):
        mine = _of_rank(problem, rank)
        heads, tails = times.heads[mine], times.tails[mine]
        bound = max(bound, one_rank(heads.tolist(), lengths[mine].tolist(), tails.tolist()))
        bound = max(bound, _last_input_gradient(problem, rank, times), _kept(problem, rank, times))
    return bound


def _of_rank(problem: Problem, rank: int) -> NDArray[np.int64]:
    size = problem.kinds * problem.m
    return np.concatenate([np.arange(s * size, (s + 1) * size) for s in problem.stages[rank]])


def _last_input_gradient(problem: Problem, rank: int, times: Tails) -> float:
    """The bound of the last I of a rank. The W that must be done by then are taken as the earliest and shortest."""
    if not problem.split:
        return 0.0
    mine = _of_rank(problem, rank)
    lengths = np.array(problem.lengths)[mine]
    weights = mine // problem.m % problem.kinds == 2
    some = max(0, problem.m * problem.v - problem.caps[rank])
    early = np.sort(times.heads[mine][weights])[:some]
    heads = np.concatenate((times.heads[mine][~weights], early))
    sizes = np.concatenate((lengths[~weights], np.full(some, lengths[weights].min())))
    by_head = np.argsort(heads, kind="stable")
    rest = np.cumsum(sizes[by_head][::-1])[::-1]
    last = problem.number(problem.stages[rank][0], 1, problem.m - 1)
    return float((heads[by_head] + rest).max() + times.tails[last])


def _kept(problem: Problem, rank: int, times: Tails) -> float:
    """The bound of the kept activations of a rank."""
    cap, kinds = problem.caps[rank], problem.kinds
    durations = np.array(problem.durations).reshape(-1, kinds)
    there_and_back = durations[:, 0] + durations[:, 1]
    there_and_back[:-1] += 2 * np.array(problem.delays)
    lives = np.cumsum(there_and_back[::-1])[::-1] + (durations[:, 2] if problem.split else 0.0)
    mine = list(problem.stages[rank])
    slopes = durations[mine][:, 0].min() + durations[mine][:, kinds - 1].min()
    length = problem.m * lives[mine].sum() / cap + (cap - 1) / 2 * slopes
    return float(min(times.heads[problem.number(s, 0, 0)] for s in mine) + length)

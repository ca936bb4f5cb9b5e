"""A scheduling problem in whole numbers: which actions, how long, which after which, how many activations a rank keeps.

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, S = p*v stages, s a stage, r a rank, k a microbatch,
K = kinds of actions (F, I, W: 3; with the backward in one piece F, B: 2), N = S*K*m actions.

All microbatches are alike, so nothing is lost by doing them in order: of any schedule, call the k-th F (I, W) of every
stage that of microbatch k. The k-th F of a stage began when k of the stage before had ended; so the new one is legal,
as long as the old one, and keeps as many activations at each moment. Every schedule of the search is so numbered, and
hence ``ordered``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.costs import Costs, Hops
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import stages_on

NONE = -1
Orders = list[list[int]]
"""For each rank its actions' numbers, in the order in which it does them."""


@dataclass(frozen=True)
class Problem:
    """Actions are numbered ``(s*K + kind)*m + k`` with kind 0 = F, 1 = I (or B), 2 = W.

    ``durations``: of each action of ``s*K + kind``. ``delays``: of the message from stage s to s+1, and back, 0 inside
    a rank. ``caps``: most chunk activations of each rank, from F until W (or B).
    """

    p: int
    v: int
    m: int
    placement: tuple[int, ...]
    split: bool
    durations: tuple[float, ...]
    delays: tuple[float, ...]
    caps: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...] = field(init=False)
    needs: tuple[int, ...] = field(init=False)
    lags: tuple[float, ...] = field(init=False)
    lengths: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(stages_on(self.placement, rank) for rank in range(self.p)))
        needs, lags = self._needs()
        object.__setattr__(self, "needs", needs)
        object.__setattr__(self, "lags", lags)
        object.__setattr__(self, "lengths", tuple(d for d in self.durations for _ in range(self.m)))

    @property
    def kinds(self) -> int:
        """K."""
        return 3 if self.split else 2

    @property
    def num_stages(self) -> int:
        """S."""
        return self.p * self.v

    @property
    def num_actions(self) -> int:
        """N."""
        return self.num_stages * self.kinds * self.m

    def number(self, stage: int, kind: int, k: int) -> int:
        """The number of an action."""
        return (stage * self.kinds + kind) * self.m + k

    def rank_of(self, action: int) -> int:
        """The rank that does an action."""
        return self.placement[action // (self.kinds * self.m)]

    def _needs(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The action of another stage that each one waits for, NONE for none, and the delay of its message."""
        needs, lags = [NONE] * self.num_actions, [0.0] * self.num_actions
        last = self.num_stages - 1
        for s in range(self.num_stages):
            for k in range(self.m):
                if s:
                    needs[self.number(s, 0, k)] = self.number(s - 1, 0, k)
                    lags[self.number(s, 0, k)] = self.delays[s - 1]
                if s < last:
                    needs[self.number(s, 1, k)] = self.number(s + 1, 1, k)
                    lags[self.number(s, 1, k)] = self.delays[s]
        return tuple(needs), tuple(lags)


def make_problem(
    p: int, v: int, m: int, placement: tuple[int, ...], *, split: bool, costs: Costs, hops: Hops, caps: Sequence[int]
) -> Problem:
    """The problem of these costs. Raises ScheduleError for numbers out of range."""
    rows = costs.per_stage(p * v)
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    crosses = [a != b for a, b in itertools.pairwise(placement)]
    delays = [float(d) if cross else 0.0 for d, cross in zip(hops.per_stage(p * v)[:-1], crosses, strict=True)]
    return Problem(
        p=p,
        v=v,
        m=m,
        placement=placement,
        split=split,
        durations=tuple(float(rows[kind, s]) for s in range(p * v) for kind in kinds),
        delays=tuple(delays),
        caps=tuple(min(int(cap), m * v) for cap in caps),
    )


def to_table(problem: Problem, orders: Orders, name: str) -> ScheduleTable:
    """The table of these orders."""
    flat = np.array([action for order in orders for action in order], dtype=np.int64)
    kinds = np.array([Kind.F, Kind.I, Kind.W] if problem.split else [Kind.F, Kind.B], dtype=np.uint8)
    streams, microbatches = np.divmod(flat, problem.m)
    return ScheduleTable(
        name=name,
        p=problem.p,
        v=problem.v,
        m=problem.m,
        placement=problem.placement,
        lowered=False,
        offsets=np.concatenate(([0], np.cumsum([len(order) for order in orders]))).astype(np.int64),
        kinds=kinds[streams % problem.kinds],
        stages=(streams // problem.kinds).astype(np.int16),
        microbatches=microbatches.astype(np.int32),
    )


def from_table(problem: Problem, table: ScheduleTable) -> Orders:
    """The orders of a table on the same placement, microbatches numbered in order; where the problem splits the
    backward, each B becomes an I and a W. Raises ScheduleError for a split table where the problem does not split."""
    streams_of = {Kind.F: (0,), Kind.B: (1, 2) if problem.split else (1,), Kind.I: (1,), Kind.W: (2,)}
    if not problem.split and bool(np.any(table.kinds >= Kind.I)):
        raise ScheduleError(f"{table.name} splits the backward")
    orders: Orders = []
    counts = [0] * (problem.num_stages * problem.kinds)
    for rank in range(table.p):
        order = []
        row = table.row_of(rank)
        for kind, stage in zip(table.kinds[row].tolist(), table.stages[row].tolist(), strict=True):
            for one in streams_of[kind]:
                stream = stage * problem.kinds + one
                order.append(stream * problem.m + counts[stream])
                counts[stream] += 1
        orders.append(order)
    return orders


def run(problem: Problem, orders: Orders) -> list[float] | None:
    """The end of each action (N,), every one as early as its rank's order and its needs allow; None if the orders
    can't come to their end."""
    ends = [-1.0] * problem.num_actions
    needs, lags, lengths = problem.needs, problem.lags, problem.lengths
    places, clock = [0] * problem.p, [0.0] * problem.p
    waiting: dict[int, int] = {}
    runnable = list(range(problem.p))
    while runnable:
        rank = runnable.pop()
        order, at, now = orders[rank], places[rank], clock[rank]
        while at < len(order):
            action = order[at]
            need = needs[action]
            if need >= 0:
                ready = ends[need]
                if ready < 0.0:
                    waiting[need] = rank
                    break
                ready += lags[action]
                if ready > now:
                    now = ready
            now += lengths[action]
            ends[action] = now
            if action in waiting:
                runnable.append(waiting.pop(action))
            at += 1
        places[rank], clock[rank] = at, now
    return ends if not waiting else None


def keeps_within(problem: Problem, orders: Orders) -> bool:
    """Whether every rank stays within its cap."""
    frees = problem.kinds - 1
    for order, cap in zip(orders, problem.caps, strict=True):
        kept = 0
        for action in order:
            kind = action // problem.m % problem.kinds
            kept += (kind == 0) - (kind == frees)
            if kept > cap:
                return False
    return True

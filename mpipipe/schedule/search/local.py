"""Local search: move single actions of the critical path, keep what is not worse than some moves ago.

Letters as in ``problem``.

A move takes an action on the critical path out of its rank's order and puts it in elsewhere: past its neighbour, to an
end of its block (the actions of the critical path that a rank does without a pause), or, for a W, anywhere it may be.
Late acceptance (Burke and Bykov, 2017): a move is taken when it is no worse than now, or than what held a number of
moves ago; no worse in the makespan, and with equal makespan in the mean end of all actions, which lets the search go on
where many paths are critical. Only what starts at or after the moved action is timed again, and a move is given up as
soon as an action ends too late for the least time that follows it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence

from mpipipe.schedule.search.problem import NONE, Orders, Problem, run

Cost = tuple[float, float]
"""Makespan and sum of all ends."""
_MEMORY = 40
_KICKS = 4
"""A restart accepts what is worse by one to so many average actions."""
_SLACK = 1e-9


class LocalSearch:
    """Improves orders. ``cost``, ``orders``: where it stands; ``best_cost``, ``best``: the best so far."""

    def __init__(self, problem: Problem, orders: Orders, tails: Sequence[float], seed: int) -> None:
        ends = run(problem, orders)
        if ends is None:
            raise AssertionError("local search begins with orders that come to their end")
        self.problem, self.tails = problem, tails
        self.orders = [list(order) for order in orders]
        self.random = random.Random(seed)
        self.ends = ends
        self.cost: Cost = (max(ends), sum(ends))
        self.best_cost, self.best = self.cost, [list(order) for order in orders]
        self.history = [self.cost] * _MEMORY
        self.work = self.restarts = 0
        self.patience = min(4000, 200 + 8 * problem.num_actions)
        self.step = sum(problem.lengths) / problem.num_actions
        self._look()

    def go(self, work: int, enough: float, tell: Callable[[float], None] | None = None) -> None:
        """Search until about ``work`` actions were timed or the makespan is ``enough``."""
        tries = stale = 0
        begun = self.work
        while self.work < work and self.best_cost[0] > enough + _SLACK:
            self.work += 8
            tries += 1
            move = self._move()
            if move is None:
                continue
            limit = self.history[tries % _MEMORY]
            if self._try(*move, max(limit, self.cost)):
                stale = 0
            else:
                stale += 1
            if self.cost < self.history[tries % _MEMORY]:
                self.history[tries % _MEMORY] = self.cost
            if stale > self.patience:
                self._restart()
                stale = 0
            if tell is not None and tries % 256 == 0:
                tell(min(1.0, (self.work - begun) / (work - begun)))

    def _restart(self) -> None:
        """Back to the best, with worse accepted for a while."""
        self.orders = [list(order) for order in self.best]
        ends = run(self.problem, self.orders)
        assert ends is not None
        self.ends, self.cost = ends, self.best_cost
        self.restarts += 1
        worse = self.step * (self.restarts % _KICKS + 1)
        self.history = [(self.cost[0] + worse, 0.0)] * _MEMORY
        self._look()

    def _look(self) -> None:
        """Find the critical path, as blocks (rank, first place, last place)."""
        problem, ends, lengths = self.problem, self.ends, self.problem.lengths
        self.starts = [[ends[action] - lengths[action] for action in order] for order in self.orders]
        self.place = [0] * problem.num_actions
        for order in self.orders:
            for at, action in enumerate(order):
                self.place[action] = at
        action = max(range(problem.num_actions), key=ends.__getitem__)
        self.blocks: list[tuple[int, int, int]] = []
        rank = problem.rank_of(action)
        last = at = self.place[action]
        while True:
            start = ends[action] - lengths[action]
            order = self.orders[rank]
            previous = order[at - 1] if at else NONE
            need = problem.needs[action]
            on_rank = previous != NONE and ends[previous] >= start - _SLACK
            by_need = need != NONE and ends[need] + problem.lags[action] >= start - _SLACK
            if on_rank and not (by_need and self.random.random() < 0.5):
                action, at = previous, at - 1
                continue
            if last > at:
                self.blocks.append((rank, at, last))
            if not by_need:
                break
            action = need
            rank = problem.rank_of(action)
            last = at = self.place[action]

    def _move(self) -> tuple[int, int, int] | None:
        """(rank, from, to) of a move that the rank's own rules allow."""
        if not self.blocks:
            return None
        draw = self.random.random
        rank, first, last = self.blocks[int(draw() * len(self.blocks))]
        order = self.orders[rank]
        way = draw()
        if way < 0.3:
            at = first + int(draw() * (last - first))
            return self._allowed(rank, at, at + 1)
        source = first + int(draw() * (last - first + 1))
        if way < 0.45:
            return self._allowed(rank, source, last)
        if way < 0.6:
            return self._allowed(rank, source, first)
        target = source + int((draw() + draw() - 1.0) * 24) if way < 0.9 else int(draw() * len(order))
        return self._allowed(rank, source, min(max(target, 0), len(order) - 1))

    def _allowed(self, rank: int, source: int, target: int) -> tuple[int, int, int] | None:
        """The move as far as it goes: up to the first action that must keep its side, within the cap."""
        problem, order = self.problem, self.orders[rank]
        m, kinds = problem.m, problem.kinds
        stream, k = divmod(order[source], m)
        s, kind = divmod(stream, kinds)
        step = 1 if target > source else -1
        at = source
        while at != target:
            other, j = divmod(order[at + step], m)
            if other == stream:
                break
            if other // kinds == s and j == k and (other % kinds - kind) * step > 0:
                break
            at += step
        if at == source or not self._fits(rank, source, at, kind):
            return None
        return rank, source, at

    def _fits(self, rank: int, source: int, target: int, kind: int) -> bool:
        """Whether the rank stays within its cap: only F earlier and W (B) later can raise what it keeps."""
        problem, order = self.problem, self.orders[rank]
        kinds, m, frees = problem.kinds, problem.m, problem.kinds - 1
        if not (kind == 0 and target < source) and not (kind == frees and target > source):
            return True
        kept = 0
        cap = problem.caps[rank]
        low, high = (target, source) if target < source else (source, target)
        for at, action in enumerate(order[: high + 1]):
            one = action // m % kinds
            if at == low and kind == 0:
                kept += 1
                if kept > cap:
                    return False
            if at == source:
                continue
            kept += (one == 0) - (one == frees)
            if at >= low and kept > cap:
                return False
        return True

    def _try(self, rank: int, source: int, target: int, limit: Cost) -> bool:
        """Make the move if its cost is at most ``limit``."""
        order = self.orders[rank]
        action = order.pop(source)
        order.insert(target, action)
        ends = self._time_again(rank, min(source, target), limit[0] + _SLACK)
        if ends is not None:
            cost = (max(ends), sum(ends))
            if cost <= limit:
                self.ends, self.cost = ends, cost
                self._look()
                if cost < self.best_cost:
                    self.best_cost, self.best = cost, [list(one) for one in self.orders]
                return True
        order.pop(target)
        order.insert(source, action)
        return False

    def _time_again(self, changed: int, first: int, limit: float) -> list[float] | None:
        """All ends, once the order of rank ``changed`` is another from place ``first`` on; None if it gets stuck or is
        longer than ``limit``."""
        problem, orders, tails = self.problem, self.orders, self.tails
        needs, lags, lengths = problem.needs, problem.lags, problem.lengths
        begin = self.starts[changed][first]
        ends = self.ends[:]
        places, clock = [], []
        for rank, order in enumerate(orders):
            at = first if rank == changed else bisect_left(self.starts[rank], begin)
            places.append(at)
            clock.append(ends[order[at - 1]] if at else 0.0)
        for order, at in zip(orders, places, strict=True):
            for action in order[at:]:
                ends[action] = -1.0
            self.work += len(order) - at
        waiting: dict[int, int] = {}
        runnable = list(range(problem.p))
        while runnable:
            rank = runnable.pop()
            order, now = orders[rank], clock[rank]
            for at in range(places[rank], len(order)):
                action = order[at]
                need = needs[action]
                if need >= 0:
                    ready = ends[need]
                    if ready < 0.0:
                        waiting[need] = rank
                        places[rank], clock[rank] = at, now
                        break
                    ready += lags[action]
                    if ready > now:
                        now = ready
                now += lengths[action]
                if now + tails[action] > limit:
                    return None
                ends[action] = now
                if action in waiting:
                    runnable.append(waiting.pop(action))
        return None if waiting else ends

"""The search: families, then list scheduling and repeated blocks, then local search. Letters as in ``problem``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpipipe.errors import ScheduleError
from mpipipe.schedule.check import verify
from mpipipe.schedule.costs import Costs, Hops
from mpipipe.schedule.search.candidates import candidates
from mpipipe.schedule.search.graph import make_graph
from mpipipe.schedule.search.least import Tails, lower_bound
from mpipipe.schedule.search.local import LocalSearch
from mpipipe.schedule.search.problem import (
    Orders,
    Problem,
    from_table,
    keeps_within,
    make_problem,
    run,
    to_table,
)
from mpipipe.schedule.search.repeat import again, blocks
from mpipipe.schedule.search.rules import list_schedules
from mpipipe.schedule.simulate import Simulation, simulate
from mpipipe.schedule.table import MAX_STAGES, ScheduleTable
from mpipipe.topology import loop_placement, zigzag_placement

NAME = "search"
"""Name of a table that the search made itself."""
_MOST_ACTIONS = 2_000_000
_LIST_WORK = 1_000_000
_LOCAL_WORK = 20_000_000
_WORK_PER_ACTION = 80_000
_LISTED_AGAIN = 12
_CONTINUED = 2
_MUCH_LONGER = 1.15
_LISTED = 0.25
"""The share of the work, about, that is done when local search begins."""
_SAME = 1e-9

Tell = Callable[[float], None]
"""Takes the share that is done, 0 to 1."""


class Tried(NamedTuple):
    """One that was tried: its makespan and the most activations on a rank, None where there is no table, and
    ``reason``: why it can't be used, empty where it can."""

    name: str
    makespan: float | None
    peak: int | None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """``table``: the best, ``simulation`` its times. ``found_by``: the family or the rule that made it.

    ``lower_bound``: no table with these costs on the ``placements`` that were tried that keeps the caps is shorter; one
    on another placement may be. ``gap``: makespan / lower_bound - 1, 0 where the table is proven best on these.
    ``tried``: all, the best first, those that can't be used last. A family's table keeps the family's name, every other
    is called "search".
    """

    table: ScheduleTable
    simulation: Simulation
    lower_bound: float
    gap: float
    found_by: str
    tried: tuple[Tried, ...]
    placements: tuple[str, ...]


class _Entry(NamedTuple):
    kind: str
    makespan: float
    peak: int
    name: str
    problem: Problem
    orders: Orders | None
    table: ScheduleTable | None


def search(
    *,
    p: int,
    m: int,
    costs: Costs | None = None,
    latency: float = 0.0,
    hops: Hops | None = None,
    cap: int | Sequence[int] | None = None,
    v: int | None = None,
    families: Sequence[str] | None = None,
    split: bool = True,
    ordered: bool = True,
    seed: int = 0,
    effort: int = 1,
    tell: Tell | None = None,
) -> SearchResult:
    """The best table that is found for p ranks, v chunks per rank and m microbatches.

    ``costs``, ``latency`` and ``hops`` as for ``simulate``: costs are those of one stage; an ``FB`` is not used. ``v``:
    1 where it is not given, or what costs with one number a stage say. ``cap``: most chunk activations that a rank
    keeps, from F until B or W; one number or one a rank; None for no cap. ``families``: the names to try, with or
    without options, none for an empty list; None for all. ``split``: whether the backward may be split into I and W.
    ``ordered``: only tables whose weight gradients come in microbatch order, which loses nothing (see ``problem``).

    First every family with its options; then list schedules and repeated blocks, on the loop and the zig-zag placement,
    and where messages take time on the contiguous one, which gives each rank v neighbouring stages; then local
    search from the best. ``effort``: how much of the last, the work grows with it; 0 for none. It ends early where
    the bound is reached. The same arguments give the same table: no clock decides. ``tell`` hears how far it is.
    Raises ScheduleError for numbers out of range and a cap below v.
    """
    costs = Costs() if costs is None else costs
    hops = Hops(latency) if hops is None else hops
    v = _chunks(p, v, m, costs)
    caps = _caps(p, v, m, cap)
    if effort < 0:
        raise ScheduleError(f"effort = {effort} must be 0 or more")
    made = _Search(p, v, m, costs, hops, caps, split, seed, effort, tell or (lambda share: None))
    made.try_families(families, ordered)
    made.try_lists()
    made.improve()
    return made.result()


def _chunks(p: int, v: int | None, m: int, costs: Costs) -> int:
    """v as given, or as the costs have it. Raises ScheduleError."""
    if v is None:
        lengths = {len(row) for row in (costs.F, costs.I, costs.W) if isinstance(row, Sequence | np.ndarray)}
        v = max(1, min(lengths) // p) if lengths and p > 0 else 1
    for key, number in (("p", p), ("v", v), ("m", m)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{key} = {number!r} must be a whole number, 1 or more")
    if p * v > MAX_STAGES:
        raise ScheduleError(f"p = {p} times v = {v} gives {p * v} stages, a table holds at most {MAX_STAGES}")
    if 3 * p * v * m > _MOST_ACTIONS:
        raise ScheduleError(
            f"p = {p}, v = {v} and m = {m} give {3 * p * v * m:,} actions, a search takes at most {_MOST_ACTIONS:,}: "
            "search with a smaller m, the best schedule of many microbatches repeats itself"
        )
    costs.per_stage(p * v)
    return v


def _caps(p: int, v: int, m: int, cap: int | Sequence[int] | None) -> tuple[int, ...]:
    """The cap of each rank. Raises ScheduleError."""
    if cap is None:
        return (m * v,) * p
    caps = [int(one) for one in (cap if isinstance(cap, Sequence | np.ndarray) else [cap] * p)]
    if len(caps) != p:
        raise ScheduleError(f"cap: found {len(caps)} numbers, give 1, or {p}: one per rank")
    for rank, one in enumerate(caps):
        if one < v:
            chunks = "its one chunk" if v == 1 else f"its {v} chunks"
            raise ScheduleError(
                f"cap = {one} on rank {rank}: a rank keeps an activation of each of {chunks} at once, give {v} or more"
            )
    return tuple(min(one, m * v) for one in caps)


class _Search:
    """What a search has found so far."""

    def __init__(
        self,
        p: int,
        v: int,
        m: int,
        costs: Costs,
        hops: Hops,
        caps: tuple[int, ...],
        split: bool,
        seed: int,
        effort: int,
        tell: Tell,
    ) -> None:
        self.p, self.v, self.m, self.costs, self.hops, self.caps = p, v, m, costs, hops, caps
        self.split, self.seed, self.effort, self.tell = split, seed, effort, tell
        self.entries: list[_Entry] = []
        self.refused: list[Tried] = []
        self.problems: dict[tuple[int, ...], Problem] = {}
        self.times: dict[tuple[int, ...], Tails] = {}
        self.bounds: dict[tuple[int, ...], float] = {}
        self.known = {loop_placement(p, v): "loop"}
        self.known.setdefault(zigzag_placement(p, v), "zig-zag")
        if np.any(hops.per_stage(p * v) > 0):
            self.known.setdefault(tuple(stage // v for stage in range(p * v)), "contiguous")
        for placement in self.known:
            self._problem(placement)

    def _problem(self, placement: tuple[int, ...]) -> Problem:
        if placement not in self.problems:
            problem = make_problem(
                self.p,
                self.v,
                self.m,
                placement,
                split=self.split,
                costs=self.costs,
                hops=self.hops,
                caps=self.caps,
            )
            times = Tails(problem, make_graph(problem))
            self.problems[placement], self.times[placement] = problem, times
            self.bounds[placement] = lower_bound(problem, times)
        return self.problems[placement]

    @property
    def bound(self) -> float:
        """The least makespan on any placement."""
        return min(self.bounds.values())

    def best(self) -> _Entry:
        """The shortest; of those the one that keeps least, then the one found first."""
        shortest = min(entry.makespan for entry in self.entries)
        near = [entry for entry in self.entries if entry.makespan <= shortest * (1 + _SAME)]
        return min(near, key=lambda entry: entry.peak)

    def done(self) -> bool:
        """Whether the best is proven best."""
        return bool(self.entries) and self.best().makespan <= self.bound * (1 + _SAME)

    def try_families(self, families: Sequence[str] | None, ordered: bool) -> None:
        """Every family that fits, as it is, and with its backward split where that is allowed."""
        gains = self.costs.FB is not None
        for name, table, reason in candidates(self.p, self.v, self.m, families=families, overlap_gains=gains):
            if table is None:
                self.refused.append(Tried(name, None, None, reason))
                continue
            simulation = simulate(table, self.costs, hops=self.hops)
            peak = int(simulation.peak_activations.max())
            over = np.flatnonzero(simulation.peak_activations > np.array(self.caps))
            if over.size:
                rank = int(over[0])
                kept = int(simulation.peak_activations[rank])
                reason = f"keeps {kept} activations on rank {rank}, its cap is {self.caps[rank]}"
            elif not self.split and bool(np.any(table.kinds > 1)):
                reason = "splits the backward"
            elif ordered and not table.ordered:
                reason = "is not ordered"
            if reason:
                self.refused.append(Tried(name, simulation.makespan, peak, reason))
                continue
            self.known.setdefault(table.placement, f"{name.partition(':')[0]}'s")
            problem = self._problem(table.placement)
            self.entries.append(_Entry("family", simulation.makespan, peak, name, problem, None, table))
            if self.split and bool(np.any(table.kinds == 1)):
                self._add("family", problem, f"{name}, backward split", from_table(problem, table))
        self.tell(0.1)

    def try_lists(self) -> None:
        """List schedules on every placement, unless the bound is reached."""
        for placement, problem in self.problems.items():
            if self.done():
                return
            most = max(4, _LIST_WORK // problem.num_actions)
            for _, name, orders in list_schedules(problem, self.times[placement].tails.tolist(), most):
                self._add("list", problem, self._on(name, problem), orders)
            if not self.done():
                self._try_blocks(problem, most)
        self.tell(_LISTED)

    def _try_blocks(self, problem: Problem, most: int) -> None:
        """Repeated blocks, and the best of them listed again."""
        found = sorted(itertools.islice(blocks(problem), most), key=lambda one: one[0])
        for _, name, orders in found:
            self._add("block", problem, self._on(name, problem), orders)
        for _, name, orders in found[: min(_LISTED_AGAIN, most // 3)]:
            for _, other, listed in again(problem, name, orders):
                self._add("listed block", problem, self._on(other, problem), listed)

    def _on(self, name: str, problem: Problem) -> str:
        if len(self.problems) == 1:
            return name
        return f"{name}, {self.known[problem.placement]}"

    def _add(self, kind: str, problem: Problem, name: str, orders: Orders) -> None:
        ends = run(problem, orders)
        if ends is None or not keeps_within(problem, orders):
            raise AssertionError(f"{name}: a schedule that can't be run or is over its cap")
        self.entries.append(_Entry(kind, max(ends), _peak(problem, orders), name, problem, orders, None))

    def improve(self) -> None:
        """Local search: a part of the work from the best of each kind, the rest from what is best then."""
        if self.effort == 0 or self.done():
            return
        starts = self._starts()
        begun = [(entry, self._local(entry)) for entry in starts]
        work = self.effort * min(_LOCAL_WORK, _WORK_PER_ACTION * starts[0].problem.num_actions)
        each = work // 2 // len(begun)
        last = work // 2 // _CONTINUED
        total = each * len(begun) + last * _CONTINUED
        spent = 0
        for more in (each, last):
            for entry, local in begun:
                local.go(local.work + more, self.bound, self._from(spent / total, more / total))
                spent += more
                if local.best_cost[0] < entry.makespan * (1 - _SAME):
                    self._add("local", entry.problem, f"{entry.name}, then local search", local.best)
                if self.done():
                    return
            begun = sorted(begun, key=lambda one: one[1].best_cost[0])[:_CONTINUED]

    def _local(self, entry: _Entry) -> LocalSearch:
        orders = entry.orders
        if orders is None:
            assert entry.table is not None
            orders = from_table(entry.problem, entry.table)
        return LocalSearch(entry.problem, orders, self.times[entry.problem.placement].tails.tolist(), self.seed)

    def _from(self, begin: float, part: float) -> Tell:
        """Tells the share of a part of the local search."""
        return lambda share: self.tell(_LISTED + (1 - _LISTED) * (begin + part * share))

    def _starts(self) -> list[_Entry]:
        """The best of each kind on each placement, without those that are much longer than the best."""
        best: dict[tuple[str, tuple[int, ...]], _Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.makespan):
            best.setdefault((entry.kind, entry.problem.placement), entry)
        limit = _MUCH_LONGER * min(entry.makespan for entry in self.entries)
        return [entry for entry in best.values() if entry.makespan <= limit]

    def result(self) -> SearchResult:
        """The best, checked."""
        if not self.entries:
            why = "; ".join(f"{one.name}: {one.reason}" for one in self.refused[:3])
            raise ScheduleError(f"none of the families that were asked for can be used ({why})")
        best = self.best()
        table = best.table
        if table is None:
            assert best.orders is not None
            table = to_table(best.problem, best.orders, NAME)
        verify(table)
        simulation = simulate(table, self.costs, hops=self.hops)
        if bool(np.any(simulation.peak_activations > np.array(self.caps))):
            raise AssertionError("the search's table is over its cap")
        bound = min(self.bound, simulation.makespan) if self.done() else self.bound
        gap = simulation.makespan / bound - 1 if bound > 0 else 0.0
        by_makespan = sorted(self.entries, key=lambda entry: (entry.makespan, entry.peak))
        usable = [Tried(entry.name, entry.makespan, entry.peak) for entry in by_makespan]
        return SearchResult(
            table=table,
            simulation=simulation,
            lower_bound=bound,
            gap=gap if math.isfinite(gap) else 0.0,
            found_by=best.name,
            tried=(*usable, *self.refused),
            placements=tuple(self.known[one] for one in self.problems),
        )


def _peak(problem: Problem, orders: Orders) -> int:
    change = np.array([1, *([0] if problem.split else []), -1])
    return max(
        int(np.cumsum(change[np.array(order) // problem.m % problem.kinds]).max(initial=0)) for order in orders
    )

"""Is a table legal? Complete, each action once and on its owner, in an order that can run to its end.

How the deadlock check works: every rank runs its list until it needs an action of another rank that has not run. If
all ranks stand still before the end, each waits for exactly one other, so that following "who waits for whom" must
close a cycle: that cycle is the message. Sends never wait (they are buffered), only receives do.

Letters: p = num_ranks, m = num_microbatches, S = number of stages, A = number of actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleDeadlockError, ScheduleError
from mpipipe.schedule.action import Action, Kind
from mpipipe.schedule.deadlock import Wait, shortest_cycle
from mpipipe.schedule.depends import NONE, advance, cross_dependencies, crossings, find, in_range
from mpipipe.schedule.table import ScheduleTable


class Problem(NamedTuple):
    """One thing wrong with a table.

    ``rank`` and ``row`` (position in the rank's list) say where, ``row`` is None for an action that is missing.
    ``kind`` is one of ``range`` ``owner`` ``duplicate`` ``missing`` ``order`` ``message`` ``deadlock``.
    """

    rank: int
    row: int | None
    action: str
    kind: str
    message: str


def find_problems(table: ScheduleTable, *, limit: int = 1000) -> list[Problem]:
    """All that is wrong with ``table``, at most ``limit`` of a sort; an empty list for a legal one.

    A table with no backward at all is legal: it is an evaluation. The deadlock check takes needs for missing actions
    as met.
    """
    look = _Look(table)
    problems: list[Problem] = []
    for check in (_range, _owner, _duplicates, _missing, _order, _messages):
        found = check(look)
        problems.extend(problem for problem, _ in zip(found, range(limit), strict=False))
    problems.extend(_deadlock(look))
    return problems


def verify(table: ScheduleTable) -> None:
    """Raise for a table that is not legal: ScheduleDeadlockError if all that is wrong is a deadlock, ScheduleError
    otherwise.

    The message holds the first problem, how many there are, and the grid with the place marked.
    """
    from mpipipe.schedule.draw.text import marked_text

    problems = find_problems(table)
    if not problems:
        return
    first = problems[0]
    kind = ScheduleDeadlockError if first.kind == "deadlock" else ScheduleError
    more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
    grid = marked_text(table, first.rank, first.row)
    message = f"schedule '{table.name}' is not legal: {first.message}{more}\n{grid}"
    raise kind(message, rank=first.rank, row=first.row, action=first.action)


def is_sound(table: ScheduleTable) -> bool:
    """True if a compute-only table has no problem but perhaps a deadlock. Same answer as ``find_problems``, without
    the list."""
    owners = np.repeat(np.arange(table.p), np.diff(table.offsets))
    if not bool(np.all(in_range(table))) or not np.array_equal(table.owners(), owners):
        return False
    forward = find(table, Kind.F)
    found = int(np.count_nonzero(forward >= 0))
    good = found == forward.size
    if not table.forward_only:
        backward = find(table, Kind.B, Kind.I)
        found += int(np.count_nonzero(backward >= 0))
        good = good and bool(np.all(forward < backward))
        if bool(np.any(table.kinds >= Kind.I)):
            inputs, weights = find(table, Kind.I), find(table, Kind.W)
            found += int(np.count_nonzero(weights >= 0))
            good = good and np.array_equal(inputs < 0, weights < 0) and bool(np.all(inputs <= weights))
    return good and found == table.num_actions


class _Look:
    """A table with what several checks look at."""

    def __init__(self, table: ScheduleTable) -> None:
        self.table = table
        self.good = in_range(table)
        self.first = {kind: find(table, kind) for kind in Kind if table.lowered or kind <= Kind.W}
        self.before, self.after = (self._by_cell(crosses) for crosses in crossings(table))
        self.needs = cross_dependencies(table)

    def _by_cell(self, crosses: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool (S*m,) from bool (copies, S)."""
        cells = np.repeat(crosses[0], self.table.m)
        if len(crosses) == 2:
            mirrored = np.tile(np.arange(self.table.m) >= self.table.first_mirrored, self.table.num_stages)
            cells = np.where(mirrored, np.repeat(crosses[1], self.table.m), cells)
        return cells

    def rank(self, index: int) -> int:
        return int(np.searchsorted(self.table.offsets, index, side="right")) - 1

    def text(self, index: int) -> str:
        return str(self.table.action(index))

    def at(self, index: int, kind: str, message: str) -> Problem:
        rank = self.rank(index)
        row = index - int(self.table.offsets[rank])
        return Problem(rank, row, self.text(index), kind, f"rank {rank}, row {row}, {self.text(index)}: {message}")

    def cell(self, cell: int, kind: Kind) -> Action:
        return Action(int(cell) // self.table.m, kind, int(cell) % self.table.m)


def _range(look: _Look) -> Iterator[Problem]:
    table = look.table
    for index in np.flatnonzero(~look.good).tolist():
        message = f"the table has stages 0..{table.num_stages - 1} and microbatches 0..{table.m - 1}"
        yield look.at(index, "range", message)


def _owner(look: _Look) -> Iterator[Problem]:
    table = look.table
    ranks = np.repeat(np.arange(table.p), np.diff(table.offsets))
    good = np.flatnonzero(look.good)
    placements = np.array([table.placement, table.mirror or table.placement])
    copies = (table.microbatches[good] >= table.first_mirrored).astype(np.intp)
    for index in good[placements[copies, table.stages[good]] != ranks[good]].tolist():
        stage, microbatch = int(table.stages[index]), int(table.microbatches[index])
        of = f" of microbatch {microbatch}" if table.mirror is not None else ""
        yield look.at(index, "owner", f"stage {stage}{of} belongs to rank {table.rank_of(stage, microbatch)}")


def _duplicates(look: _Look) -> Iterator[Problem]:
    table = look.table
    cells = np.where(look.good, table.stages.astype(np.int64) * table.m + table.microbatches, 0)
    for kind, first in look.first.items():
        mine = look.good & (table.kinds == kind)
        for index in np.flatnonzero(mine & (first[cells] != np.arange(table.num_actions))).tolist():
            yield look.at(index, "duplicate", f"done before, by rank {look.rank(int(first[cells[index]]))}")
    whole = look.first[Kind.B]
    for part in (Kind.I, Kind.W):
        for cell in np.flatnonzero((whole >= 0) & (look.first[part] >= 0)).tolist():
            index = int(look.first[part][cell])
            yield look.at(index, "duplicate", f"{look.cell(cell, Kind.B)} does this too: a backward is B, or I and W")


def _missing(look: _Look) -> Iterator[Problem]:
    first = look.first
    whole, inputs, weights = first[Kind.B] >= 0, first[Kind.I] >= 0, first[Kind.W] >= 0
    yield from _missing_cells(look, first[Kind.F] < 0, Kind.F, "no rank does it")
    if look.table.forward_only:
        return
    yield from _missing_cells(look, ~(whole | inputs | weights), Kind.B, "no rank does it, nor I and W instead")
    yield from _missing_cells(look, inputs & ~weights & ~whole, Kind.W, "the table has its I")
    yield from _missing_cells(look, weights & ~inputs & ~whole, Kind.I, "the table has its W")


def _missing_cells(look: _Look, absent: NDArray[np.bool_], kind: Kind, why: str) -> Iterator[Problem]:
    for cell in np.flatnonzero(absent).tolist():
        action = look.cell(cell, kind)
        rank = look.table.rank_of(action.stage, action.microbatch)
        yield Problem(rank, None, str(action), "missing", f"{action} is missing on rank {rank}: {why}")


def _order(look: _Look) -> Iterator[Problem]:
    """On one rank: B and I after F, W after I, and each action after the one of a neighbouring stage that makes its
    input."""
    first = look.first
    pairs = [(Kind.F, Kind.B), (Kind.F, Kind.I), (Kind.I, Kind.W)]
    if look.table.lowered:
        pairs += [(Kind.F, Kind.SEND_F), (Kind.RECV_F, Kind.F)]
        pairs += [pair for kind in (Kind.B, Kind.I) for pair in ((kind, Kind.SEND_B), (Kind.RECV_B, kind))]
    ranks = np.repeat(np.arange(look.table.p), np.diff(look.table.offsets))
    for earlier, later in pairs:
        both = (first[earlier] >= 0) & (first[later] >= 0) & (first[earlier] > first[later])
        for cell in np.flatnonzero(both).tolist():
            maker, user = int(first[earlier][cell]), int(first[later][cell])
            if ranks[maker] == ranks[user]:
                yield look.at(user, "order", f"comes before {look.text(maker)}, which it needs")
    late = np.flatnonzero(look.needs > np.arange(look.table.num_actions))
    for index in late[ranks[late] == ranks[look.needs[late]]].tolist():
        yield look.at(index, "order", f"comes before {look.text(int(look.needs[index]))}, which it needs")


def _messages(look: _Look) -> Iterator[Problem]:
    """In a lowered table: exactly the SEND and RECV between stages of different ranks."""
    table, first = look.table, look.first
    if not table.lowered:
        return
    before, after = look.before, look.after
    forward, backward = first[Kind.F] >= 0, (first[Kind.B] >= 0) | (first[Kind.I] >= 0)
    expected = (
        (Kind.RECV_F, before & forward),
        (Kind.SEND_F, after & forward),
        (Kind.RECV_B, after & backward),
        (Kind.SEND_B, before & backward),
    )
    for kind, wanted in expected:
        for cell in np.flatnonzero(wanted & (first[kind] < 0)).tolist():
            action = look.cell(cell, kind)
            rank = table.rank_of(action.stage, action.microbatch)
            yield Problem(rank, None, str(action), "message", f"{action} is missing on rank {rank}")
        for cell in np.flatnonzero(~wanted & (first[kind] >= 0)).tolist():
            yield look.at(int(first[kind][cell]), "message", "there is nothing to send or receive here")


def _deadlock(look: _Look) -> list[Problem]:
    table = look.table
    ranks = np.repeat(np.arange(table.p), np.diff(table.offsets))
    needs = look.needs.copy()
    needs[(needs != NONE) & (ranks[needs] == ranks)] = NONE
    ends, reached = advance(table, needs, np.zeros(table.num_actions), 0.0)
    stuck = np.flatnonzero(reached < table.offsets[1:])
    if not stuck.size:
        return []
    pairs = frozenset(table.overlaps.tolist())
    stands = {}
    for rank in stuck.tolist():
        here = int(reached[rank])
        both = (here, here + 1) if here in pairs else (here,)
        stands[rank] = next(one for one in both if needs[one] != NONE and ends[needs[one]] < 0)
    waits_for = {rank: int(ranks[needs[here]]) for rank, here in stands.items()}
    cycle = shortest_cycle(waits_for)
    lines = []
    for rank in cycle:
        here, other = stands[rank], waits_for[rank]
        texts = [look.text(int(index)) for index in (here, needs[here], stands[other])]
        lines.append(str(Wait(rank, here, texts[0], texts[1], other, texts[2])))
    index = stands[cycle[0]]
    row = index - int(table.offsets[cycle[0]])
    return [Problem(cycle[0], row, look.text(index), "deadlock", "deadlock: " + "; ".join(lines))]

"""Can a table run to its end? Under buffered sends, rendezvous sends, or a bounded number of receive buffers.

The table is lowered: a RECV stands right before the action that uses the data, a SEND right after the one that makes
it, and every rank runs its list in order. What makes a rank wait:

- ``buffered``: a RECV waits for its SEND; a SEND never waits. So does mpipipe's engine run a table.
- ``rendezvous``: a SEND and its RECV wait for each other, as with blocking sends of large messages.
- K receive buffers: a rank has its next K receives open, in the order of its list, and a SEND waits until its RECV is
  open. With enough buffers this is ``buffered``; with one, a rank can take its next message while it computes.

When all ranks stand still before their ends, each of them waits for exactly one other, so that following who waits for
whom must close a cycle. Time is linear in the number of actions.

Letters: p = num_ranks, A = number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import ScheduleError
from mpipipe.schedule.action import Kind
from mpipipe.schedule.depends import NONE, find
from mpipipe.schedule.lower import lower
from mpipipe.schedule.table import ScheduleTable


@dataclass(frozen=True)
class Sends:
    """How sends behave. ``rendezvous``: they wait for their receive. ``receive_buffers``: receives that a rank has open
    at a time; None: as many as it takes."""

    rendezvous: bool = False
    receive_buffers: int | None = None

    def __post_init__(self) -> None:
        number = self.receive_buffers
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ScheduleError(f"receive buffers = {number!r} must be a whole number, 1 or more, or None")
        if number is not None and (number < 1 or self.rendezvous):
            raise ScheduleError("receive buffers: 1 or more, and not together with rendezvous sends")

    def __str__(self) -> str:
        if self.rendezvous:
            return "rendezvous sends"
        if self.receive_buffers is None:
            return "buffered sends"
        return f"{self.receive_buffers} receive buffer{'s' if self.receive_buffers > 1 else ''} a rank"


BUFFERED = Sends()
RENDEZVOUS = Sends(rendezvous=True)


class Wait(NamedTuple):
    """One rank of a cycle: ``rank`` stands at ``action`` in ``row`` of its list and waits for ``needed`` of rank
    ``other``, which stands at ``behind``."""

    rank: int
    row: int
    action: str
    needed: str
    other: int
    behind: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} at {self.action} waits for {self.needed} of rank {self.other}, "
            f"which is behind {self.behind}"
        )


def find_deadlock(table: ScheduleTable, sends: Sends = BUFFERED) -> list[Wait]:
    """The shortest cycle of ranks that wait for each other when the table stands still; empty if it runs to its end.

    ``row`` counts the given table's own actions; for a SEND or RECV that the lowering of a compute-only table puts in,
    the action that makes or uses its data. Needs for actions that the table lacks are taken as met. Every action must
    belong to a stage and microbatch that exist.
    """
    lowered = lower(table)
    partners = _partners(lowered)
    reached = _run(lowered, partners, sends)
    stuck = np.flatnonzero(reached < lowered.offsets[1:]).tolist()
    if not stuck:
        return []
    ranks = np.repeat(np.arange(lowered.p), np.diff(lowered.offsets))
    needed = {rank: _needed(lowered, partners, reached, rank, sends) for rank in stuck}
    cycle = shortest_cycle({rank: int(ranks[index]) for rank, index in needed.items()})
    rows = _rows(table, lowered)
    waits = []
    for rank in cycle:
        here, need = int(reached[rank]), needed[rank]
        other = int(ranks[need])
        texts = (str(lowered.action(index)) for index in (here, need, int(reached[other])))
        action, wanted, behind = texts
        waits.append(Wait(rank, int(rows[here] - rows[lowered.offsets[rank]]), action, wanted, other, behind))
    return waits


def receive_buffers_needed(table: ScheduleTable) -> int | None:
    """The least number of receive buffers a rank with which the table runs to its end; None if no number is enough.

    0: it runs with rendezvous sends. Time is linear in the number of actions.
    """
    lowered = lower(table)
    partners = _partners(lowered)
    if np.array_equal(_run(lowered, partners, RENDEZVOUS), lowered.offsets[1:]):
        return 0
    return _least_buffers(_Buffers.of(lowered, partners))


def _least_buffers(run: _Buffers) -> int | None:
    """Run with one buffer; where all stand still, with the least number with which some rank goes on, from there.

    That is the least number: what can pass goes on being able to until it has, so that where the ranks stand in the
    end does not depend on the order in which they run; more buffers only let more pass, so that the stand of fewer
    buffers is a step on the way of more.
    """
    ahead = 1
    runnable = list(range(len(run.stops)))
    while True:
        run.go(runnable, ahead)
        stuck = [rank for rank, stop in enumerate(run.stops) if run.reached[rank] < stop]
        if not stuck:
            return ahead
        wanted = {rank: run.buffers_wanted(rank) for rank in stuck if run.is_send[run.reached[rank]]}
        if not wanted:
            return None
        ahead = min(wanted.values())
        runnable = [rank for rank, number in wanted.items() if number == ahead]


def shortest_cycle(waits_for: dict[int, int]) -> list[int]:
    """The shortest cycle of a map in which each key leads to another key, from its smallest rank on."""
    best: list[int] = []
    seen: set[int] = set()
    for start in waits_for:
        path: list[int] = []
        rank = start
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for[rank]
        if rank in path:
            cycle = path[path.index(rank) :]
            if not best or len(cycle) < len(best):
                best = cycle
    first = best.index(min(best))
    return best[first:] + best[:first]


def _partners(lowered: ScheduleTable) -> NDArray[np.int64]:
    """int64 (A,): the flat index of the SEND of each RECV and of the RECV of each SEND; NONE for anything else."""
    partners = np.full(lowered.num_actions, NONE, dtype=np.int64)
    m = lowered.m
    for send, receive, step in ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1)):
        sends, receives = find(lowered, send), find(lowered, receive)
        cells = np.flatnonzero(sends >= 0)
        other = cells + step * m
        inside = (other >= 0) & (other < sends.size)
        cells, other = cells[inside], other[inside]
        both = receives[other] >= 0
        partners[sends[cells[both]]] = receives[other[both]]
        partners[receives[other[both]]] = sends[cells[both]]
    return partners


def _run(lowered: ScheduleTable, partners: NDArray[np.int64], sends: Sends) -> NDArray[np.int64]:
    """int64 (p,): the flat index at which each rank stands when no one can go on."""
    if sends.rendezvous:
        reached: list[int] = lowered.offsets[:-1].tolist()
        ranks: list[int] = np.repeat(np.arange(lowered.p), np.diff(lowered.offsets)).tolist()
        _meet(reached, lowered.offsets[1:].tolist(), partners.tolist(), ranks)
        return np.array(reached, dtype=np.int64)
    run = _Buffers.of(lowered, partners)
    run.go(list(range(lowered.p)), lowered.num_actions if sends.receive_buffers is None else sends.receive_buffers)
    return np.array(run.reached, dtype=np.int64)


def _meet(reached: list[int], stops: list[int], partners: Sequence[int], ranks: Sequence[int]) -> None:
    """A message passes when both its ranks stand at it."""
    runnable = list(range(len(stops)))
    while runnable:
        rank = runnable.pop()
        at, stop = reached[rank], stops[rank]
        while at < stop:
            partner = partners[at]
            if partner != NONE:
                other = ranks[partner]
                if reached[other] != partner:
                    break
                reached[other] = partner + 1
                runnable.append(other)
            at += 1
            reached[rank] = at
        reached[rank] = at


def _receive_ordinals(lowered: ScheduleTable, partners: NDArray[np.int64]) -> tuple[list[int], list[list[int]]]:
    """The number of each RECV among those of its rank (0 for anything else), and each rank's RECVs in order."""
    receiving = ((lowered.kinds == Kind.RECV_F) | (lowered.kinds == Kind.RECV_B)) & (partners != NONE)
    ordinals = np.zeros(lowered.num_actions, dtype=np.int64)
    receives = []
    for rank in range(lowered.p):
        row = lowered.row_of(rank)
        mine = row.start + np.flatnonzero(receiving[row])
        ordinals[mine] = np.arange(mine.size)
        receives.append(mine.tolist())
    return ordinals.tolist(), receives


@dataclass
class _Buffers:
    """A run with receive buffers. For each action: ``partners``, ``is_send``, its rank, ``ordinals`` as
    ``_receive_ordinals`` gives them; for each rank: where it stands (``reached``), the end of its list (``stops``), its
    ``receives`` and how many of them it has ``taken``."""

    partners: list[int]
    is_send: list[bool]
    ranks: list[int]
    ordinals: list[int]
    reached: list[int]
    stops: list[int]
    receives: list[list[int]]
    taken: list[int]

    @classmethod
    def of(cls, lowered: ScheduleTable, partners: NDArray[np.int64]) -> _Buffers:
        """Every rank at the begin of its list."""
        ordinals, receives = _receive_ordinals(lowered, partners)
        return cls(
            partners=partners.tolist(),
            is_send=((lowered.kinds == Kind.SEND_F) | (lowered.kinds == Kind.SEND_B)).tolist(),
            ranks=np.repeat(np.arange(lowered.p), np.diff(lowered.offsets)).tolist(),
            ordinals=ordinals,
            reached=lowered.offsets[:-1].tolist(),
            stops=lowered.offsets[1:].tolist(),
            receives=receives,
            taken=[0] * lowered.p,
        )

    def buffers_wanted(self, rank: int) -> int:
        """The number of buffers with which the SEND at which ``rank`` stands can pass."""
        partner = self.partners[self.reached[rank]]
        return self.ordinals[partner] - self.taken[self.ranks[partner]] + 1

    def go(self, runnable: list[int], ahead: int) -> None:
        """A SEND passes when its RECV is among the receiver's next ``ahead``, a RECV when its SEND has passed."""
        partners, is_send, ranks, ordinals = self.partners, self.is_send, self.ranks, self.ordinals
        reached, receives, taken = self.reached, self.receives, self.taken
        while runnable:
            rank = runnable.pop()
            at, stop = reached[rank], self.stops[rank]
            while at < stop:
                partner = partners[at]
                if partner != NONE:
                    other = ranks[partner]
                    if is_send[at]:
                        if ordinals[partner] >= taken[other] + ahead:
                            break
                        if reached[other] == partner:
                            runnable.append(other)
                    else:
                        if reached[other] <= partner:
                            break
                        taken[rank] += 1
                        opened = taken[rank] + ahead - 1
                        if opened < len(receives[rank]):
                            sender = partners[receives[rank][opened]]
                            if reached[ranks[sender]] == sender:
                                runnable.append(ranks[sender])
                at += 1
                reached[rank] = at


def _needed(
    lowered: ScheduleTable, partners: NDArray[np.int64], reached: NDArray[np.int64], rank: int, sends: Sends
) -> int:
    """The flat index of what a rank that stands still waits for."""
    here = int(reached[rank])
    partner = int(partners[here])
    if sends.receive_buffers is None or lowered.kinds[here] in (Kind.RECV_F, Kind.RECV_B):
        return partner
    _, receives = _receive_ordinals(lowered, partners)
    other = next(row for row in receives if partner in row)
    return other[other.index(partner) - sends.receive_buffers]


def _rows(table: ScheduleTable, lowered: ScheduleTable) -> NDArray[np.int64]:
    """int64 (A of lowered,): the place of each action in the given table; of a message that was put in, that of the
    action which makes or uses its data."""
    if table.lowered:
        return np.arange(lowered.num_actions)
    computes = lowered.kinds <= Kind.W
    place = np.cumsum(computes) - 1
    receiving = (lowered.kinds == Kind.RECV_F) | (lowered.kinds == Kind.RECV_B)
    after: NDArray[np.int64] = place + receiving
    return after

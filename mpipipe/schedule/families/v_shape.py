"""V-Half and V-Min: a building block on the V placement, repeated, made dense without more memory.

Letters: p ranks, m microbatches, r a rank, a and b the two chunks of a rank (stages r and 2p-1-r). A tick is the time
of one F, I or W of one chunk. The six streams of a rank are its Fa, Fb, Ib, Ia, Wb and Wa, each in microbatch order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from mpipipe.schedule.action import Kind
from mpipipe.schedule.families.assemble import assemble
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import v_placement

_INTERVAL = 6
"""Ticks from one microbatch to the next: the work of a rank for one microbatch."""
_FA, _FB, _IB, _IA, _WB, _WA = range(6)
_KINDS = np.array([Kind.F, Kind.F, Kind.I, Kind.I, Kind.W, Kind.W], dtype=np.uint8)
_CHUNKS = np.array([0, 1, 1, 0, 1, 0])
_LIVE = (1, 1, 0, 0, -1, -1)
"""What an action of each stream adds to the activations of its rank."""

_Order = list[int]
"""The stream of each action of a rank; the microbatches follow, since every stream goes 0, 1, 2, ..."""


def v_half(p: int, m: int) -> ScheduleTable:
    """Two chunks per rank placed down the ranks and back up, split backward, half the activations of 1f1b's first rank,
    the same on all ranks.

    Rule: the building block has Fa, Fb, Ib, Ia of rank r at the ticks 2r, 3p-r-2, 3p+d+2r-1, 6p+d-r-2, d = 3 for even p
    and 0 for odd; the next microbatch does the same 6 ticks later; each W takes the first tick that is free. Then every
    rank works through this order, and where the next action has to wait does the first later one that is ready, an F
    only if the peak of the building blocks is not passed; W make way for F and I, from the first tick on or once the
    Fa are through: the shorter of the two tables is taken.

    Makespan - (work of one rank), 6m, in ticks, f = i = w, m >= p: 3p-4 for odd p > 1, 3p-7 for even p > 2, 1
    for p = 2. With other costs it can grow with m: use the simulator. Peak on the fullest rank: 2*floor((p+2)/2) chunk
    activations; 4m(p-1) messages. Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv
    2405.15362), its building blocks and "repeat, squeeze, reorder". p=3, m=3::

        rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
        rank 1 | .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 .   1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
        rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
    """
    odd = 3 * (p % 2 == 0)
    blocks = [(2 * r, 3 * p - r - 2, 3 * p + odd + 2 * r - 1, 6 * p + odd - r - 2) for r in range(p)]
    return _from_blocks("v-half", p, m, blocks)


def v_min(p: int, m: int) -> ScheduleTable:
    """As ``v_half`` with the building block of least memory: a third of the activations of 1f1b's first rank.

    The block of rank r: Fa, Fb, Ib, Ia at the ticks r, 2p-r-1, 2p+d+r, 4p+d-r-1, d = 2 where 3 divides p, else 0. The
    rest is the rule of ``v_half``.

    Makespan - (work of one rank), 6m, in ticks, f = i = w, m >= p: 4p-5 where p = 1 modulo 3 (0 for p = 1), else
    4p-7. With other costs it can grow with m: use the simulator. Peak on the fullest rank: 2*floor((p+4)/3) chunk
    activations; 4m(p-1) messages. Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv
    2405.15362), its building blocks and "repeat, squeeze, reorder". p=3, m=3::

        rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 0W1 5W2 .   0I2 0W2
        rank 1 | .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 1F2 1I0 4I1 1W0 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2 .
        rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
    """
    extra = 2 * (p % 3 == 0)
    blocks = [(r, 2 * p - r - 1, 2 * p + extra + r, 4 * p + extra - r - 1) for r in range(p)]
    return _from_blocks("v-min", p, m, blocks)


def _from_blocks(name: str, p: int, m: int, blocks: Sequence[tuple[int, int, int, int]]) -> ScheduleTable:
    """The table of building blocks: for each rank the ticks of Fa, Fb, Ib and Ia, all different modulo 6."""
    repeated = [_repeat(block, m) for block in blocks]
    cap = max(_peak(order) for order in repeated)
    orders = min((_Dense(repeated, m, cap, early).run() for early in (False, True)), key=lambda dense: dense.tick).done
    rows = []
    for rank, order in enumerate(orders):
        streams = np.array(order)
        microbatches = np.empty(len(order), dtype=np.int32)
        for stream in range(6):
            microbatches[streams == stream] = np.arange(m)
        stages = np.where(_CHUNKS[streams] == 0, rank, 2 * p - 1 - rank).astype(np.int16)
        rows.append((_KINDS[streams], stages, microbatches))
    return assemble(name, p=p, v=2, m=m, placement=v_placement(p), rows=rows)


def _repeat(block: tuple[int, int, int, int], m: int) -> _Order:
    """A rank's order: its block every 6 ticks, m times, and each W in the first free tick after its I."""
    taken = {tick + _INTERVAL * k: stream for stream, tick in enumerate(block) for k in range(m)}
    order: _Order = []
    waiting: deque[int] = deque()
    tick = 0
    while len(order) < 6 * m:
        stream = taken.get(tick)
        if stream is not None:
            order.append(stream)
            if stream in (_IB, _IA):
                waiting.append(stream + 2)
        elif waiting:
            order.append(waiting.popleft())
        tick += 1
    return order


def _peak(order: _Order) -> int:
    return int(np.cumsum(np.array(_LIVE)[order]).max())


class _Dense:
    """All ranks' orders, worked through tick by tick without leaving a tick empty that can be filled.

    ``cap``: most activations on a rank, at least the peak of the given orders. ``early``: W make way for F and I from
    the first tick on, not only once a rank's Fa are through. ``done``: the new orders; ``tick``: their makespan.

    It comes to its end for orders that are free of deadlock: of all actions not done, the one that those orders do
    first is ready and stands at the head of its rank's rest. An F taken from further back must leave room for the whole
    rest before it, so that the rest stays possible.
    """

    def __init__(self, orders: Sequence[_Order], m: int, cap: int, early: bool) -> None:
        p = len(orders)
        self.orders, self.m, self.cap, self.early = orders, m, cap, early
        self.places = [[[j for j, one in enumerate(order) if one == stream] for stream in range(6)] for order in orders]
        self.taken = [bytearray(6 * m) for _ in range(p)]
        self.heads, self.live, self.counts = [0] * p, [0] * p, [[0] * 6 for _ in range(p)]
        self.done: list[_Order] = [[] for _ in range(p)]
        # How many microbatches of F and of I each stage has done: a stage does them in order. The frames at both ends
        # stand for the input of the model, which is there, and for the loss.
        self.forwards = [m] + [0] * (2 * p)
        self.inputs = [0] * (2 * p) + [m]
        self.tick = 0

    def run(self) -> _Dense:
        """Do everything."""
        ranks = range(len(self.orders))
        while any(head < 6 * self.m for head in self.heads):
            chosen = [(rank, self._choose(rank)) for rank in ranks if self.heads[rank] < 6 * self.m]
            for rank, stream in chosen:
                if stream >= 0:
                    self._do(rank, stream)
            self.tick += 1
        return self

    def _ready(self, rank: int) -> list[tuple[bool, int, int]]:
        """(makes way, place in the order, stream) of the streams whose next action has its inputs."""
        fa, fb, ib, ia, wb, wa = self.counts[rank]
        last = len(self.forwards) - 1 - rank
        first = rank + 1
        ready = (
            self.forwards[first - 1] > fa,
            self.forwards[last - 1] > fb,
            fb > ib and self.inputs[last] > ib,
            fa > ia and self.inputs[first] > ia,
            ib > wb,
            ia > wa,
        )
        late = self.early or fa == self.m
        counts, places = self.counts[rank], self.places[rank]
        return [
            (late and stream >= _WB, places[stream][counts[stream]], stream)
            for stream in range(6)
            if ready[stream] and counts[stream] < self.m
        ]

    def _choose(self, rank: int) -> int:
        """The stream that ``rank`` goes on with in this tick, -1 for none."""
        for _, place, stream in sorted(self._ready(rank)):
            if stream > _FB or self._has_room(rank, place):
                return stream
        return -1

    def _has_room(self, rank: int, place: int) -> bool:
        """Whether the F at ``place`` can be done now: with it all that stands before it stays below the cap."""
        order, taken, live = self.orders[rank], self.taken[rank], self.live[rank]
        if live >= self.cap:
            return False
        for j in range(self.heads[rank], place):
            if not taken[j]:
                live += _LIVE[order[j]]
                if live >= self.cap:
                    return False
        return True

    def _do(self, rank: int, stream: int) -> None:
        counts, taken = self.counts[rank], self.taken[rank]
        taken[self.places[rank][stream][counts[stream]]] = 1
        counts[stream] += 1
        self.live[rank] += _LIVE[stream]
        self.done[rank].append(stream)
        if stream <= _FB:
            self.forwards[rank + 1 if stream == _FA else len(self.forwards) - 1 - rank] += 1
        elif stream <= _IA:
            self.inputs[rank if stream == _IA else len(self.forwards) - 2 - rank] += 1
        self.heads[rank] = next((j for j in range(self.heads[rank], len(taken)) if not taken[j]), len(taken))


_MOST_ACTIONS = 20_000_000  # a list schedule, a second or more for 250,000 actions

V_HALF = Family(
    name="v-half",
    summary="split backward on two chunks placed in a V: half the activations of 1f1b, half its waiting",
    generate=lambda p, v, m: v_half(p, m),
    chunks=2,
    default_chunks=2,
    most_actions=_MOST_ACTIONS,
)
V_MIN = Family(
    name="v-min",
    summary="split backward on two chunks placed in a V: a third of the activations of 1f1b",
    generate=lambda p, v, m: v_min(p, m),
    chunks=2,
    default_chunks=2,
    most_actions=_MOST_ACTIONS,
)

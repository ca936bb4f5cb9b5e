"""DualPipe and DualPipeV: microbatches from both ends, a forward and a backward at once. Letters: p ranks, m
microbatches, r a rank, h = the ranks of one direction (p of DualPipeV, p/2 of DualPipe), k = how far a rank is from
its end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.families.assemble import Steps, assemble, numbered
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement, v_placement

_F0, _F1, _B0, _B1, _I0, _I1 = ((way, kind) for kind in (Kind.F, Kind.B, Kind.I) for way in (0, 1))
_W = (2, Kind.W)
"""A weight gradient, of the oldest I that has none."""


def dualpipe(p: int, m: int) -> ScheduleTable:
    """Two copies of the model: rank r holds stage r for microbatches 0 .. m/2-1, which go down the ranks, and stage
    p-1-r for the others, which go up. In the steady state a forward of one direction and a backward of the other run at
    once, so that the messages and the computing of the two hide each other.

    h = p/2, k = min(r, p-1-r); way 0 is the direction that begins nearer to the rank, way 1 the other. Eight phases:
    2(h-k-1) times F0; k+1 times F0 F1; h-k-1 times I1 W F1; n = m/2 - p + k + 1 times (F0 with B1) (F1 with B0), the
    very first F0 and B1 of a middle rank not at once; h-k-1 times B1 (F1 with B0); k+1 times B1 B0, with I for B from
    the middle on; h-k-1 times W I0; k+1 times W. The W are those of the I, oldest first.

    With fb the time of a pair, f, i, w of F, I, W and b = i + w: makespan - (work of the rank that has least) =
    (p/2-1)(fb + f - w - min(i, w)) for i <= f, which for f = i >= w is the README's (p/2-1)(fb + b - 3w); for i > f it
    lies between the two, use the simulator. p even, m even and at least 2p. Peak p+1 activations on every rank, two
    copies of the parameters whose gradients must be added, 2m(p-1) messages. Source: DeepSeek-V3 Technical Report
    (arXiv 2412.19437), section 3.2.1, and the DualPipe README's table. p=2, m=6::

        rank 0 | F0 F3 F1 B3--- F4&B0--- F2&B4--- F5&B1--- B5--- I2 W2
        rank 1 | F3 F0 F4 B0--- F1&B3--- F5&B1--- F2&B4--- B2--- I5 W5
    """
    rows, overlaps = [], []
    for rank in range(p):
        near = min(rank, p - 1 - rank)
        order, pairs = _order(p // 2, m // 2, near, middle=near == p // 2 - 1)
        microbatches = numbered(order, 2)
        down = (order[:, 0] == 0) == (rank < p // 2)
        stages = np.where(down, rank, p - 1 - rank).astype(np.int16)
        rows.append((order[:, 1], stages, microbatches + np.where(down, 0, m // 2).astype(np.int32)))
        overlaps.append(pairs)
    down_ranks = loop_placement(p, 1)
    return assemble(
        "dualpipe", p=p, v=1, m=m, placement=down_ranks, mirror=down_ranks[::-1], rows=rows, overlaps=overlaps
    )


def dualpipe_v(p: int, m: int) -> ScheduleTable:
    """DualPipe cut in the middle: one copy of the model on the V placement, rank r holds stages r (way 0) and 2p-1-r
    (way 1).

    The eight phases are those of ``dualpipe`` with h = p, k = r and n = m - 2p + r + 1; the very first F0 and B1 of the
    last rank do not run at once.

    With fb the time of a pair, f, i, w of one chunk's F, I, W and b = i + w: makespan - (work of the rank that has
    least) = (p-1)(fb + f - w - min(i, w)) for i <= f, which for f = i >= w is the README's (p-1)(fb + b - 3w); for i >
    f it lies between the two, use the simulator. m >= 2p. Peak 2p+1 chunk activations on every rank, 4m(p-1) messages.
    The order of torch's ScheduleDualPipeV. Source: the DualPipe README (DualPipeV, "cut-in-half", Sea AI Lab). p=2,
    m=4::

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1---- .   3F2&0B0---- 3B2---- .   3F3&0B1---- 3B3---- 0I2 0W2 0I3 0W3
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0---- 2F2&1B0---- 1F3&2B1---- 2F3&1B1---- 2B2---- 1B2---- .   2I3 1I3 2W3 1W3
    """
    rows, overlaps = [], []
    for rank in range(p):
        order, pairs = _order(p, m, rank, middle=rank == p - 1)
        stages = np.array([rank, 2 * p - 1 - rank], dtype=np.int16)[order[:, 0]]
        rows.append((order[:, 1], stages, numbered(order, 2)))
        overlaps.append(pairs)
    return assemble("dualpipe-v", p=p, v=2, m=m, placement=v_placement(p), rows=rows, overlaps=overlaps)


def _order(h: int, each: int, k: int, *, middle: bool) -> tuple[Steps, NDArray[np.int64]]:
    """What the rank k away from its end does, ``each`` microbatches each way, and where its pairs begin."""
    late = h - k - 1
    main = each - 2 * h + k + 1
    whole = [(_B1, _B0)[turn % 2] for turn in range(k + 1)]
    split = [(_I1, _I0)[turn % 2] for turn in range(k + 1, 2 * k + 2)]
    phases: tuple[tuple[int, tuple[tuple[int, int], ...], tuple[int, ...]], ...] = (
        (2 * late, (_F0,), ()),
        (k + 1, (_F0, _F1), ()),
        (late, (_I1, _W, _F1), ()),
        (main, (_F0, _B1, _F1, _B0), (0, 2)),
        (late, (_B1, _F1, _B0), (1,)),
        (1, (*whole, *split), ()),
        (late, (_W, _I0), ()),
        (k + 1, (_W,), ()),
    )
    parts, pairs, done = [], [], 0
    for number, (times, actions, begin) in enumerate(phases):
        parts.append(np.tile(np.array(actions, dtype=np.uint8).reshape(-1, 2), (times, 1)))
        places = (done + np.arange(times)[:, None] * len(actions) + np.array(begin, dtype=np.int64)).reshape(-1)
        pairs.append(places[1:] if number == 3 and middle else places)
        done += times * len(actions)
    order = np.concatenate(parts)
    order[order[:, 1] == Kind.W, 0] = order[order[:, 1] == Kind.I, 0]
    return order, np.concatenate(pairs).astype(np.int64)


def _check_dualpipe(p: int, v: int, m: int) -> str | None:
    if p % 2:
        near = f"{p - 1} or {p + 1}" if p > 1 else "2"
        return (
            f"pipeline.schedule = 'dualpipe' pairs its ranks, pipeline.ranks = {p} is odd: take pipeline.ranks = {near}"
        )
    if m % 2 or m < 2 * p:
        nearest = [2 * p] if m < 2 * p else [m - 1, m + 1]
        return _wants_m("dualpipe", "an even m of at least 2 * pipeline.ranks", p, m, nearest)
    return None


def _check_dualpipe_v(p: int, v: int, m: int) -> str | None:
    if m < 2 * p:
        return _wants_m("dualpipe-v", "an m of at least 2 * pipeline.ranks", p, m, [2 * p])
    return None


def _wants_m(name: str, what: str, p: int, m: int, near: list[int]) -> str:
    return (
        f"pipeline.schedule = '{name}' needs {what}, pipeline.ranks = {p} and m = {m} (from batch.sequences and "
        f"batch.microbatch) were asked for: make m {' or '.join(str(one) for one in near)}"
    )


DUALPIPE = Family(
    name="dualpipe",
    summary="two copies of the model, microbatches from both ends, a forward and a backward at once",
    generate=lambda p, v, m: dualpipe(p, m),
    chunks=1,
    other_chunks="'dualpipe-v' (one copy of the model, two chunks per rank)",
    check=_check_dualpipe,
)
DUALPIPE_V = Family(
    name="dualpipe-v",
    summary="dualpipe with one copy of the model, two chunks per rank placed in a V",
    generate=lambda p, v, m: dualpipe_v(p, m),
    chunks=2,
    default_chunks=2,
    other_chunks="'dualpipe' (two copies of the model, one stage of each per rank)",
    check=_check_dualpipe_v,
)

"""Interleaved 1F1B: several chunks per rank. Letters: p ranks, v chunks per rank, m microbatches, r a rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.families.one_f_one_b import alternate, merge
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement


def interleaved(p: int, v: int, m: int) -> ScheduleTable:
    """1F1B over v chunks per rank: the bubble is v times shorter, with v times the messages. Stage s is on rank s % p.

    The microbatches are cut into R = max(1, m // p) groups whose sizes differ by at most one, the larger first. A
    rank's forwards go group after group, in a group chunk after chunk; its backwards the same with the chunks
    reversed. The warm-up is min(m*v, (v-1)*g + 2(p-1-r)) forwards, g the largest group; then one forward and one
    backward in turn; then the remaining backwards. Makespan (m*v+p-1)(F+B) for every m >= p, in times of one chunk,
    and (m+p*v-1)(F+B) for m < p. Any m is allowed; where torch's ScheduleInterleaved1F1B allows an m the order is the
    same. With v=1 the warm-up is p-1-r and the order that of ``1f1b``. p=2, v=2, m=2 (the digit in front is the
    stage)::

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
        rank 1 | .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- .   .
    """
    chunks, order, group = forward_order(p, v, m)
    first_stages, first_stages_back = chunks * np.int16(p), (v - 1 - chunks) * np.int16(p)
    kinds = np.empty((p, 2 * m * v), dtype=np.uint8)
    stages = np.empty((p, 2 * m * v), dtype=np.int16)
    microbatches = np.empty((p, 2 * m * v), dtype=np.int32)
    for rank in range(p):
        alternate(kinds[rank], warmup_forwards(p, v, m, group, rank))
        merge(stages[rank], kinds[rank], first_stages + np.int16(rank), first_stages_back + np.int16(rank))
        merge(microbatches[rank], kinds[rank], order, order)
    return ScheduleTable(
        name="interleaved",
        p=p,
        v=v,
        m=m,
        placement=loop_placement(p, v),
        lowered=False,
        offsets=np.arange(p + 1, dtype=np.int64) * (2 * m * v),
        kinds=kinds.reshape(-1),
        stages=stages.reshape(-1),
        microbatches=microbatches.reshape(-1),
    )


def group_sizes(p: int, m: int) -> list[int]:
    """Sizes of the R = max(1, m // p) groups of microbatches: they differ by at most one, the larger come first."""
    groups = max(1, m // p)
    small, larger = divmod(m, groups)
    return [small + 1] * larger + [small] * (groups - larger)


def forward_order(p: int, v: int, m: int) -> tuple[NDArray[np.int16], NDArray[np.int32], int]:
    """Chunk int16 (m*v,) and microbatch int32 (m*v,) of a rank's forwards in order, and the largest group's size."""
    chunks, microbatches = [], []
    first = 0
    sizes = group_sizes(p, m)
    for size in sizes:
        chunks.append(np.repeat(np.arange(v, dtype=np.int16), size))
        microbatches.append(np.tile(np.arange(first, first + size, dtype=np.int32), v))
        first += size
    return np.concatenate(chunks), np.concatenate(microbatches), sizes[0]


def warmup_forwards(p: int, v: int, m: int, group: int, rank: int) -> int:
    """Forwards that ``rank`` does before its first backward, without the one of the first pair."""
    if v == 1:
        return min(m, p - 1 - rank)
    return min(m * v, (v - 1) * group + 2 * (p - 1 - rank))


FAMILY = Family(
    name="interleaved",
    summary="1f1b over several chunks per rank: v times less waiting, v times the messages",
    generate=interleaved,
)

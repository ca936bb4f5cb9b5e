"""1F1B, one forward and one backward in turn. Letters: p ranks, m microbatches, r a rank."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement

_T = TypeVar("_T", bound=np.generic)


def one_f_one_b(p: int, m: int) -> ScheduleTable:
    """Warm-up of w = min(m, p-1-r) forwards, then one forward and one backward in turn, then the remaining w backwards.

    Makespan (m+p-1)(F+B) as in GPipe, but rank r keeps only min(m, p-r) activations. Also known as PipeDream-flush and
    DAPPLE. One stage per rank; ``interleaved`` is the same idea with more. p=3, m=4::

        rank 0 | F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1 | .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
    """
    kinds = np.empty((p, 2 * m), dtype=np.uint8)
    microbatches = np.empty((p, 2 * m), dtype=np.int32)
    everyone = np.arange(m, dtype=np.int32)
    for rank in range(p):
        alternate(kinds[rank], min(m, p - 1 - rank))
        merge(microbatches[rank], kinds[rank], everyone, everyone)
    return ScheduleTable(
        name="1f1b",
        p=p,
        v=1,
        m=m,
        placement=loop_placement(p, 1),
        lowered=False,
        offsets=np.arange(p + 1, dtype=np.int64) * (2 * m),
        kinds=kinds.reshape(-1),
        stages=np.repeat(np.arange(p, dtype=np.int16), 2 * m),
        microbatches=microbatches.reshape(-1),
    )


def alternate(kinds: NDArray[np.uint8], warmup: int) -> None:
    """Fill ``kinds`` (2n,) with ``warmup`` F, then F and B in turn, then ``warmup`` B: n of each."""
    kinds[:] = Kind.B
    kinds[:warmup] = Kind.F
    kinds[warmup : len(kinds) - warmup : 2] = Kind.F


def merge(out: NDArray[_T], kinds: NDArray[np.uint8], forward: NDArray[_T], backward: NDArray[_T]) -> None:
    """Fill ``out`` (2n,) with ``forward`` (n,) where ``kinds`` is F and ``backward`` (n,) where it is B, both in
    order."""
    out[kinds == Kind.F] = forward
    out[kinds == Kind.B] = backward


FAMILY = Family(
    name="1f1b",
    summary="one forward and one backward in turn: the waiting of gpipe with fewer activations",
    generate=lambda p, v, m: one_f_one_b(p, m),
    chunks=1,
    other_chunks="'interleaved' (1F1B with several chunks per rank)",
)

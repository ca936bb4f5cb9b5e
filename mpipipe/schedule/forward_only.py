"""The table of an evaluation: forwards only. Letters: p ranks, v chunks per rank, m microbatches."""

from __future__ import annotations

import numpy as np

from mpipipe.schedule.action import Kind
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import stages_on


def forward_only(placement: tuple[int, ...], p: int, v: int, m: int) -> ScheduleTable:
    """The forwards of every chunk of a rank, chunk after chunk, microbatches in order; no backward.

    Legal for every placement of v stages on each of p ranks. v=1: makespan (m+p-1)F. p=3, m=4::

        rank 0 | F0 F1 F2 F3 .  .
        rank 1 | .  F0 F1 F2 F3 .
        rank 2 | .  .  F0 F1 F2 F3
    """
    stages = [stages_on(tuple(placement), rank) for rank in range(p)]
    counts = np.array([len(row) * m for row in stages], dtype=np.int64)
    flat = np.array([stage for row in stages for stage in row], dtype=np.int16)
    return ScheduleTable(
        name="forward-only",
        p=p,
        v=v,
        m=m,
        placement=tuple(placement),
        lowered=False,
        offsets=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
        kinds=np.full(flat.size * m, Kind.F, dtype=np.uint8),
        stages=np.repeat(flat, m),
        microbatches=np.tile(np.arange(m, dtype=np.int32), flat.size),
    )

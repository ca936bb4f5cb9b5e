"""The naive schedule: one microbatch at a time. Letters: p ranks, v chunks per rank, m microbatches."""

from __future__ import annotations

import numpy as np

from mpipipe.schedule.action import Kind
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement


def naive(p: int, v: int, m: int) -> ScheduleTable:
    """Forward and backward of microbatch 0 through all stages, then of microbatch 1, and so on. Stage s is on rank s %
    p.

    One rank works while the others wait: makespan m*p*v*(F+B), utilisation 1/p, v activations alive per rank. p=3,
    m=2::

        rank 0 | F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---
        rank 1 | .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1--- .  .
        rank 2 | .  .  F0 B0--- .  .  .  .  .  .  F1 B1--- .  .  .  .
    """
    chunks = np.concatenate((np.arange(v), np.arange(v)[::-1]))
    kinds = np.repeat(np.array([Kind.F, Kind.B], dtype=np.uint8), v)
    ranks = np.arange(p)[:, None]
    one_rank = np.tile(chunks * p, m)[None, :]
    return ScheduleTable(
        name="naive",
        p=p,
        v=v,
        m=m,
        placement=loop_placement(p, v),
        lowered=False,
        offsets=np.arange(p + 1, dtype=np.int64) * (2 * v * m),
        kinds=np.tile(kinds, p * m),
        stages=(one_rank + ranks).astype(np.int16).reshape(-1),
        microbatches=np.tile(np.repeat(np.arange(m, dtype=np.int32), 2 * v), p),
    )


FAMILY = Family(
    name="naive",
    summary="one microbatch at a time: one rank works while the others wait",
    generate=naive,
)

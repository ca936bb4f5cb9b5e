"""GPipe: all forwards, then all backwards. Letters: p ranks, v chunks per rank, m microbatches."""

from __future__ import annotations

import numpy as np

from mpipipe.schedule.action import Kind
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement


def gpipe(p: int, v: int, m: int) -> ScheduleTable:
    """All m forwards of chunk 0, of chunk 1, ...; then all backwards, last chunk first. Stage s is on rank s % p.

    The backward runs first-in-first-out (microbatch 0 first), so that weight gradients are made in microbatch order;
    the makespan is that of last-in-first-out. v=1: makespan (m+p-1)(F+B), bubble fraction (p-1)/(m+p-1), m activations
    alive per rank. p=3, m=4::

        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1 | .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
        rank 2 | .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .
    """
    chunks = np.repeat(np.concatenate((np.arange(v), np.arange(v)[::-1])), m)
    return ScheduleTable(
        name="gpipe",
        p=p,
        v=v,
        m=m,
        placement=loop_placement(p, v),
        lowered=False,
        offsets=np.arange(p + 1, dtype=np.int64) * (2 * v * m),
        kinds=np.tile(np.repeat(np.array([Kind.F, Kind.B], dtype=np.uint8), v * m), p),
        stages=((chunks * p)[None, :] + np.arange(p)[:, None]).astype(np.int16).reshape(-1),
        microbatches=np.tile(np.arange(m, dtype=np.int32), 2 * v * p),
    )


FAMILY = Family(
    name="gpipe",
    summary="all forwards, then all backwards",
    generate=gpipe,
)

"""From each rank's order of kinds and chunks to a table. Letters: p = num_ranks, v = chunks_per_rank, m =
num_microbatches, n = actions of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.table import ScheduleTable, frozen

Steps = NDArray[np.uint8]
"""uint8 (n, 2): chunk and kind of each action of a rank, in order."""


def steps(*actions: tuple[int, Kind]) -> Steps:
    """The given (chunk, kind) pairs as an array (n, 2)."""
    return np.array(actions, dtype=np.uint8).reshape(-1, 2)


def repeat(times: int, *actions: tuple[int, Kind]) -> Steps:
    """The given (chunk, kind) pairs ``times`` times over; none for 0 or less."""
    return np.tile(steps(*actions), (max(0, times), 1))


def numbered(order: Steps, chunks: int) -> NDArray[np.int32]:
    """Microbatch of each action, int32 (n,), when every chunk takes its microbatches 0, 1, 2, ... in each of F,
    backward (B or I) and weight gradient (B or W)."""
    chunk, kind = order[:, 0], order[:, 1]
    microbatches = np.zeros(len(order), dtype=np.int32)
    for counted, given in (((Kind.F,), (Kind.F,)), ((Kind.B, Kind.W), (Kind.W,)), ((Kind.B, Kind.I), (Kind.B, Kind.I))):
        for one in range(chunks):
            mine = (chunk == one) & np.isin(kind, counted)
            count = np.cumsum(mine, dtype=np.int32) - np.int32(1)
            wanted = mine & np.isin(kind, given)
            microbatches[wanted] = count[wanted]
    return microbatches


def assemble(
    name: str,
    *,
    p: int,
    v: int,
    m: int,
    placement: tuple[int, ...],
    rows: Iterable[tuple[NDArray[np.uint8], NDArray[np.int16], NDArray[np.int32]]],
    mirror: tuple[int, ...] | None = None,
    overlaps: Sequence[NDArray[np.int64]] = (),
) -> ScheduleTable:
    """The table of each rank's kinds, stages and microbatches, (n,) each.

    ``overlaps``: for each rank the places in its row of the first actions of overlapped pairs.
    """
    kinds, stages, microbatches = (list(column) for column in zip(*rows, strict=True))
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in kinds]))).astype(np.int64)
    pairs = [places + offset for places, offset in zip(overlaps, offsets[:-1], strict=True)] if overlaps else []
    return ScheduleTable(
        name=name,
        p=p,
        v=v,
        m=m,
        placement=placement,
        lowered=False,
        offsets=frozen(offsets),
        kinds=frozen(np.concatenate(kinds)),
        stages=frozen(np.concatenate(stages)),
        microbatches=frozen(np.concatenate(microbatches)),
        mirror=mirror,
        overlaps=np.concatenate(pairs) if pairs else np.empty(0, dtype=np.int64),
    )

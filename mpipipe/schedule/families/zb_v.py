"""ZB-V: split backward on the V placement. Letters: p ranks, m microbatches, r a rank, a and b the two chunks of a
rank (stages r and 2p-1-r)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.families.assemble import Steps, assemble, numbered, repeat
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import v_placement

_FA, _IA, _WA = (0, Kind.F), (0, Kind.I), (0, Kind.W)
_FB, _IB, _WB = (1, Kind.F), (1, Kind.I), (1, Kind.W)


def zb_v(p: int, m: int) -> ScheduleTable:
    """Two chunks per rank, placed down the ranks and back up (a = stage r, b = stage 2p-1-r), backward split into I and
    W so that the ranks have no gaps when F, I and W cost the same.

    Rank r: 2(p-r)-1 times Fa; r times Fb Fa; p-r times Fb Ib Wb; then, until m Fa are done and Fb has caught up, Fa Ia
    Wa Fb Ib Wb (without Fa once they are through); r times Ia Ib; p-r times Ia Wa; the remaining Wb; the remaining Wa.
    For m < 2p-1 the order is that of 2p-1 microbatches without those from m on.

    With f, i, w the times of one chunk's F, I and W. f = i = w, m >= 2p-1: span bubble 0 and makespan 6mf + (p-1)f.
    f = i >= w, m >= 2p-1: largest span bubble 2(p-1)(f-w). Other ratios have no simple closed form. Peak min(2p, 2m,
    m+1+r) chunk activations on rank r, 2p being what the first rank of 1f1b keeps; 4m(p-1) messages. Source: Qi et al.,
    "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 6. p=2, m=3::

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    placement = v_placement(p)
    return assemble("zb-v", p=p, v=2, m=m, placement=placement, rows=_rows(p, m))


def _rows(p: int, m: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int16], NDArray[np.int32]]]:
    for rank in range(p):
        order = _order(p, max(m, 2 * p - 1), rank)
        microbatches = numbered(order, 2)
        kept = microbatches < m
        stages = np.array([rank, 2 * p - 1 - rank], dtype=np.int16)[order[kept, 0]]
        yield order[kept, 1], stages, microbatches[kept]


def _order(p: int, m: int, rank: int) -> Steps:
    """What ``rank`` does, for m >= 2p-1."""
    with_forward = m - (2 * p - 1 - rank)
    weights = p - rank
    return np.concatenate(
        (
            repeat(2 * (p - rank) - 1, _FA),
            repeat(rank, _FB, _FA),
            repeat(p - rank, _FB, _IB, _WB),
            repeat(with_forward, _FA, _IA, _WA, _FB, _IB, _WB),
            repeat(m - p - with_forward, _IA, _WA, _FB, _IB, _WB),
            repeat(rank, _IA, _IB),
            repeat(weights, _IA, _WA),
            repeat(rank, _WB),
            repeat(p - weights, _WA),
        )
    )


FAMILY = Family(
    name="zb-v",
    summary="split backward on two chunks placed in a V: no gaps where F, I and W cost the same, memory of 1f1b",
    generate=lambda p, v, m: zb_v(p, m),
    chunks=2,
    default_chunks=2,
)

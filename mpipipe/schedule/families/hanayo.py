"""Hanayo: 1F1B on a zig-zag of chunks. Letters: p ranks, v chunks per rank, W = v/2 waves, m microbatches."""

from __future__ import annotations

from mpipipe.schedule.families.assemble import assemble
from mpipipe.schedule.families.slots import fill_slots
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import zigzag_placement


def hanayo(p: int, v: int, m: int) -> ScheduleTable:
    """W = v/2 waves: the stages go down the ranks and back up W times (chunk c of rank r is stage c*p + r for even c,
    c*p + p-1-r for odd c), one copy of the model. One wave is what Chimera's two directions become with one copy.

    Rule: slots of equal length; in each, every rank does what is ready, a backward before a forward, then the oldest
    microbatch; at most p microbatches are under way. v even, any p and m.

    This table, m = n*p, n >= 1, f and b the times of one chunk: makespan - (work of one rank) = (p-1)(2 max(f,b) +
    2(n-1)|b-f|). For other m it is longer by up to one microbatch's way. Peak p*v chunk activations, as the first rank
    of 1f1b keeps; 2m*v(p-1) messages. Source of the idea: Liu et al., "Hanayo" (arXiv 2308.15762). Its order is not
    printed as a rule, so this table is one of our own with that placement: for b = 2f and m = p its ratio of waiting to
    makespan is (2p-2)/(3pW+2p-2), where the paper's, as recalled, is (2p-2)/(3pW+p-1). p=2, v=2, m=3::

        rank 0 | 0F0 0F1 .   3F0 3B0---- 3F1 3B1---- .   0B0---- 0F2 .   0B1---- 3F2 3B2---- .   .   .   .   0B2----
        rank 1 | .   1F0 2F0 1F1 2F1 .   2B0---- 1B0---- 2B1---- 1B1---- 1F2 2F2 .   .   .   2B2---- 1B2---- .   .
    """
    placement = zigzag_placement(p, v)
    return assemble("hanayo", p=p, v=v, m=m, placement=placement, rows=fill_slots(p, (placement,), (m,), p))


def _check(p: int, v: int, m: int) -> str | None:
    if v % 2 == 0:
        return None
    near = f"{v - 1} or {v + 1}" if v > 1 else "2"
    return (
        f"pipeline.schedule = 'hanayo' has two chunks per rank for each wave, pipeline.chunks = {v} is odd: take "
        f"pipeline.chunks = {near}"
    )


FAMILY = Family(
    name="hanayo",
    summary="1f1b on chunks placed in a zig-zag, pipeline.chunks / 2 waves: less waiting for more messages",
    generate=hanayo,
    default_chunks=2,
    check=_check,
)

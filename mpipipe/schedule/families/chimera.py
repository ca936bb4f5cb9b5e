"""Chimera: two pipelines in opposite directions. Letters: p ranks, m microbatches, r a rank."""

from __future__ import annotations

from mpipipe.schedule.families.assemble import assemble
from mpipipe.schedule.families.slots import fill_slots
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement


def chimera(p: int, m: int) -> ScheduleTable:
    """Two copies of the model: rank r holds stage r for the first ceil(m/2) microbatches, which go down the ranks, and
    stage p-1-r for the others, which go up, so that each direction fills the other's warm-up and cool-down.

    Rule: slots of equal length; in each, every rank does what is ready, a backward before a forward, then the oldest
    microbatch, down before up; at most p/2 microbatches of a direction are under way. p even, any m.

    b >= f, m = n*p, n >= 1: makespan - (work of one rank) = (p-2)(b + (n-1)(b-f)). So with m = p the waiting over the
    makespan is (p-2)/(2m+p-2) for b = f and (p-2)/(3m/2+p-2) for b = 2f. Peak for m = p: p/2 + 1 + min(r, p-1-r), which
    is p on the middle ranks; never above p for other m. Two copies of the parameters whose gradients must be added,
    2m(p-1) messages. Source: Li and Hoefler, "Chimera" (arXiv 2107.06925), bidirectional
    pipelines. p=4, m=4::

        rank 0 | F0 F1 .  F2 B2--- F3 B3--- .  B0--- .  .  B1---
        rank 1 | .  F0 F2 F1 F3 .  B2--- B0--- B3--- B1--- .  .
        rank 2 | .  F2 F0 F3 F1 .  B0--- B2--- B1--- B3--- .  .
        rank 3 | F2 F3 .  F0 B0--- F1 B1--- .  B2--- .  .  B3---
    """
    down = loop_placement(p, 1)
    ways, counts = (down, down[::-1]), ((m + 1) // 2, m // 2)
    rows = fill_slots(p, ways, counts, p // 2)
    return assemble("chimera", p=p, v=1, m=m, placement=ways[0], mirror=ways[1], rows=rows)


def _check(p: int, v: int, m: int) -> str | None:
    if p % 2 == 0:
        return None
    near = f"{p - 1} or {p + 1}" if p > 1 else "2"
    return f"pipeline.schedule = 'chimera' pairs its ranks, pipeline.ranks = {p} is odd: take pipeline.ranks = {near}"


FAMILY = Family(
    name="chimera",
    summary="two copies of the model, two pipelines in opposite directions: half the waiting of 1f1b",
    generate=lambda p, v, m: chimera(p, m),
    chunks=1,
    other_chunks="'dualpipe-v' (one copy of the model, two chunks per rank)",
    check=_check,
)

"""1F1B, one forward and one backward in turn. Letters: p ranks, m microbatches, r a rank, f and b the times of a
forward and a backward, c the latency of a hop."""

from __future__ import annotations

from mpipipe.schedule.families.in_turn import in_turn, one_chunk
from mpipipe.schedule.family import Family, Option
from mpipipe.schedule.table import ScheduleTable


def one_f_one_b(p: int, m: int, warmup: int = 0) -> ScheduleTable:
    """Warm-up of w = min(m, p-1-r) forwards, then one forward and one backward in turn, then the remaining w backwards.

    Makespan (m+p-1)(f+b) as in GPipe, but rank r keeps only min(m, p-r) activations. A hop's latency c is waited for in
    the steady state too: (m+p-1)(f+b) + 2c(p-1) + 2c floor((m-1)(p-1)/p). ``warmup``: so many forwards more on each
    rank, but not more than p-1-r more, after which further ones gain nothing: from 0 (1F1B) to p-1 (``eager-1f1b``) it
    trades memory, min(m, p-r+min(warmup, p-1-r)) activations, for less waiting for messages.

    One stage per rank; ``interleaved`` is the same idea with more. Sources: Narayanan et al., Memory-Efficient
    Pipeline-Parallel DNN Training, 2021, section 3.2 (PipeDream-flush); Fan et al., DAPPLE, 2021. p=3, m=4::

        rank 0 | F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1 | .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
    """
    return in_turn("1f1b", p, 1, m, one_chunk(m), one_f_one_b_warmups(p, warmup))


def one_f_one_b_warmups(p: int, more: int = 0) -> list[int]:
    """Forwards of each rank before its first pair, p-1-r, and ``more`` where that is at most p-1-r."""
    return [behind + min(more, behind) for behind in range(p)[::-1]]


FAMILY = Family(
    name="1f1b",
    summary="one forward and one backward in turn: the waiting of gpipe with fewer activations",
    generate=lambda p, v, m, warmup=0: one_f_one_b(p, m, warmup),
    chunks=1,
    other_chunks="'interleaved' (1F1B with several chunks per rank)",
    options={
        "warmup": Option(
            description="forwards more before the first backward, on rank r at most p-1-r more",
            default="0; from p-1 on the schedule is eager-1f1b",
        )
    },
)

"""Eager 1F1B: a longer warm-up, to wait less for messages. Letters: p ranks, m microbatches, r a rank, f and b the
times of a forward and a backward, c the latency of a hop."""

from __future__ import annotations

from mpipipe.schedule.families.in_turn import in_turn, one_chunk
from mpipipe.schedule.family import Family, Option
from mpipipe.schedule.table import ScheduleTable


def eager_1f1b(p: int, m: int, per_hop: int = 2) -> ScheduleTable:
    """1F1B with a warm-up of min(m, k(p-1-r)) forwards, k = ``per_hop`` for every rank behind; 1F1B has k = 1.

    Makespan (m+p-1)(f+b) + 2c(p-1) as long as 2c <= (k-1)(f+b): a message travels while other microbatches are worked
    on. Beyond, every c: that, plus (2c - (k-1)(f+b)) floor((m-1)(p-1) / (k(p-1)+1)). Rank r keeps min(m, k(p-1-r)+1)
    activations. Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023 (arXiv 2211.05322),
    its overlapping-friendly schedule; ``per_hop`` and the formula for every c are ours. p=3, m=4::

        rank 0 | F0 F1 F2 F3 .  .  .  B0--- .  B1--- .  B2--- .  B3---
        rank 1 | .  F0 F1 F2 .  B0--- F3 B1--- .  B2--- .  B3--- .  .
        rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
    """
    return in_turn("eager-1f1b", p, 1, m, one_chunk(m), eager_warmups(p, per_hop))


def eager_warmups(p: int, per_hop: int = 2) -> list[int]:
    """Forwards of each rank before its first pair: ``per_hop`` for every rank behind it."""
    return [per_hop * behind for behind in range(p)[::-1]]


FAMILY = Family(
    name="eager-1f1b",
    summary="1f1b with a longer warm-up: messages travel during work, for up to twice the activations",
    generate=lambda p, v, m, per_hop=2: eager_1f1b(p, m, per_hop),
    chunks=1,
    other_chunks="'interleaved' (1F1B with several chunks per rank)",
    options={
        "per_hop": Option(
            description="forwards of the warm-up for every rank behind; hides a latency of up to (K-1)(F+B)/2",
            default="2; 1 is 1f1b",
            least=1,
        )
    },
)

"""Interleaved 1F1B: several chunks per rank. Letters: p ranks, v chunks per rank, m microbatches, r a rank, g the size
of a group of microbatches, f and b the times of one chunk's forward and backward."""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ScheduleError
from mpipipe.schedule.families.in_turn import Order, in_turn
from mpipipe.schedule.family import Family, Option
from mpipipe.schedule.table import ScheduleTable


def interleaved(p: int, v: int, m: int, group: int | None = None) -> ScheduleTable:
    """1F1B over v chunks per rank: the bubble is v times shorter, with v times the messages. Stage s is on rank s % p.

    The microbatches are cut into R = max(1, m // p) groups whose sizes differ by at most one, the larger first. A
    rank's forwards go group after group, in a group chunk after chunk; its backwards the same with the chunks
    reversed. The warm-up is min(m*v, (v-1)*g + 2(p-1-r)) forwards, g the largest group; then one forward and one
    backward in turn; then the remaining backwards. Makespan (m*v+p-1)(f+b) for every m >= p, in times of one chunk,
    and (m+p*v-1)(f+b) for m < p. Any m is allowed; where torch's ScheduleInterleaved1F1B allows an m the order is the
    same. With v=1 the warm-up is p-1-r and the order that of ``1f1b``.

    ``group``: groups of so many microbatches instead, and the rest in a last one, as Megatron-LM's
    microbatch_group_size_per_virtual_pipeline_stage. Larger groups keep more activations, min(m*v, (v-1)*g + 2(p-1-r)
    + 1), and leave more time between the chunks of a microbatch; the makespan is the same. Every group needs p
    microbatches, or all m: below that ranks wait for each other, for longer or for ever. Source: Narayanan et al.,
    Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, section 2.2.2. p=2, v=2, m=2
    (the digit in front is the stage)::

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
        rank 1 | .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- .   .
    """
    order = forward_order("interleaved", p, v, m, group)
    return in_turn("interleaved", p, v, m, order, interleaved_warmups(p, v, m, group))


def interleaved_warmups(p: int, v: int, m: int, group: int | None = None) -> list[int]:
    """Forwards that each rank does before its first backward, without the one of the first pair."""
    if v == 1:
        return list(range(p)[::-1])
    lead = (v - 1) * group_sizes(p, m, group)[0]
    return [lead + 2 * behind for behind in range(p)[::-1]]


def group_sizes(p: int, m: int, group: int | None = None) -> list[int]:
    """Sizes of the groups of microbatches: of R = max(1, m // p) groups that differ by at most one, the larger first;
    or ``group`` each, and the rest in a last one."""
    if group is not None:
        whole, rest = divmod(m, min(group, m))
        return [min(group, m)] * whole + [rest] * (rest > 0)
    groups = max(1, m // p)
    small, larger = divmod(m, groups)
    return [small + 1] * larger + [small] * (groups - larger)


def forward_order(name: str, p: int, v: int, m: int, group: int | None = None) -> Order:
    """The forwards of a rank, group after group, in a group chunk after chunk.

    Raises ScheduleError, naming the nearest sizes allowed, for a ``group`` that leaves one of less than p and m
    microbatches.
    """
    if group is not None and v > 1 and not _fits(p, m, group):
        sizes = [size for size in range(1, m + 1) if _fits(p, m, size)]
        near = {max((size for size in sizes if size < group), default=0), min(size for size in sizes if size > group)}
        allowed = " or ".join(f"group={size}" for size in sorted(near - {0}))
        raise ScheduleError(
            f"pipeline.schedule = '{name}:group={group}' with pipeline.ranks = {p} and m = {m} microbatches: every "
            f"group, the last one too, needs at least {min(p, m)} of them; nearest allowed: {allowed}"
        )
    chunks, microbatches = [], []
    first = 0
    for size in group_sizes(p, m, group):
        chunks.append(np.repeat(np.arange(v, dtype=np.int16), size))
        microbatches.append(np.tile(np.arange(first, first + size, dtype=np.int32), v))
        first += size
    return Order(np.concatenate(chunks), np.concatenate(microbatches))


def _fits(p: int, m: int, group: int) -> bool:
    return group_sizes(p, m, group)[-1] >= min(p, m)


GROUP = Option(
    description="microbatches in a group, which goes through a chunk before the next chunk has its turn",
    default="as even as can be, p or a little more",
    least=1,
)

FAMILY = Family(
    name="interleaved",
    summary="1f1b over several chunks per rank: v times less waiting, v times the messages",
    generate=interleaved,
    options={"group": GROUP},
)

"""Looped breadth-first: all microbatches through one chunk, then through the next. Letters: p ranks, v chunks per rank,
m microbatches, f and b the times of one chunk's forward and backward."""

from __future__ import annotations

from dataclasses import replace

from mpipipe.schedule.families.gpipe import gpipe
from mpipipe.schedule.family import Family
from mpipipe.schedule.table import ScheduleTable


def looped_bfs(p: int, v: int, m: int) -> ScheduleTable:
    """All m forwards of chunk 0, of chunk 1, ...; then all backwards, chunk v-1 first. Stage s is on rank s % p.

    The actions of ``gpipe``, under the name that the schedule has for several chunks. The paper's backward goes through
    the microbatches last-in-first-out; ours goes first-in-first-out, so that every stage makes its weight gradients in
    microbatch order; the makespan is the same. m >= p: makespan (m v + p - 1)(f+b), m v activations on every rank;
    m < p: makespan (m + p v - 1)(f+b). Its point is data parallelism: the gradients of a chunk are complete long before
    the step ends, and a chunk's parameters are needed in one stretch. Source: Lamy-Poirier, Breadth-First Pipeline
    Parallelism, 2023 (arXiv 2211.05953). p=2, v=2, m=2::

        rank 0 | 0F0 0F1 2F0 2F1 .   .   .   2B0---- 2B1---- 0B0---- 0B1----
        rank 1 | .   1F0 1F1 3F0 3F1 3B0---- 3B1---- 1B0---- 1B1---- .   .
    """
    return replace(gpipe(p, v, m), name="looped-bfs")


FAMILY = Family(
    name="looped-bfs",
    summary="gpipe over several chunks per rank: v times less waiting, all activations kept",
    generate=looped_bfs,
)

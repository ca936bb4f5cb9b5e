"""Orders found by filling slots of equal length, the oldest backward first. Letters: p = num_ranks, S = number of
stages, k = a microbatch of one way."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind

Row = tuple[NDArray[np.uint8], NDArray[np.int16], NDArray[np.int32]]


def fill_slots(p: int, ways: Sequence[tuple[int, ...]], counts: Sequence[int], in_flight: int) -> Iterator[Row]:
    """Kinds, stages and microbatches of each rank, (n,) each, when in every slot every rank does one action that is
    ready: a backward before a forward, then the oldest microbatch, then the first way.

    ``ways``: for each direction the rank of each stage; ``counts``: its number of microbatches, which are numbered one
    way after another. Of each way at most ``in_flight`` microbatches are between their first forward and the end of
    their last backward, so that no rank keeps more than that of any stage. The oldest microbatch of a way can always
    go on, so that the slots come to an end. F and B take a slot each: only the order is kept.
    """
    num_stages = len(ways[0])
    num_ways = len(ways)
    forward = num_stages * num_ways * max(counts)
    ready: list[list[int]] = [[] for _ in range(p)]
    done: list[list[int]] = [[] for _ in range(p)]
    # An action is one number: (forward or 0) + (k * num_ways + way) * num_stages + stage. The smallest is done first.
    left = 2 * num_stages * sum(counts)
    for way, count in enumerate(counts):
        for k in range(min(in_flight, count)):
            heapq.heappush(ready[ways[way][0]], forward + (k * num_ways + way) * num_stages)
    while left:
        running = [(rank, heapq.heappop(heap)) for rank, heap in enumerate(ready) if heap]
        left -= len(running)
        for rank, action in running:
            done[rank].append(action)
            turn, stage = divmod(action % forward, num_stages)
            ranks = ways[turn % num_ways]
            if action >= forward:
                if stage + 1 < num_stages:
                    heapq.heappush(ready[ranks[stage + 1]], action + 1)
                else:
                    heapq.heappush(ready[rank], action - forward)
            elif stage:
                heapq.heappush(ready[ranks[stage - 1]], action - 1)
            elif turn // num_ways + in_flight < counts[turn % num_ways]:
                heapq.heappush(ready[rank], action + forward + in_flight * num_ways * num_stages)
    first = np.concatenate(([0], np.cumsum(counts)))[:-1]
    for row in done:
        actions = np.array(row, dtype=np.int64)
        turns, stages = np.divmod(actions % forward, num_stages)
        kinds = np.where(actions >= forward, Kind.F, Kind.B).astype(np.uint8)
        yield kinds, stages.astype(np.int16), (turns // num_ways + first[turns % num_ways]).astype(np.int32)

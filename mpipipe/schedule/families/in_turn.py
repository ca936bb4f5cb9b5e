"""The 1F1B kind of schedule: a warm-up of forwards, then a forward and a backward in turn, then what is left.

Letters: p = num_ranks, v = chunks_per_rank, m = num_microbatches, n = m v forwards of one rank, r a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.schedule.action import Kind
from mpipipe.schedule.table import ScheduleTable
from mpipipe.topology import loop_placement

_T = TypeVar("_T", bound=np.generic)


class Order(NamedTuple):
    """The order of a rank's forwards: ``chunks`` int16 (n,) and ``microbatches`` int32 (n,).

    Its backwards have the same order with the chunks reversed, chunk v-1 first.
    """

    chunks: NDArray[np.int16]
    microbatches: NDArray[np.int32]


def one_chunk(m: int) -> Order:
    """The order with one chunk per rank: microbatch 0, 1, 2, ..."""
    return Order(np.zeros(m, dtype=np.int16), np.arange(m, dtype=np.int32))


def in_turn(
    name: str, p: int, v: int, m: int, order: Order, warmups: Sequence[int], lags: Sequence[int] | None = None
) -> ScheduleTable:
    """The table in which rank r does ``warmups[r]`` forwards, then one forward and one backward in turn, then the
    remaining backwards. Stage s is on rank s % p. A warm-up above n is n.

    With ``lags`` the backward is split: an I takes the place of each B, the W of backward k - lags[r] follows the I of
    backward k right away, and the last lags[r] W come at the end. Time and memory are linear in the number of actions.
    """
    parts = 2 if lags is None else 3
    n = m * v
    kinds = np.empty((p, parts * n), dtype=np.uint8)
    stages = np.empty((p, parts * n), dtype=np.int16)
    microbatches = np.empty((p, parts * n), dtype=np.int32)
    first_stages, first_stages_back = order.chunks * np.int16(p), (v - 1 - order.chunks) * np.int16(p)
    for rank in range(p):
        if lags is None:
            whole_backwards(kinds[rank], min(n, warmups[rank]))
        else:
            split_backwards(kinds[rank], min(n, warmups[rank]), min(n, lags[rank]))
        merge(stages[rank], kinds[rank], first_stages + np.int16(rank), first_stages_back + np.int16(rank))
        merge(microbatches[rank], kinds[rank], order.microbatches, order.microbatches)
    return ScheduleTable(
        name=name,
        p=p,
        v=v,
        m=m,
        placement=loop_placement(p, v),
        lowered=False,
        offsets=np.arange(p + 1, dtype=np.int64) * (parts * n),
        kinds=kinds.reshape(-1),
        stages=stages.reshape(-1),
        microbatches=microbatches.reshape(-1),
    )


def whole_backwards(kinds: NDArray[np.uint8], warmup: int) -> None:
    """Fill ``kinds`` (2n,) with ``warmup`` F, then F and B in turn, then ``warmup`` B: n of each; warmup <= n."""
    kinds[:] = Kind.B
    kinds[:warmup] = Kind.F
    kinds[warmup : len(kinds) - warmup : 2] = Kind.F


def split_backwards(kinds: NDArray[np.uint8], warmup: int, lag: int) -> None:
    """Fill ``kinds`` (3n,) as ``whole_backwards`` does, with an I for each B, a W behind each I from the ``lag``-th
    (0-based) on, and ``lag`` W at the end: n of each; warmup <= n, lag <= n."""
    n = len(kinds) // 3
    index = np.arange(n)
    inputs = np.minimum(n, warmup + index + 1) + index + np.maximum(0, index - lag)
    kinds[:] = Kind.F
    kinds[inputs] = Kind.I
    kinds[inputs[lag:] + 1] = Kind.W
    kinds[len(kinds) - lag :] = Kind.W


def merge(out: NDArray[_T], kinds: NDArray[np.uint8], forward: NDArray[_T], backward: NDArray[_T]) -> None:
    """Fill ``out`` with ``forward`` (n,) where ``kinds`` is F, and with ``backward`` (n,) where it is B, where it is I
    and where it is W, each in order."""
    out[kinds == Kind.F] = forward
    for kind in (Kind.B, Kind.I, Kind.W):
        where = kinds == kind
        if where.any():
            out[where] = backward

"""What all ranks do together, built on ``isend`` and ``irecv`` alone, so that both transports do it alike.

No floating-point number is ever added by MPI: values are exchanged, and every rank adds them in rank order. So a sum
has the same bits whatever the message size and the MPI library.

Every function is collective: each rank calls it, in the same order.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpipipe.transport.protocol import COLLECTIVE_TAG, Transport

CLOCK_EXCHANGES = 10


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def all_gather(transport: Transport, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Every rank's ``values``, as an array of shape ``(size, *values.shape)`` in rank order.

    ``values`` has the same shape and dtype on all ranks. Takes ceil(log2(size)) rounds (Bruck et al. 1997, IEEE TPDS
    8:11, "Efficient algorithms for all-to-all communications in multiport message-passing systems", section 4).
    """
    size, rank = transport.size, transport.rank
    mine = np.ascontiguousarray(values)
    collected = np.empty((size, *mine.shape), dtype=mine.dtype)
    collected[0] = mine
    have = 1
    while have < size:
        count = min(have, size - have)
        source, target = (rank + have) % size, (rank - have) % size
        receive = transport.irecv(_bytes_of(collected[have : have + count]), source, COLLECTIVE_TAG)
        send = transport.isend(_bytes_of(collected[:count]), target, COLLECTIVE_TAG)
        transport.wait(receive, f"what rank {source} has gathered")
        transport.wait(send, f"rank {target} to take what was gathered")
        have += count
    return np.roll(collected, rank, axis=0)


def barrier(transport: Transport) -> None:
    """Return when every rank has called it."""
    all_gather(transport, np.zeros(1, dtype=np.uint8))


def all_gather_objects(transport: Transport, value: Any) -> list[Any]:
    """Every rank's JSON-able ``value``, in rank order; sizes may differ between ranks."""
    text = json.dumps(value).encode()
    lengths = all_gather(transport, np.array([len(text)], dtype=np.int64))[:, 0]
    padded = np.zeros(int(lengths.max()), dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    rows = all_gather(transport, padded)
    return [json.loads(rows[rank, : lengths[rank]].tobytes()) for rank in range(transport.size)]


def any_rank(transport: Transport, flag: bool) -> bool:
    """True on every rank if ``flag`` is true on one."""
    return bool(all_gather(transport, np.array([flag], dtype=np.uint8)).any())


def sum_in_rank_order(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Add gathered rows, first rank first: a fixed order, so fixed bits."""
    total: npt.NDArray[np.float64] = values[0].copy()
    for row in values[1:]:
        total += row
    return total


@dataclass(frozen=True, slots=True)
class ClockSample:
    """This rank's clock against rank 0's: rank 0's time is ``local_ns + offset_ns``, within ``rtt_ns / 2``."""

    local_ns: int
    offset_ns: int
    rtt_ns: int


def compare_clocks(transport: Transport) -> ClockSample:
    """Ping-pong with rank 0; the exchange with the shortest round trip counts (Cristian 1989, Distributed Computing 3).

    The other ranks are served one after another by rank 0.
    """
    sample = ClockSample(time.perf_counter_ns(), 0, 0)
    for rank in range(1, transport.size):
        if transport.rank == 0:
            _answer(transport, rank)
        elif transport.rank == rank:
            sample = _ask(transport)
    barrier(transport)
    return sample


def _answer(transport: Transport, rank: int) -> None:
    question, answer = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for _ in range(CLOCK_EXCHANGES):
        transport.wait(transport.irecv(_bytes_of(question), rank, COLLECTIVE_TAG), f"the clock of rank {rank}")
        answer[0] = time.perf_counter_ns()
        transport.wait(transport.isend(_bytes_of(answer), rank, COLLECTIVE_TAG), f"rank {rank} to take the time")


def _ask(transport: Transport) -> ClockSample:
    question, answer = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    best: ClockSample | None = None
    for _ in range(CLOCK_EXCHANGES):
        receive = transport.irecv(_bytes_of(answer), 0, COLLECTIVE_TAG)
        asked = time.perf_counter_ns()
        send = transport.isend(_bytes_of(question), 0, COLLECTIVE_TAG)
        transport.wait(receive, "the clock of rank 0")
        heard = time.perf_counter_ns()
        transport.wait(send, "rank 0 to take the question")
        rtt = heard - asked
        if best is None or rtt < best.rtt_ns:
            middle = asked + rtt // 2
            best = ClockSample(middle, int(answer[0]) - middle, rtt)
    assert best is not None
    return best

"""What all ranks do together, built on ``isend`` and ``irecv`` alone, so that both transports do it alike.

No floating-point number is ever added by MPI: values are exchanged, and every rank adds them in rank order. So a sum
has the same bits whatever the message size and the MPI library.

Every function is collective: each rank calls it, in the same order.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpipipe import errors
from mpipipe.errors import MpipipeError, SetupError
from mpipipe.transport.protocol import COLLECTIVE_TAG, Transport

_log = logging.getLogger(__name__)

CLOCK_EXCHANGES = 10

T = TypeVar("T")


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def all_gather(
    transport: Transport, values: npt.NDArray[Any], *, tag: int = COLLECTIVE_TAG
) -> npt.NDArray[Any]:
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
        receive = transport.irecv(_bytes_of(collected[have : have + count]), source, tag)
        send = transport.isend(_bytes_of(collected[:count]), target, tag)
        transport.wait(receive, f"what rank {source} has gathered")
        transport.wait(send, f"rank {target} to take what was gathered")
        have += count
    return np.roll(collected, rank, axis=0)


def barrier(transport: Transport) -> None:
    """Return when every rank has called it."""
    all_gather(transport, np.zeros(1, dtype=np.uint8))


def all_gather_objects(transport: Transport, value: Any, *, tag: int = COLLECTIVE_TAG) -> list[Any]:
    """Every rank's JSON-able ``value``, in rank order; sizes may differ between ranks."""
    text = json.dumps(value).encode()
    lengths = all_gather(transport, np.array([len(text)], dtype=np.int64), tag=tag)[:, 0]
    padded = np.zeros(int(lengths.max()), dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    rows = all_gather(transport, padded, tag=tag)
    return [json.loads(rows[rank, : lengths[rank]].tobytes()) for rank in range(transport.size)]


@dataclass(frozen=True, slots=True)
class Fault:
    """What an action raised on ``rank``; ``error`` is the exception there, and one of the same class and text on the
    others. What is none of our own errors is a ``SetupError`` for what the operating system refuses, else a plain
    ``MpipipeError``.
    """

    rank: int
    error: MpipipeError


def attempt(transport: Transport, action: Callable[[], T]) -> tuple[T | None, list[Fault]]:
    """What ``action`` gives on this rank (None where it fails), and what it raised on all ranks, in rank order.

    An error that is none of our own goes to this rank's log with its traceback.
    """
    result, mine = None, None
    try:
        result = action()
    except Exception as error:
        mine = _as_ours(error)
    known = None if mine is None else {"class": type(mine).__name__, "text": str(mine), "fields": _plain(vars(mine))}
    faults = []
    for rank, fields in enumerate(all_gather_objects(transport, known)):
        if fields is not None:
            faults.append(Fault(rank, mine if rank == transport.rank and mine is not None else _as_told(fields)))
    return result, faults


def agree(transport: Transport, action: Callable[[], T]) -> T:
    """What ``action`` gives on this rank, once it has succeeded on every rank. Raises the error of the first rank that
    has one on all of them, as seen alike.
    """
    result, faults = attempt(transport, action)
    if faults:
        first = faults[0].error
        first.seen_alike = True
        if len(faults) < transport.size:
            ranks = ", ".join(str(fault.rank) for fault in faults[:8]) + (", ..." if len(faults) > 8 else "")
            word = "rank" if len(faults) == 1 else "ranks"
            first.add_note(f"Seen on {word} {ranks} only, of {transport.size} ranks.")
        raise first
    return result  # type: ignore[return-value]


def on_first_rank(transport: Transport, action: Callable[[], Any]) -> Any:
    """What ``action`` gives on rank 0, JSON-able; its error on every rank."""
    return all_gather_objects(transport, agree(transport, action if transport.rank == 0 else lambda: None))[0]


def _as_ours(error: Exception) -> MpipipeError:
    if isinstance(error, MpipipeError):
        return error
    _log.log(logging.DEBUG if isinstance(error, OSError) else logging.ERROR, "failed on this rank", exc_info=error)
    kind = SetupError if isinstance(error, OSError) else MpipipeError
    ours = kind(f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


def _as_told(fields: dict[str, Any]) -> MpipipeError:
    """The error of another rank; the constructors differ, the attributes do not."""
    kind = getattr(errors, fields["class"], MpipipeError)
    error: MpipipeError = kind.__new__(kind, fields["text"])
    error.args = (fields["text"],)
    vars(error).update(fields["fields"])
    return error


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of an exception's attributes."""
    kept = {}
    for key, value in fields.items():
        plain = value if isinstance(value, str | int | float | bool | list | tuple | None) else str(value)
        try:
            kept[key] = json.loads(json.dumps(plain))
        except (TypeError, ValueError):
            kept[key] = str(value)
    return kept


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

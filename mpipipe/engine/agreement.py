"""Ranks that were given different batches would wait for each other's messages for ever: each looks at the one before
it first.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from mpipipe.errors import EngineError
from mpipipe.transport import COLLECTIVE_TAG, Request, Transport

AGREEMENT_TAG = COLLECTIVE_TAG + 1


_WORDS = 4
"""Whether the run trains; sequences; microbatches; checksum of the order in which signatures come."""


class Agreement:
    """Compares what the ranks of a run are about to do, with one message of 32 bytes from each rank to the next.

    Rank r waits for rank r - 1 alone, no earlier than for its own first message, so that no rank begins later by it.
    What is compared decides which messages there are: the number of microbatches, and at which of them a signature is
    seen for the first time or again. So ranks whose placeholders have other shapes than the batch itself agree, as long
    as both change together.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._numbers: dict[Hashable, int] = {}
        self._order: tuple[list[int], int] = ([], 0)
        self._mine = np.zeros(_WORDS, dtype=np.int64)
        self._theirs = np.zeros(_WORDS, dtype=np.int64)
        self._send: Request | None = None
        self._receive: Request | None = None

    def number(self, signatures: Iterable[Hashable]) -> list[int]:
        """A number for each signature, the same for equal ones: how many others were seen before it. So ranks that
        agree have the same numbers for their own signatures.
        """
        numbers, known = [], self._numbers
        last, number = None, -1
        for signature in signatures:
            if signature is not last:
                last, number = signature, known.setdefault(signature, len(known))
            numbers.append(number)
        return numbers

    def begin(self, training: bool, sequences: int, numbers: list[int]) -> None:
        """Tell the next rank of the run that begins; ``numbers`` has one entry a microbatch. Never blocks."""
        rank, size = self._transport.rank, self._transport.size
        if size == 1:
            return
        if numbers != self._order[0]:
            self._order = (numbers, zlib.crc32(repr(numbers).encode()))
        self._mine = np.array([training, sequences, len(numbers), self._order[1]], dtype=np.int64)
        if rank > 0:
            self._theirs = np.zeros(_WORDS, dtype=np.int64)
            self._receive = self._transport.irecv(self._theirs.view(np.uint8), rank - 1, AGREEMENT_TAG)
        if rank < size - 1:
            self._send = self._transport.isend(self._mine.view(np.uint8), rank + 1, AGREEMENT_TAG)

    def check(self) -> None:
        """Wait for the rank before this one, once a run. Raises ``EngineError`` when it does another run."""
        if self._receive is None:
            return
        rank, request = self._transport.rank, self._receive
        self._receive = None
        self._transport.wait(request, f"rank {rank - 1} to begin the same step or evaluation")
        if (self._theirs == self._mine).all():
            return
        mine, theirs = self._mine.tolist(), self._theirs.tolist()
        found = _difference(rank, mine, theirs)
        raise EngineError(f"{found}: every rank calls the trainer with the same arguments, in the same order")

    def finish(self) -> None:
        """The end of a run."""
        self.check()
        if self._send is not None:
            self._transport.wait(self._send, f"rank {self._transport.rank + 1} to begin the same step or evaluation")
            self._send = None


def _difference(rank: int, mine: Sequence[int], theirs: Sequence[int]) -> str:
    if mine[0] != theirs[0]:
        trains, evaluates = (rank, rank - 1) if mine[0] else (rank - 1, rank)
        return f"rank {trains} does a step while rank {evaluates} evaluates"
    for word, what in ((1, "sequences"), (2, "microbatches")):
        if mine[word] != theirs[word]:
            return f"rank {rank} was given {mine[word]} {what}, rank {rank - 1} {theirs[word]}"
    return f"rank {rank} was given inputs of other shapes than rank {rank - 1}"

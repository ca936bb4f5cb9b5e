"""The in-process twin: p ranks as p threads of one process.

Only one rank runs at a time; when it waits, the next one in rank order that can go on does. So a run is repeatable, a
user's module may use torch's global generator, and a deadlock is not a hang: when every rank waits for a message that
no one can send any more, all of them get a ``TransportError`` that says who waits for what. A send completes only when
its receive is posted (rendezvous), the stricter half of what MPI may do: that is when the bytes are copied.

A request that a caller has made of one (its test does more than look) is tested in its own rank's thread, when it is
that rank's turn. What it waits for may come by itself, as the end of a kernel does: a deadlock is one only after
QUIET_S without a message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from mpipipe.errors import MessageMismatchError, TransportError
from mpipipe.transport.awareness import Finding
from mpipipe.transport.protocol import Request
from mpipipe.transport.standing import Place, PlaceOf, Standing, graph_text

if TYPE_CHECKING:
    from mpipipe.device import Memory

T = TypeVar("T")
_Key = tuple[int, int, int]

QUIET_S = 2.0
"""With no message posted and no wait begun for so long, ranks that wait for requests of a caller's making wait for
ever.
"""


class _LoopbackRequest:
    """One half of a message. ``done`` turns true when both halves have met."""

    __slots__ = ("done", "error", "memory", "peer")

    def __init__(self, memory: Memory, peer: int) -> None:
        self.memory: Memory | None = memory
        self.peer = peer
        self.done = False
        self.error: TransportError | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


def _copy(target: Memory, source: Memory) -> None:
    """Returns once the bytes are there."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        target[:] = source
    elif target.nbytes:
        import torch

        into, out = (torch.as_tensor(memory) for memory in (target, source))
        into.copy_(out)
        torch.cuda.current_stream().synchronize()


class LoopbackWorld:
    """The shared state of ``size`` ranks in one process. ``lock``: held by the rank whose turn it is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._wake = [threading.Condition(self.lock) for _ in range(size)]
        self._turn = 0
        self._ended: set[int] = set()
        self._sends: dict[_Key, deque[_LoopbackRequest]] = {}
        self._receives: dict[_Key, deque[_LoopbackRequest]] = {}
        self._blocked: dict[int, tuple[Request, str]] = {}
        self._posted = 0
        self._seen: dict[int, int] = {}
        self._quiet_since = time.monotonic()
        self.failure: TransportError | None = None
        self.places: dict[int, PlaceOf] = {}

    def transport(self, rank: int) -> LoopbackTransport:
        return LoopbackTransport(self, rank)

    def post(self, key: _Key, memory: Memory, *, sending: bool) -> _LoopbackRequest:
        """Add one half of a message; complete both halves if the other one is there."""
        request = _LoopbackRequest(memory, key[1] if sending else key[0])
        self._posted += 1
        self._quiet_since = time.monotonic()
        mine, theirs = (self._sends, self._receives) if sending else (self._receives, self._sends)
        waiting = theirs.get(key)
        if not waiting:
            mine.setdefault(key, deque()).append(request)
            return request
        other = waiting.popleft()
        if not waiting:
            del theirs[key]
        self._deliver(request, other) if sending else self._deliver(other, request)
        return request

    @staticmethod
    def _deliver(send: _LoopbackRequest, receive: _LoopbackRequest) -> None:
        assert send.memory is not None
        assert receive.memory is not None
        if send.memory.nbytes == receive.memory.nbytes:
            _copy(receive.memory, send.memory)
            receive.done = True
        else:
            receive.error = MessageMismatchError(
                f"a message of {send.memory.nbytes} bytes arrived where {receive.memory.nbytes} bytes were expected"
            )
        send.done = True
        send.memory = receive.memory = None

    def block(self, rank: int, request: Request, what: str) -> None:
        """Give way to the other ranks until the request is complete."""
        self._quiet_since = time.monotonic()
        while not request.test():
            if self.failure is not None:
                raise self.failure
            self._seen[rank] = self._posted
            self._blocked[rank] = (request, what)
            self._pass_on(rank)
            self.await_turn(rank)
            del self._blocked[rank]

    def await_turn(self, rank: int) -> None:
        """Return when it is this rank's turn."""
        while self._turn != rank:
            self._wake[rank].wait()

    def leave(self, rank: int) -> None:
        """One rank is done."""
        self._ended.add(rank)
        self._pass_on(rank)

    def fail(self, error: TransportError) -> None:
        """Keep the first ``error``: every rank that waits raises it when its turn comes."""
        if self.failure is None:
            self.failure = error

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; if none can, to the next one with the failure to raise."""
        others = [(rank + k) % self.size for k in range(1, self.size + 1)]
        waiting = [other for other in others if other not in self._ended]
        if not waiting:
            return
        ready = [other for other in waiting if self._can_go_on(other)]
        if not ready and time.monotonic() - self._quiet_since < QUIET_S:
            ready = [other for other in waiting if not isinstance(self._blocked[other][0], _LoopbackRequest)]
        if not ready:
            self.fail(self._deadlock())
        self._turn = (ready or waiting)[0]
        if self._turn != rank:
            self._wake[self._turn].notify()

    def _can_go_on(self, rank: int) -> bool:
        if rank not in self._blocked:
            return True
        request, _ = self._blocked[rank]
        if isinstance(request, _LoopbackRequest):
            return request.done or request.error is not None or self.failure is not None
        return self._seen[rank] != self._posted or self.failure is not None

    def _deadlock(self) -> TransportError:
        lines = [f"rank {rank} waits for {what}" for rank, (_, what) in sorted(self._blocked.items())]
        ended = f" ({len(self._ended)} rank(s) have already ended)" if self._ended else ""
        error = TransportError("every rank waits and nothing is under way" + ended + ": " + "; ".join(lines))
        standings = {rank: self.standing(rank, look=True) for rank in self._blocked if rank not in self._ended}
        error.add_note(graph_text(standings, self.size))
        return error

    def standing(self, rank: int, look: bool) -> Standing:
        place = self.places[rank](look) if rank in self.places else Place()
        blocked = self._blocked.get(rank)
        return Standing(rank, place) if blocked is None else Standing(rank, place, blocked[1], blocked[0].peer)


class LoopbackTransport:
    """One rank's view of a ``LoopbackWorld``."""

    library = "loopback (one process)"

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.local_rank = rank
        self.local_size = world.size

    def cuda_findings(self) -> list[Finding]:
        return []

    def isend(self, memory: Memory, peer: int, tag: int) -> Request:
        self._check_peer(peer)
        return self._world.post((self.rank, peer, tag), memory, sending=True)

    def irecv(self, memory: Memory, peer: int, tag: int) -> Request:
        self._check_peer(peer)
        return self._world.post((peer, self.rank, tag), memory, sending=False)

    def poll(self) -> None:
        """Nothing to move: a message is whole as soon as both halves are posted."""

    def wait(self, request: Request, what: str) -> None:
        self._world.block(self.rank, request, what)

    def describe_by(self, place_of: PlaceOf) -> None:
        self._world.places[self.rank] = place_of

    def standing(self, look: bool = False) -> Standing:
        return self._world.standing(self.rank, look)

    def configure(self, *, timeout_s: float, wait: str) -> None:
        """Nothing to set: a wait that can't end is found at once."""

    def abort(self, code: int) -> NoReturn:
        error = TransportError(f"rank {self.rank} aborted the job with code {code}", rank=self.rank)
        self._world.fail(error)
        raise error

    def close(self) -> None:
        """Nothing to close."""

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise TransportError(f"no rank {peer} among {self.size}", rank=self.rank, peer=peer)


def solo() -> LoopbackTransport:
    """A job of one rank, in this thread."""
    return LoopbackWorld(1).transport(0)


def run_ranks(size: int, work: Callable[[LoopbackTransport], T]) -> list[T]:
    """Run ``work(transport)`` on ``size`` ranks of this process; the results in rank order.

    When ranks fail, the others are woken and the first failure is raised here.
    """
    world = LoopbackWorld(size)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        with world.lock:
            world.await_turn(rank)
            try:
                results[rank] = work(world.transport(rank))
            except BaseException as error:
                failures.append(error)
                world.fail(TransportError(f"rank {rank} failed: {type(error).__name__}: {error}", rank=rank))
            finally:
                world.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]

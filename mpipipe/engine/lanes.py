"""Messages that MPI can't have yet: their bytes are still being made, or their memory is still being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mpipipe.device import Buffer, Device, Mark
from mpipipe.transport import Request


class Deferred:
    """A send or receive that begins once its mark is reached, and the mark of each before it in its lane."""

    __slots__ = ("_begin", "_mark", "_request", "peer")

    def __init__(self, mark: Mark | None, begin: Callable[[], Request], peer: int) -> None:
        self._mark = mark
        self._begin = begin
        self._request: Request | None = None
        self.peer = peer

    def has_begun(self) -> bool:
        """Whether MPI has it."""
        return self._request is not None

    def begin_if_ready(self) -> bool:
        """Hand it to MPI if that is possible by now. True once it is."""
        if self._mark is not None:
            if not self._mark.reached():
                return False
            self._mark = None
        self._request = self._begin()
        return True

    def test(self) -> bool:
        """As ``Request.test``; False while it has not begun. The lane begins it."""
        return self._request is not None and self._request.test()


class Lane:
    """Messages in the order in which MPI must get them: what two ranks send each other under one tag matches by it."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[Deferred] = deque()

    def add(self, mark: Mark | None, begin: Callable[[], Request], peer: int) -> Request:
        """Begin it now if its turn has come and ``mark`` (None: nothing to wait for) is reached, else later."""
        deferred = Deferred(mark, begin, peer)
        self.waiting.append(deferred)
        self.advance()
        return deferred

    def advance(self) -> None:
        """Begin those whose time has come. Never blocks."""
        waiting = self.waiting
        while waiting and waiting[0].begin_if_ready():
            waiting.popleft()


class Landing:
    """A receive into memory that the message only passes through, in parts: complete once the way on has begun for all
    of them. A part goes on as soon as it is there.
    """

    __slots__ = ("_device", "_left", "peer")

    def __init__(self, requests: Sequence[Request], parts: Sequence[Buffer], device: Device) -> None:
        self._left = deque(zip(requests, parts, strict=True))
        self._device = device
        self.peer = requests[0].peer

    def test(self) -> bool:
        """As ``Request.test``."""
        left = self._left
        while left and left[0][0].test():
            self._device.landed(left.popleft()[1])
        return not left

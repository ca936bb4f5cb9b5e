"""A transport that notes what goes through it."""

from __future__ import annotations

from typing import Any, NoReturn

from mpipipe.device import Memory
from mpipipe.transport import COLLECTIVE_TAG, Request, Transport


class Spy:
    """Counts the engine's messages. ``headers``: sent so far; ``most_open``: most receives that were
    open at once and had not arrived."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.headers = 0
        self.tensors = 0
        self._open: list[Request] = []
        self.most_open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, memory: Memory, peer: int, tag: int) -> Request:
        if tag < COLLECTIVE_TAG:
            self.headers += tag % 2
            self.tensors += 1 - tag % 2
        return self._inner.isend(memory, peer, tag)

    def irecv(self, memory: Memory, peer: int, tag: int) -> Request:
        request = self._inner.irecv(memory, peer, tag)
        if tag < COLLECTIVE_TAG:
            self._open = [one for one in self._open if not one.test()] + [request]
            self.most_open = max(self.most_open, len(self._open))
        return request

    def abort(self, code: int) -> NoReturn:
        self._inner.abort(code)

"""How early receives are opened, and how many buffers a program takes therefore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mpipipe.engine.program import RankProgram
from mpipipe.schedule import Kind

RECEIVE_AHEAD_BYTES = 64 << 20
"""Bytes of messages that may be on their way to a rank before it needs them; ``comm.receive_ahead_bytes``."""

RECEIVES_OPEN = 2
"""Receives that are open at once, at most, beside the one that is waited for. With more, a step of 4 MiB messages took
5 % longer on a CPU (their buffers are out of the cache when they come), and small ones were no faster.
"""


class Window:
    """Counts the open receives and their bytes against what may be open. One is always allowed."""

    __slots__ = ("_bytes", "_limit_bytes", "open")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.open = self._bytes = 0

    def clear(self) -> None:
        self.open = self._bytes = 0

    def take(self, nbytes: int, *, needed: bool = False) -> bool:
        """Count one more of ``nbytes`` if there is room for it, or if it is ``needed`` now."""
        if not needed and self.open and (self.open >= RECEIVES_OPEN or self._bytes + nbytes > self._limit_bytes):
            return False
        self.open += 1
        self._bytes += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """One is complete."""
        self.open -= 1
        self._bytes -= nbytes


def buffers_needed(
    program: RankProgram, sizes: Callable[[int, int, bool], Sequence[int]], limit_bytes: int = RECEIVE_AHEAD_BYTES
) -> dict[int, int]:
    """How many receive buffers of each size (bytes) a run of ``program`` takes once all forms are known.

    ``sizes(stage, microbatch, gradient)``: bytes of each tensor of what ``stage`` receives. A buffer is in use from the
    time its receive is opened, which the window decides, to the end of the B, or W, of the stage and microbatch; of the
    F in a program without backward and for a stage that makes none. Receives and releases happen in the order of the
    program, so this is not a bound but the number.
    """
    window, in_use, most = Window(limit_bytes), Counter[int](), Counter[int]()
    held: dict[tuple[int, int], list[int]] = {}
    receives = list(program.receives)
    opened = 0

    def open_next(*, needed: bool) -> bool:
        nonlocal opened
        if opened == len(receives):
            return False
        op = receives[opened]
        parts = list(sizes(op.stage, op.microbatch, op.kind == Kind.RECV_B))
        if not window.take(sum(parts), needed=needed):
            return False
        opened += 1
        for nbytes in parts:
            in_use[nbytes] += 1
            most[nbytes] = max(most[nbytes], in_use[nbytes])
        return True

    def open_ahead() -> None:
        while open_next(needed=False):
            pass

    open_ahead()
    taken = 0
    for op in program.ops:
        key = (op.stage, op.microbatch)
        if op.kind in (Kind.RECV_F, Kind.RECV_B):
            if opened == taken:
                open_next(needed=True)
            taken += 1
            parts = list(sizes(op.stage, op.microbatch, op.kind == Kind.RECV_B))
            held.setdefault(key, []).extend(parts)
            window.give(sum(parts))
            open_ahead()
        elif op.kind in (Kind.B, Kind.W) or (op.kind == Kind.F and program.ends_with_forward(op.stage)):
            in_use.subtract(held.pop(key, []))
    return dict(most)

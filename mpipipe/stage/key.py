"""What keys the random numbers of a microbatch."""

from __future__ import annotations

from collections.abc import Callable

from mpipipe.model import Draw


class MicrobatchKey:
    """What keys the random numbers of one microbatch: its number in the step and the draw of its samples (None: no
    drawing). ``draw`` may be a function of the number that makes it, called where a layer asks.
    """

    __slots__ = ("_draw", "microbatch")

    def __init__(self, microbatch: int, draw: Draw | Callable[[int], Draw | None] | None) -> None:
        self.microbatch = microbatch
        self._draw = draw

    @property
    def draw(self) -> Draw | None:
        return self._draw(self.microbatch) if callable(self._draw) else self._draw

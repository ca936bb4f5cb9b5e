"""Where a run's microbatches come from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from mpipipe.model import Draw


class Feed(Protocol):
    """One step's batch, cut into microbatches. The same on every rank, except that only the first and last stage look
    at contents.
    """

    @property
    def rows(self) -> int:
        """Sequences of the whole batch, over all microbatches."""

    def signature(self, microbatch: int) -> Hashable:
        """Shapes and types of the microbatch's inputs; known alike on every rank. Equal signatures make messages of
        equal shape.
        """

    def inputs(self, microbatch: int) -> object:
        """What the first layer takes."""

    def targets(self, microbatch: int) -> object:
        """What the loss function takes beside the output."""

    def draw(self, microbatch: int) -> Draw | None:
        """What keys the microbatch's random numbers; None for an evaluation."""

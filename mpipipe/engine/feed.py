"""Where a run's microbatches come from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from mpipipe.model import Draw


class Feed(Protocol):
    """One step's batch, cut into microbatches. The same on every rank, except that only the first and last stage look
    at contents.
    """

    @property
    def rows(self) -> int:
        """Sequences of the whole batch, over all microbatches."""

    def signatures(self, training: bool) -> Sequence[Hashable]:
        """Of each microbatch: shapes and types of its inputs, and whether this is training; known alike on every rank.
        Equal signatures make messages of equal form.
        """

    def inputs(self, microbatch: int) -> object:
        """What the first layer takes. Stays the feed's: leave it unchanged."""

    def targets(self, microbatch: int) -> object:
        """What the loss function takes beside the output. Stays the feed's."""

    def draw(self, microbatch: int) -> Draw | None:
        """What keys the microbatch's random numbers; None for an evaluation."""

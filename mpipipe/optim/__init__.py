"""The update of a rank's own parameters: learning rate, norm, clipping, AdamW."""

from __future__ import annotations

from mpipipe.optim.adamw import AdamW
from mpipipe.optim.learning_rate import learning_rate
from mpipipe.optim.norm import BLOCK_ELEMENTS, clip_factor, square_sums

__all__ = ["BLOCK_ELEMENTS", "AdamW", "clip_factor", "learning_rate", "square_sums"]

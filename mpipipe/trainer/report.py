"""What a step tells: to every rank, and to ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpipipe.config import Config
from mpipipe.errors import EngineError
from mpipipe.units import counted, finite_or_none


@dataclass(frozen=True, slots=True)
class Shared:
    """What the ranks tell each other at the end of a step's pipeline."""

    loss_sum: float
    count: int
    bubble_fraction: float
    stop: bool


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, the same on every rank. ``loss``: None when no label of the batch was valid. ``skipped``: why the
    weights did not change.
    """

    step: int
    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    bubble_fraction: float
    skipped: str | None = None
    stop: bool = False

    def as_metrics(self) -> dict[str, object]:
        """The line of ``metrics.jsonl``."""
        line: dict[str, object] = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.step_s if self.step_s > 0 else 0.0,
            "step_s": self.step_s,
            "bubble_fraction": self.bubble_fraction,
        }
        if self.skipped:
            line["skipped"] = self.skipped
        return {key: finite_or_none(value) for key, value in line.items()}


def other_size_text(rows: int, num_microbatches: int, config: Config) -> str:
    """The warning for a step of another number of rows than the run file says."""
    return (
        f"a batch of {counted(rows, 'row')}, and batch.sequences = {config.batch.sequences}: it is taken as it is, "
        f"with m = {num_microbatches} in this step, where the run file makes {config.num_microbatches} (said once)"
    )


def reason_to_skip(shared: Shared, first_bad: str | None) -> str | None:
    """Why a step changes nothing, alike on every rank; None for one that does. ``first_bad``: the first parameter whose
    gradient is not finite.
    """
    if shared.count == 0:
        return "no label of the batch is valid"
    if first_bad is not None:
        return f"the gradient of {first_bad} is not finite"
    if not math.isfinite(shared.loss_sum):
        return "the loss is not finite"
    return None


def refuse_difference(values: Sequence[float], what: str) -> None:
    """Raise ``EngineError``, on every rank alike, unless all ranks have the same number."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        error = EngineError(
            f"rank {other} has {values[other]:g} {what}, rank 0 has {values[0]:g}: every rank calls the trainer with "
            "the same arguments, in the same order"
        )
        error.seen_alike = True
        raise error

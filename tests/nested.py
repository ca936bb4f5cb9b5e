"""Layers made of functions, which take and return more than one tensor, and the cuts on which they must be alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import little
import torch
from torch import nn

from mpipipe.trainer import Trainer
from mpipipe.transport import solo

CUTS = ((2, "1f1b", 1), (3, "gpipe", 1), (1, "interleaved", 2), (2, "interleaved", 2), (2, "zb-v", 2), (4, "zb-h1", 1))
"""(p, schedule, chunks); every model here has four layers or more."""

ROWS, MICROBATCH = 5, 2
"""Three microbatches, the last of one row."""

W = little.WIDTH


class Both(NamedTuple):
    """A named tuple that is found by its name."""

    hidden: torch.Tensor
    side: Any


class Apply(nn.Module):
    """A layer of a function of (its linear map, its input)."""

    def __init__(self, function: Callable[[nn.Module, Any], Any], width: int = W) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self.linear, x)


class Only(nn.Module):
    """A layer of a function, without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def apply(function: Callable[[nn.Module, Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Apply(function)


def only(function: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Only(function)


def data(steps: int = 2, rows: int = ROWS) -> list[Any]:
    return [little.batch(step, rows) for step in range(steps)]


def settings(schedule: str = "1f1b", chunks: int = 1, **keys: Any) -> Any:
    return little.config(schedule=schedule, chunks=chunks, sequences=ROWS, microbatch=MICROBATCH, **keys)


def everywhere(
    layers: Sequence[Any],
    batches: Iterable[Any] | None = None,
    *,
    cuts: Sequence[tuple[int, str, int]] = CUTS,
    loss_fn: Any = little.square_loss,
    **keys: Any,
) -> little.Outcome:
    """Train on one rank and with every cut; all must be equal in every bit. Layers are factories."""
    batches = data() if batches is None else list(batches)
    given = {"loss_fn": loss_fn, "evaluate": lambda _: batches[:1]}
    alone = little.train_on(1, lambda: layers, settings(**keys), batches, **given)
    for loss, norm in alone.steps:
        assert loss is not None
        assert math.isfinite(loss)
        assert 0 < norm < math.inf
    for p, schedule, chunks in cuts:
        config = settings(schedule, chunks, **keys)
        little.assert_same(little.train_on(p, lambda: layers, config, batches, **given), alone)
    return alone


def by_hand(layers: Sequence[Callable[[], nn.Module]], batch: Any, loss_fn: Any = little.square_loss) -> float:
    """The first step's loss as plain torch has it; factories are seeded as the trainer seeds them."""
    trainer = Trainer(settings(), layers, loss_fn, transport=solo())
    value, (_, target) = batch[0], batch
    for module in trainer.model.modules:
        value = module(value)
    total, count = loss_fn(value, target)
    trainer.close()
    return float(total.detach()) / count

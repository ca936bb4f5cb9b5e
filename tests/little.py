"""Small layers of a user's own, without a [model] section, and runs of them over the loopback transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpipipe.config import Config
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks

WIDTH = 6


def config(
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    sequences: int = 4,
    microbatch: int = 1,
    run_dir: str | None = None,
    **keys: Any,
) -> Config:
    """A run of layers that a script brings along. Further settings as ``section__key=value``."""
    tables: dict[str, dict[str, object]] = {
        "run": {"seed": 5, "steps": 50, "dir": run_dir or "unused"},
        "batch": {"sequences": sequences, "microbatch": microbatch},
        "pipeline": {"schedule": schedule, "chunks": chunks},
        "optimizer": {"lr": 1e-2, "clip_norm": 0.5},
        "trace": {"enabled": False},
    }
    for name, value in keys.items():
        section, key = name.split("__")
        tables.setdefault(section, {})[key] = value
    return Config.from_tables(dict(tables))


def square_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Squared differences, one item a row."""
    return (output - target).double().square().sum(), len(target)


def batch(step: int, rows: int = 4, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets of shape (rows, *shape), default (rows, WIDTH)."""
    generator = torch.Generator().manual_seed(70 + step)
    size = (rows, *(shape or (WIDTH,)))
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def linear(width: int = WIDTH) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, width)


class View(nn.Module):
    """Returns a view of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1).view_as(x)


class Turned(nn.Module):
    """Returns a strided view of its input: the last two dimensions change places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2)


@dataclass
class Outcome:
    """What one rank saw: loss and norm of every step, and its parameters after the last, by global name."""

    steps: list[tuple[float | None, float]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every parameter and buffer of the rank's modules by its own name, tied parts and frozen ones each for itself."""


def parts_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {}
    for stage in trainer.model.stages.values():
        for layer in stage.layers:
            for key, value in layer.module.state_dict().items():
                found[f"{layer.name}.{key}"] = value.clone()
    return found


def train(
    layers: Callable[[], Sequence[Any]],
    config: Config,
    transport: Transport,
    batches: Iterable[Any],
    *,
    loss_fn: Any = square_loss,
    evaluate: Callable[[int], Iterable[Any]] | None = None,
    **given: Any,
) -> Outcome:
    """One step a batch. ``layers()`` is called on every rank, since ranks of one process must not share modules."""
    trainer = Trainer(config, layers(), loss_fn, transport=transport, **given)
    outcome = Outcome()
    for number, data in enumerate(batches):
        report = trainer.step_report(data)
        outcome.steps.append((report.loss, report.grad_norm))
        if evaluate is not None:
            outcome.evaluations.append(trainer.evaluate(evaluate(number)))
    outcome.parameters = {name: value.detach().clone() for name, value in trainer.model.parameters.items()}
    outcome.parts = parts_of(trainer)
    trainer.close()
    return outcome


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """The ranks' outcomes as one; what several ranks know must be equal in every bit."""
    whole = Outcome(outcomes[0].steps, outcomes[0].evaluations)
    for outcome in outcomes:
        assert outcome.steps == whole.steps
        assert outcome.evaluations == whole.evaluations
        for name, value in outcome.parameters.items():
            assert torch.equal(whole.parameters.setdefault(name, value), value), f"two copies of {name} differ"
        for name, value in outcome.parts.items():
            assert name not in whole.parts
            whole.parts[name] = value
    return whole


def train_on(p: int, layers: Callable[[], Sequence[Any]], config: Config, batches: Any, **given: Any) -> Outcome:
    """``train`` on p ranks of this process."""
    return merged(run_ranks(p, lambda transport: train(layers, config, transport, batches, **given)))


def assert_same(one: Outcome, other: Outcome) -> None:
    """Equal in every bit, whatever the ranks were."""
    assert one.steps == other.steps
    assert one.evaluations == other.evaluations
    assert one.parts.keys() == other.parts.keys()
    for name, value in one.parts.items():
        assert torch.equal(value, other.parts[name]), name

"""The learning rate's course in exact figures."""

from __future__ import annotations

import little
import pytest
import torch
from torch import nn

from mpipipe.optim import learning_rate


def rates(schedule: str, steps: int = 10, warmup: int = 4, low: float = 0.1) -> list[float]:
    config = little.config(
        run__steps=steps,
        optimizer__lr=1.0,
        lr__schedule=schedule,
        lr__warmup_steps=warmup,
        **({} if schedule == "constant" else {"lr__min_lr": low}),
    )
    return [learning_rate(config, step) for step in range(steps + 2)]


def test_constant() -> None:
    assert rates("constant") == [0.25, 0.5, 0.75, 1.0] + [1.0] * 8
    assert rates("constant", warmup=0) == [1.0] * 12


def test_linear_falls_to_the_end_at_the_last_step() -> None:
    assert rates("linear") == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1, 0.1])
    assert rates("linear")[9] == 0.1


def test_cosine_falls_to_the_end_at_the_last_step() -> None:
    found = rates("cosine", steps=9)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[6] == pytest.approx(0.55)  # half way: the middle of 1 and 0.1
    assert found[5] == pytest.approx(0.1 + 0.45 * (1 + 2**-0.5))
    assert found[7] == pytest.approx(0.1 + 0.45 * (1 - 2**-0.5))
    assert found[8:] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 1), (2, 1), (2, 2), (3, 3)])
def test_runs_of_a_step_or_two(schedule: str, steps: int, warmup: int) -> None:
    for rate in rates(schedule, steps, warmup):
        assert 0.1 <= rate <= 1.0
    assert rates(schedule, steps, warmup)[0] == (1.0 / warmup if warmup else 1.0)


def test_the_rate_that_is_reported_is_the_one_that_is_used() -> None:
    """Read from the size of the update, weight_decay 0 and one weight whose gradient never changes sign."""
    from mpipipe.trainer import Trainer
    from mpipipe.transport import solo

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.sum(), len(target)

    config = little.config(
        run__steps=8, lr__schedule="cosine", lr__warmup_steps=3, optimizer__weight_decay=0.0, optimizer__clip_norm=0.0
    )
    trainer = Trainer(config, [Slope], loss, transport=solo())
    ones = (torch.ones(4, 1), torch.ones(4, 1))
    last = 0.0
    for step in range(8):
        report = trainer.step_report(ones)
        value = float(trainer.model.parameters["0.weight"].detach())
        assert report.lr == learning_rate(trainer.config, step)
        assert last - value == pytest.approx(report.lr, rel=1e-4, abs=1e-9)
        last = value

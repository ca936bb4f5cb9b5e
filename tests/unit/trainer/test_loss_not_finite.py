"""A loss that is not finite, though every gradient is: all ranks skip the step alike."""

from __future__ import annotations

import math

import little
import pytest
import torch

from mpipipe.trainer import StepReport, Trainer
from mpipipe.transport import Transport, run_ranks

LAYERS = [little.linear() for _ in range(4)]
SPOILT = little.batch(1)
SPOILT[1][2, 3] = 99.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_whose_loss_is_not_finite_is_skipped_by_all(bad: float) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        spoilt = bool((target > 90).any())
        total, count = little.square_loss(output, torch.where(target > 90, 0.0, target))
        return total + (bad if spoilt else 0.0), count

    def work(
        transport: Transport, schedule: str
    ) -> tuple[list[StepReport], list[bool], list[int], dict[str, torch.Tensor]]:
        trainer = Trainer(little.config(schedule=schedule), LAYERS, loss, transport=transport)
        reports, same, updates = [], [], []
        for data in (little.batch(0), SPOILT, little.batch(2)):
            before = {name: value.detach().clone() for name, value in trainer.model.parameters.items()}
            reports.append(trainer.step_report(data))
            same.append(all(torch.equal(value, before[name]) for name, value in trainer.model.parameters.items()))
            updates.append(trainer.optimizer.steps_done)
        return reports, same, updates, little.parts_of(trainer)

    alone: dict[str, torch.Tensor] = {}
    for p, schedule in ((1, "1f1b"), (2, "1f1b"), (4, "zb-h1")):
        parts: dict[str, torch.Tensor] = {}
        for reports, same, updates, held in run_ranks(p, lambda t, s=schedule: work(t, s)):
            assert [report.skipped for report in reports] == [None, "the loss is not finite", None]
            assert (same, updates) == ([False, True, False], [1, 1, 2])
            assert math.isfinite(reports[1].grad_norm)
            assert not math.isfinite(reports[1].loss)
            assert (reports[1].as_metrics()["loss"], reports[1].as_metrics()["skipped"]) == (
                None,
                "the loss is not finite",
            )
            parts |= held
        alone = alone or parts
        assert alone.keys() == parts.keys()
        assert all(torch.equal(value, alone[name]) for name, value in parts.items())


def test_a_gradient_that_is_not_finite_either_is_named() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - target).square().sum() * math.inf, len(target)

    def work(transport: Transport) -> str | None:
        return Trainer(little.config(), LAYERS, loss, transport=transport).step_report(little.batch(0)).skipped

    assert set(run_ranks(2, work)) == {"the gradient of 0.weight is not finite"}

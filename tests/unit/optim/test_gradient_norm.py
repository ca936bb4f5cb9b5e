"""The norm by blocks, the factor, and what is done with them over all ranks."""

from __future__ import annotations

import math
from typing import Any

import little
import numpy as np
import pytest
import torch
from torch import nn

from mpipipe.optim import BLOCK_ELEMENTS, clip_factor, square_sums
from mpipipe.trainer import Trainer
from mpipipe.transport import Transport, run_ranks, solo


def square_sum(gradient: torch.Tensor, blocks_at_once: int = 1) -> float:
    return square_sums({"weight": gradient}, blocks_at_once=blocks_at_once)["weight"]


def test_blocks_are_added_in_order_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3 * BLOCK_ELEMENTS + 17, generator=generator)
    total = 0.0
    for start in range(0, len(gradient), BLOCK_ELEMENTS):
        block = gradient[start : start + BLOCK_ELEMENTS]
        total += float(torch.linalg.vector_norm(block, dtype=torch.float64) ** 2)
    assert square_sum(gradient) == total
    assert square_sum(gradient) == pytest.approx(float(np.square(gradient.numpy().astype(np.float64)).sum()), rel=1e-13)
    assert square_sum(gradient.view(5, -1)) == total


def test_parts_of_whole_blocks_add_up_to_the_same_bits() -> None:
    """A shard's edges lie on block edges: added in order, the parts give the whole."""
    gradient = torch.randn(4 * BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(1))
    by_block = [square_sum(part) for part in gradient.split(BLOCK_ELEMENTS)]
    total = 0.0
    for value in by_block:
        total += value
    assert square_sum(gradient) == total


@pytest.mark.parametrize("value, expected", [(0.0, 0.0), (3e38, 9e76 * 2), (1e-40, 2e-80)])
def test_no_square_overflows_or_vanishes(value: float, expected: float) -> None:
    assert square_sum(torch.full((2,), value)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    gradient = torch.zeros(2 * BLOCK_ELEMENTS)
    gradient[-1] = bad
    assert not math.isfinite(square_sum(gradient))


@pytest.mark.parametrize("blocks_at_once", [1, 2, 3, 1 << 14])
@pytest.mark.parametrize(
    "elements", [1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS, 5 * BLOCK_ELEMENTS + 17]
)
def test_blocks_together_have_the_sums_of_blocks_one_by_one(elements: int, blocks_at_once: int) -> None:
    gradients = {
        "first": torch.randn(elements, generator=torch.Generator().manual_seed(elements)),
        "empty": torch.zeros(0),
        "last": torch.full((4,), 2.0),
    }
    wanted = {name: gradient.mul(0.25) for name, gradient in gradients.items()}
    sums = square_sums(gradients, 0.25, blocks_at_once=blocks_at_once)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())
    assert list(sums) == ["first", "empty", "last"]
    assert sums == {name: square_sum(gradient) for name, gradient in wanted.items()}
    assert (sums["empty"], sums["last"]) == (0.0, 1.0)


def test_empty_and_scalar_gradients() -> None:
    assert square_sum(torch.zeros(0)) == 0.0
    assert square_sum(torch.tensor(-3.0)) == 9.0


@pytest.mark.parametrize(
    "norm, limit, factor",
    [(2.0, 0.0, None), (2.0, 4.0, None), (4.0, 2.0, 2.0 / 4.000001), (0.0, 1.0, None), (1.0, 1.0, 1.0 / 1.000001)],
)
def test_the_factor_is_torch_s(norm: float, limit: float, factor: float | None) -> None:
    assert clip_factor(norm, limit) == factor
    if limit:
        leaf = torch.zeros(1, requires_grad=True)
        leaf.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([leaf], limit)
        assert float(leaf.grad) == pytest.approx(norm * (factor or 1.0), rel=1e-6)


class Spoiled(torch.autograd.Function):
    """Zeros; the weight's gradient is infinite where asked for."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full((little.WIDTH,), math.inf if ctx.bad else 0.5), None


class Poison(nn.Module):
    """Its weight's gradient is not finite for a batch that holds the number 99."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(little.WIDTH))
        self.fine = nn.Parameter(torch.ones(little.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fine + Spoiled.apply(self.weight, bool((x > 90).any()))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(place: int) -> None:
    def layers() -> list[object]:
        made: list[object] = [nn.Identity, nn.Identity, nn.Identity]
        made[place] = Poison
        return [*made, little.linear()]

    poisoned = little.batch(1)
    poisoned[0][2, 3] = 99.0

    def work(transport: Transport) -> list[tuple[int, str | None, bool, float, float]]:
        trainer = Trainer(little.config(pipeline__partition="even"), layers(), little.square_loss, transport=transport)
        seen = []
        for data in (little.batch(0), poisoned, little.batch(2)):
            before = {name: value.detach().clone() for name, value in trainer.model.parameters.items()}
            moments = {name: trainer.optimizer.moments(name)[0].clone() for name in before}
            report = trainer.step_report(data)
            same = all(torch.equal(value, before[name]) for name, value in trainer.model.parameters.items()) and all(
                torch.equal(trainer.optimizer.moments(name)[0], moments[name]) for name in moments
            )
            seen.append((report.step, report.skipped, same, report.grad_norm, trainer.optimizer.steps_done))
        return seen

    for p in (1, 4):
        ranks = run_ranks(p, work)
        for seen in ranks:
            assert [(step, why, done) for step, why, _, _, done in seen] == [
                (1, None, 1),
                (2, f"the gradient of {place}.weight is not finite", 1),
                (3, None, 2),
            ]
            assert seen[1][2], "weights and moments unchanged"
            assert not math.isfinite(seen[1][3])
            assert math.isfinite(seen[2][3])
        assert any(not seen[2][2] for seen in ranks), "the next step works"


def test_a_batch_without_a_valid_label_is_skipped_by_all() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        valid = target[:, 0] < 50
        return (output - target)[valid].square().sum(), valid.sum()

    empty = little.batch(0)[0], torch.full((4, little.WIDTH), 77.0)

    def work(transport: Transport) -> list[object]:
        trainer = Trainer(little.config(), [little.linear(), little.linear()], loss, transport=transport)
        reports = [trainer.step_report(data) for data in (empty, little.batch(1))]
        assert math.isnan(trainer.step(empty))
        assert math.isnan(trainer.evaluate([empty]))
        return [(r.loss, r.tokens, r.skipped, r.as_metrics().get("skipped")) for r in reports]

    for seen in run_ranks(2, work):
        why = "no label of the batch is valid"
        assert seen[0] == (None, 0, why, why)
        assert seen[1][1:] == (4, None, None)


def test_unevenly_spread_labels_weigh_alike() -> None:
    """B02: 1, 3, 15 and 16 valid labels in four rows; one loss and one gradient whatever m and p."""
    target = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for row, valid in enumerate((1, 3, 15, 16)):
        target[row, valid:] = 1000.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        valid = target < 100
        return torch.where(valid, (output - target).square(), 0.0).sum(dtype=torch.float64), valid.sum()

    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    layers = [little.linear(16), nn.Tanh, little.linear(16)]
    found = {}
    for size in (1, 2, 3, 4):
        for p in (1, 2, 3):
            config = little.config(microbatch=size)
            outcome = little.train_on(
                p, lambda: layers, config, [(inputs, target)] * 2, loss_fn=loss, evaluate=lambda _: [(inputs, target)]
            )
            found[(size, p)] = outcome
    whole = found[(4, 1)]
    for outcome in found.values():
        assert outcome.steps == [
            (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6)) for loss, norm in whole.steps
        ]
        assert outcome.evaluations == pytest.approx(whole.evaluations, rel=1e-5)
    assert whole.evaluations[0] == pytest.approx(whole.steps[1][0], rel=1e-6)


@pytest.mark.parametrize("p, chunks", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_one_norm_clips_all_ranks_and_a_tied_weight_counts_once(p: int, chunks: int) -> None:
    """B04, against autograd and torch's clip_grad_norm_ on the whole model."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    config = little.config(schedule=schedule, chunks=chunks, optimizer__clip_norm=0.01)
    pair = [("0.weight", "3.weight")]
    layers = [little.linear(), nn.Tanh, little.linear(), little.linear()]
    data = little.batch(0)
    start = little.parts_of(Trainer(config.model_copy(), layers, little.square_loss, tied=pair, transport=solo()))
    found = little.train_on(p, lambda: layers, config, [data], tied=pair)

    weight, middle = (start[name].clone().requires_grad_() for name in ("0.weight", "2.weight"))
    biases = [start[f"{k}.bias"].clone().requires_grad_() for k in (0, 2, 3)]
    hidden = torch.tanh(nn.functional.linear(data[0], weight, biases[0]))
    output = nn.functional.linear(nn.functional.linear(hidden, middle, biases[1]), weight, biases[2])
    (little.square_loss(output, data[1])[0] / 4).backward()
    norm = torch.nn.utils.clip_grad_norm_([weight, middle, *biases], 0.01)
    assert found.steps[0][1] == pytest.approx(float(norm), rel=1e-6)
    optimizer = torch.optim.AdamW([weight, middle], lr=1e-2, betas=config.optimizer.betas, weight_decay=0.1)
    optimizer.step()
    torch.testing.assert_close(found.parts["0.weight"], weight.detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(found.parts["3.weight"], found.parts["0.weight"])

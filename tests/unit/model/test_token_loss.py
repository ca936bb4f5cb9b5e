"""Sum and count of token losses."""

from __future__ import annotations

import math

import pytest
import torch

from mpipipe.model import token_loss


def test_sum_and_count_by_hand() -> None:
    scores = torch.zeros(1, 3, 4, requires_grad=True)
    total, count = token_loss(scores, torch.tensor([[1, -100, 3]]))
    total.backward()
    assert (total.dtype, total.dim(), count, type(count)) == (torch.float64, 0, 2, int)
    assert total.item() == pytest.approx(2 * math.log(4), rel=1e-7)
    assert scores.grad is not None
    assert torch.equal(scores.grad[0, 1], torch.zeros(4))
    assert scores.grad[0, 0].tolist() == [0.25, -0.75, 0.25, 0.25]


def test_nothing_valid_gives_zero() -> None:
    scores = torch.randn(2, 3, 5, requires_grad=True)
    total, count = token_loss(scores, torch.full((2, 3), -100))
    total.backward()
    assert (total.item(), count) == (0.0, 0)
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(2, 3, 5))


def test_parts_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(7, 9, 11, generator=generator), torch.randint(0, 11, (7, 9), generator=generator)
    whole, count = token_loss(scores, targets)
    parts = [token_loss(scores[i : i + 3], targets[i : i + 3]) for i in (0, 3, 6)]
    assert sum(n for _, n in parts) == count == 63
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), rel=1e-14)


def test_low_precision_scores_are_taken_in_float32() -> None:
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(6).view(2, 3)
    assert torch.equal(token_loss(scores, targets)[0], token_loss(scores.float(), targets)[0])

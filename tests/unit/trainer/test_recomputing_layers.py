"""Layers whose saved tensors come back as other objects in the backward: by a checkpoint, by hooks of the user's."""

from __future__ import annotations

from typing import Any

import little
import pytest
import torch
from nested import W, apply, everywhere
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """Keeps its input alone and is computed again in its backward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(W, W), nn.Dropout(dropout), nn.Linear(W, W))

    def forward(self, v: Any) -> Any:
        x, side = v
        return checkpoint(self.inner, x, use_reentrant=False), side + 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_that_checkpoints_by_itself_gets_all_its_gradients(dropout: float) -> None:
    """With a split backward too, where the linear maps' weight gradients wait."""
    layers = [
        apply(lambda f, x: (f(x), torch.zeros((), dtype=torch.int64))),
        *[lambda: Recomputed(dropout)] * 3,
        apply(lambda f, v: f(v[0]) * v[1]),
    ]
    everywhere(layers)


def test_a_split_backward_under_hooks_on_saved_tensors_has_the_gradients_of_a_whole_one() -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return self.linear(x).tanh()

    everywhere([little.linear(), Saved, Saved, little.linear()])


def test_a_linear_map_with_a_forward_of_the_user_s_own_draws_alike_everywhere() -> None:
    """Put into the module before the trainer sees it; a split backward puts one there too."""

    def noisy() -> nn.Module:
        module = nn.Linear(W, W)
        plain = module.forward
        module.forward = lambda x: plain(nn.functional.dropout(x, 0.5, module.training))  # type: ignore[method-assign]
        return module

    everywhere([noisy for _ in range(4)])


class Counted(nn.Module):
    """Keeps its input alone between forward and backward, and counts how often it computes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(little.WIDTH), nn.Linear(little.WIDTH, little.WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def compute(x: torch.Tensor) -> torch.Tensor:
            Counted.calls += 1
            return self.inner(x)

        return checkpoint(compute, x, use_reentrant=False)


@pytest.mark.parametrize("schedule, p, chunks", [("1f1b", 1, 1), ("zb-h1", 1, 1), ("zb-h1", 2, 1), ("zb-v", 2, 2)])
def test_it_is_computed_again_once_also_where_the_backward_has_two_halves(schedule: str, p: int, chunks: int) -> None:
    Counted.calls = 0
    config = little.config(schedule=schedule, chunks=chunks)
    little.train_on(p, lambda: [Counted] * 4, config, [little.batch(0)])
    assert Counted.calls == 4 * 4 * 2  # layers, microbatches, forward and once more

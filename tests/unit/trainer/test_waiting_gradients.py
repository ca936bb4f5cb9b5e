"""Layers of users' own whose linear maps' weight gradients can wait in part, or not at all: the same bits with a split
backward as with a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import little
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from nested import W, everywhere
from torch import nn

from mpipipe.trainer import Trainer
from mpipipe.transport import solo

SPLIT = ((1, "zb-h1", 1), (2, "zb-h1", 1))


class Again(torch.autograd.Function):
    """A checkpoint as users write it; without the parameters, the gradient of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, map: nn.Linear, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.map, ctx.parameters = map, parameters
        return map(x).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.map(x).tanh()
        of_x, *others = torch.autograd.grad(y, (x, *ctx.parameters), gradient)
        return of_x, None, *others


class OneMap(nn.Module):
    def __init__(self, function: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.map = nn.Linear(W, W)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.map, x)


def gradient_in_a_hook(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = map(x)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(map(z).tanh(), z, gradient)[0]

    if y.requires_grad:
        y.register_hook(hook)
    return y


def three_uses(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return map(F.linear(map(x).tanh(), map.weight, map.bias).tanh())


def gradient_in_the_forward(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = map(map(map(x).tanh()).tanh()).tanh().square().sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


def hook_on_a_node(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = map(x)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda found, _: tuple(None if one is None else one * 1.5 for one in found))
    return y


def late_hook(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = map(x)
    if not map.weight._backward_hooks:
        map.weight.register_hook(lambda gradient: gradient * 2)
    return y


def rows_mixed(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """An input that is not contiguous, and an output's gradient that is one row for all."""
    wide = torch.stack([x, x.tanh(), x * x], 1)
    return map(wide.transpose(0, 1)).sum(0) + map(wide).mean(1) + map(x.t().contiguous().t())


def forward_mode(map: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(map(forward_ad.make_dual(x, torch.ones_like(x))).tanh())
    return value + tangent


CASES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "input's gradient in a function": lambda map, x: map(x) + Again.apply(x, map),
    "checkpoint": lambda map, x: Again.apply(x, map, map.weight, map.bias),
    "gradient in a hook": gradient_in_a_hook,
    "three uses": three_uses,
    "gradient in the forward": gradient_in_the_forward,
    "hook on a node": hook_on_a_node,
    "late hook": late_hook,
    "layouts": rows_mixed,
    "forward mode": forward_mode,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first dual tensor
@pytest.mark.parametrize("case", CASES)
def test_a_layer_has_the_same_bits_with_a_split_backward(case: str) -> None:
    layer = lambda: OneMap(CASES[case])  # noqa: E731
    everywhere([little.linear(), layer, layer, little.linear()], cuts=SPLIT)


def test_a_buffer_that_every_forward_changes_may_go_into_a_linear_map() -> None:
    """Changed in place by the next forward, before the weight half; the last layer's forwards and backwards take
    turns."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(W, W)
            self.register_buffer("mean", torch.zeros(1, W))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0, keepdim=True))
            return x + self.map(self.mean)

    batches = [little.batch(step, 5) for step in range(2)]
    layers = [little.linear(), little.linear(), little.linear(), Average]
    outcomes = [
        little.train_on(
            2, lambda: layers, little.config(schedule=schedule, sequences=5, microbatch=2), batches,
            loss_fn=little.square_loss,
        )
        for schedule in ("1f1b", "zb-h1")
    ]  # fmt: skip
    little.assert_same(*outcomes)


def test_modules_of_a_second_trainer_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    import mpipipe.stage.layer as room

    plain = room.weight_gradients
    monkeypatch.setattr(room, "weight_gradients", lambda uses: (counts.append(len(uses)), plain(uses))[1])
    torch.manual_seed(0)
    modules = [nn.Linear(W, W) for _ in range(3)]
    seen = []
    for _ in range(2):
        with Trainer(little.config(schedule="zb-h1"), modules, little.square_loss, transport=solo()) as trainer:
            trainer.step(little.batch(0))
        seen.append(sum(counts))
        counts.clear()
    assert seen[0] == seen[1] > 0

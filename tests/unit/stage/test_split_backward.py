"""A backward in two halves has the bits of a whole one, for any layer, in any order of the second halves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import little
import pytest
import torch
from torch import nn

from mpipipe.device import HostDevice
from mpipipe.model import Draw
from mpipipe.stage import Activation, MicrobatchKey, Stage, StageLayer

WIDTH = 16


class UsedTwice(nn.Module):
    """One weight in two places, and a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight) @ self.weight.T


class Sometimes(nn.Module):
    """Uses its weight for some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x[0, 0] > 0 else x * 2


class Hooked(nn.Module):
    """A hook on the weight and one on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        output.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        return output


class Constant(nn.Module):
    """Its output does not depend on anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x.detach())


class HandsOn(torch.autograd.Function):
    """The gradient of its input is the saved input itself."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return x


class GivesItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HandsOn.apply(x)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


CHAINS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)],
    "norm": lambda: [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)],
    "used twice": lambda: [UsedTwice(), nn.Tanh(), UsedTwice()],
    "sometimes": lambda: [nn.Linear(WIDTH, WIDTH), Sometimes()],
    "hooks": lambda: [Hooked(), nn.Tanh(), Hooked()],
    "frozen": lambda: [nn.Linear(WIDTH, WIDTH), frozen(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)],
    "frozen part": lambda: [nn.Sequential(nn.Linear(WIDTH, WIDTH), frozen(nn.LayerNorm(WIDTH)))],
    "no parameters": lambda: [nn.Tanh(), nn.Softmax(dim=1)],
    "identity": lambda: [nn.Identity(), nn.Identity()],
    "gradient is the input": lambda: [GivesItsInput()],
    "constant": lambda: [nn.Linear(WIDTH, WIDTH), Constant(), nn.Linear(WIDTH, WIDTH)],
    "attention": lambda: [
        nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True),
        nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True),
    ],
    "convolution": lambda: [
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Flatten(),
        nn.Linear(4 * WIDTH, WIDTH),
    ],
}  # fmt: skip


def stage_of(name: str, *, last: bool) -> Stage:
    torch.manual_seed(5)
    layers = [StageLayer(module, index, f"layer{index}") for index, module in enumerate(CHAINS[name]())]
    return Stage(0, layers, HostDevice(), little.square_loss if last else None)


def run(
    name: str, order: list[str], *, last: bool, first: bool, deferred: bool = False
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Three microbatches through one stage; ``order`` says what is done after the forwards, as ``B0`` or ``I2``."""
    stage = stage_of(name, last=last)
    stage.split(deferred)
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]
    others = [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]
    for k, value in enumerate(inputs):
        key = MicrobatchKey(k, Draw(1, 0, (4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3)))
        output = stage.forward(value if first else Activation((value,), (True,)), key)
        if last:
            stage.loss(k, output, others[k], keep=True)
    found: list[torch.Tensor | None] = [None] * 3
    for text in order:
        k = int(text[1])
        gradient = None if last else [others[k]]
        if text[0] == "B":
            found[k] = next(iter(stage.backward(k, gradient)), None)
        elif text[0] == "I":
            found[k] = next(iter(stage.backward_input(k, gradient)), None)
        else:
            stage.backward_weight(k)
    assert not any(gradient.total.requires_grad for layer in stage.layers for gradient in layer.gradients)
    assert stage.live == 0
    return found, [gradient.finish().clone() for layer in stage.layers for gradient in layer.gradients]


@pytest.mark.parametrize("first", [True, False], ids=["first stage", "later stage"])
@pytest.mark.parametrize("last", [True, False], ids=["last stage", "before it"])
@pytest.mark.parametrize("name", CHAINS)
def test_two_halves_have_the_bits_of_one_backward(name: str, last: bool, first: bool) -> None:
    whole, totals = run(name, ["B0", "B1", "B2"], last=last, first=first)
    orders = ("I0 W0 I1 W1 I2 W2", "I0 I1 I2 W0 W1 W2", "I2 I1 W1 I0 W0 W2", "B0 I1 B2 W1", "B0 B1 B2")
    for order, deferred in itertools.product(orders, (True, False)):
        halves, split = run(name, order.split(), last=last, first=first, deferred=deferred)
        for one, other in zip(whole, halves, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
        weights = [int(text[1]) for text in order.split() if text[0] in "BW"]
        if weights == sorted(weights):
            assert all(torch.equal(one, other) for one, other in zip(totals, split, strict=True))
        for one, other in zip(totals, split, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if name not in ("no parameters", "identity", "gradient is the input", "constant"):
        assert any(bool(total.any()) for total in totals)


def test_the_input_half_makes_no_weight_gradient() -> None:
    stage = stage_of("linear", last=False)
    stage.forward(Activation((torch.randn(4, WIDTH),), (True,)), MicrobatchKey(0, None))
    stage.backward_input(0, [torch.randn(4, WIDTH)])
    assert stage.live == 1
    assert not any(bool(gradient.finish().any()) for layer in stage.layers for gradient in layer.gradients)
    stage.backward_weight(0)
    assert stage.live == 0


def test_an_error_in_a_half_names_it() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("too cold")

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Breaks.apply(x)

    stage = Stage(0, [StageLayer(nn.Linear(4, 4), 0, "0"), StageLayer(Broken(), 1, "1")], HostDevice(), None)
    stage.forward(Activation((torch.ones(2, 4),), (True,)), MicrobatchKey(3, None))
    with pytest.raises(ArithmeticError) as caught:
        stage.backward_input(3, [torch.ones(2, 4)])
    assert caught.value.__notes__ == ["mpipipe: in the input backward of layer 1 (Broken), microbatch 3"]

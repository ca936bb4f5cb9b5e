"""Layers that return more than one tensor: whatever they pass on, every cut and schedule has the bits of one rank."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import little
import pytest
import torch
from nested import ROWS, Both, W, apply, by_hand, data, everywhere, only, settings
from torch import nn

from mpipipe.errors import MessageMismatchError
from mpipipe.trainer import Trainer
from mpipipe.transport import solo

pytestmark = pytest.mark.slow

# --- structures ---


def _deep(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return {"a": [y, (x, Both(y.tanh(), {"b": [y * 2]}))], "c": (), "n": None, 3: "text"}


STRUCTURES: dict[str, list[Any]] = {
    "tuple": [
        apply(lambda f, x: (f(x), x.sin())),
        apply(lambda f, v: (f(v[0]), v[1])),
        apply(lambda f, v: (v[1], f(v[0]))),
        apply(lambda f, v: f(v[0]) * v[1]),
    ],
    "list": [
        apply(lambda f, x: [f(x)]),
        apply(lambda f, v: [f(v[0]), v[0]]),
        apply(lambda f, v: [*v, f(v[1])]),
        apply(lambda f, v: f(v[0] + v[1] * v[2])),
    ],
    "dict": [
        apply(lambda f, x: {"x": x, "y": f(x)}),
        apply(lambda f, v: {**v, "z": f(v["y"])}),
        apply(lambda f, v: {key: f(value) for key, value in v.items()}),
        apply(lambda f, v: f(v["x"] * v["y"] - v["z"])),
    ],
    "mapping": [
        apply(lambda f, x: OrderedDict(b=f(x), a=x)),
        apply(lambda f, v: OrderedDict(a=f(v["b"]), b=v["a"])),
        only(lambda v: v),
        apply(lambda f, v: f(v["a"]) + v["b"]),
    ],
    "named tuple": [
        apply(lambda f, x: Both(f(x), None)),
        apply(lambda f, v: v._replace(side=f(v.hidden))),
        apply(lambda f, v: Both(hidden=f(v.side), side=[v.hidden])),
        apply(lambda f, v: f(v.hidden) * v.side[0]),
    ],
    "deep": [
        apply(_deep),
        only(lambda v: v),
        apply(lambda f, v: {**v, "a": [f(v["a"][0]), v["a"][1]]}),
        apply(lambda f, v: f(v["a"][0]) + v["a"][1][0] * v["a"][1][1].hidden + v["a"][1][1].side["b"][0]),
    ],
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_crosses(name: str) -> None:
    layers = STRUCTURES[name]
    outcome = everywhere(layers)
    assert outcome.steps[0][0] == pytest.approx(by_hand(layers, data()[0]), rel=1e-5)


def test_gradients_through_nested_values_are_those_of_plain_autograd() -> None:
    for layers in STRUCTURES.values():
        trainer = Trainer(settings(optimizer__clip_norm=1e9), layers, little.square_loss, transport=solo())
        value, target = data()[0]
        for module in trainer.model.modules:
            value = module(value)
        total, count = little.square_loss(value, target)
        parameters = [p for module in trainer.model.modules for p in module.parameters()]
        found = torch.autograd.grad(total / count, parameters)
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in found))
        assert trainer.step_report(data()[0]).grad_norm == pytest.approx(norm, rel=1e-5)
        trainer.close()


def _side(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "keep": torch.rand(rows, W, generator=generator) > 0.3,
        "ids": torch.randint(-(2**40), 2**40, (rows, 3), generator=generator),
        "bytes": torch.randint(0, 256, (rows, 7), generator=generator, dtype=torch.uint8),
        "weight": torch.rand(rows, 1, generator=generator),
    }


def test_side_tensors_arrive_unchanged_each_microbatch_its_own() -> None:
    """Integers, booleans, bytes and a float mask that takes no gradient, looked at by the last layer alone."""

    class Look(nn.Module):
        def forward(self, v: dict[str, Any]) -> Any:
            side = v["side"]
            assert all(not one.requires_grad for one in side.values())
            row = v["row"].tolist()
            for key, value in _side(ROWS, 9).items():
                assert side[key].dtype == value.dtype
                assert torch.equal(side[key], value[row]), key
            return torch.where(side["keep"], v["h"], 0.0) * side["weight"]

    def batches() -> list[Any]:
        inputs = {"h": little.batch(0, ROWS)[0], "side": _side(ROWS, 9), "row": torch.arange(ROWS)}
        return [(inputs, target) for _, target in data()]

    pass_on = apply(lambda f, v: {**v, "h": f(v["h"])})
    everywhere([pass_on, pass_on, only(lambda v: v), pass_on, Look], batches())


def test_an_early_value_reaches_the_last_layer() -> None:
    skip = apply(lambda f, v: (f(v[0]), v[1]))
    layers = [apply(lambda f, x: (f(x), x.cos())), skip, skip, skip, apply(lambda f, v: f(v[0]) * v[1])]
    outcome = everywhere(layers)
    assert outcome.steps[0][0] == pytest.approx(by_hand(layers, data()[0]), rel=1e-5)
    early = [apply(lambda f, x: (f(x), f(x).tanh())), *layers[1:]]
    assert everywhere(early).steps[0][0] == pytest.approx(by_hand(early, data()[0]), rel=1e-5)


def test_one_tensor_twice_views_of_each_other_and_of_the_input() -> None:
    layers = [
        apply(lambda f, x: (lambda y: (y, y, y.view(-1), y.t()))(f(x))),
        only(lambda v: (v[0], v[1] * 2, v[0], v[3].t(), v[2].view_as(v[0]))),
        only(lambda v: v),
        apply(lambda f, v: [f(v[0]).expand(2, -1, -1), v[1][:, ::2], v[2], v[3].flip(1), v[4][:, :1].expand(-1, W)]),
        apply(lambda f, v: f(v[0].sum(0)) + v[1].sum(1, keepdim=True) * v[2] - v[3] * v[4]),
    ]
    assert everywhere(layers).steps[0][0] == pytest.approx(by_hand(layers, data()[0]), rel=1e-5)
    twice = only(lambda v: (v[0], v[0], v[0].detach(), v[0][1:].detach()))
    everywhere([layers[0], twice, layers[2], apply(lambda f, v: f(v[0] * v[1]) + v[2])])


@pytest.mark.parametrize(
    "passing", [lambda v: v, lambda v: (v[1], v[0]), lambda v: (v[0].view_as(v[0]), v[1].detach())]
)
def test_stages_that_hand_on_what_they_got(passing: Callable[[Any], Any]) -> None:
    layers = [apply(lambda f, x: (f(x), x)), *[only(passing)] * 4, apply(lambda f, v: f(v[0]) + v[1])]
    everywhere(layers)


def test_a_single_value_and_none_at_all() -> None:
    layers = [
        apply(
            lambda f, x: (f(x), f(x).sum(), x.new_zeros(0), x.new_zeros(3, 0, 2), torch.zeros((), dtype=torch.int64))
        ),
        only(lambda v: v),
        apply(lambda f, v: (f(v[0]) * v[1], v[1] + v[2].sum(), v[2], v[3], v[4] + 1)),
        apply(lambda f, v: f(v[0]) + v[1] + v[3].sum() + v[4]),
    ]
    everywhere(layers)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128], ids=str
)
def test_types_of_what_crosses(dtype: torch.dtype) -> None:
    def back(x: torch.Tensor) -> torch.Tensor:
        return (x.real if x.is_complex() else x).float()

    layers = [
        apply(lambda f, x: f(x).to(dtype)),
        only(lambda x: (x.conj() if x.is_complex() else x, x.detach()[:, :3])),
        apply(lambda f, v: (f(back(v[0])).to(dtype) * v[0], v[1])),
        apply(lambda f, v: f(back(v[0])) + back(v[1]).sum(1, keepdim=True)),
    ]
    everywhere(layers)


def test_one_channel_last_in_memory_is_the_same_on_every_cut() -> None:
    """Contiguous by torch's word, strided as channels last: a convolution then takes another path, with other bits."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean(1).flatten(1)

    generator = torch.Generator().manual_seed(2)
    images = torch.randn(ROWS, 8, 8, 1, generator=generator)
    layers = [
        lambda: nn.Linear(1, 1),
        only(lambda x: x.permute(0, 3, 1, 2)),
        Conv,
        lambda: nn.Linear(64, 64),
        lambda: nn.Linear(64, 64),
    ]
    everywhere(layers, [(images, torch.randn(ROWS, 64, generator=generator))] * 2)


# --- what takes no gradient ---


def _frozen(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: layer().requires_grad_(False)


@pytest.mark.parametrize("frozen", [{0}, {0, 1, 2}, {2}, {1, 3}, {4}, {3, 4}, {0, 2, 4}], ids=str)
def test_frozen_layers_among_nested_ones(frozen: set[int]) -> None:
    pass_on = apply(lambda f, v: {**v, "h": f(v["h"])})
    layers = [
        apply(lambda f, x: {"h": f(x), "x": x, "mask": x > 0}),
        pass_on,
        apply(lambda f, v: {"h": f(v["h"]), "x": v["x"] * v["h"], "mask": v["mask"]}),
        pass_on,
        apply(lambda f, v: f(v["h"]) * v["mask"] + v["x"]),
    ]
    everywhere([_frozen(layer) if k in frozen else layer for k, layer in enumerate(layers)])


@pytest.mark.parametrize("where", range(1, 4))
def test_a_layer_in_the_middle_that_lets_no_gradient_through(where: int) -> None:
    layers: list[Any] = [little.linear() for _ in range(5)]
    layers.insert(where, only(torch.Tensor.detach))
    outcome = everywhere(layers, optimizer__weight_decay=0.0)
    before = little.train_on(1, lambda: layers, settings(), [])
    trained = [name for name, value in outcome.parts.items() if not torch.equal(value, before.parts[name])]
    assert {int(name.split(".")[0]) for name in trained} == set(range(where + 1, 6))


def test_part_of_a_value_takes_a_gradient_and_part_does_not() -> None:
    layers = [
        apply(lambda f, x: (f(x), f(x).detach())),
        apply(lambda f, v: (v[0].detach(), f(v[1]))),
        apply(lambda f, v: (f(v[0]), v[1], v[0])),
        apply(lambda f, v: (v[2], f(v[1]) * v[0])),
        apply(lambda f, v: f(v[1]) + v[0]),
    ]
    everywhere(layers)


def detaches(numbers: set[int]) -> Callable[[], nn.Module]:
    """Detaches in the forwards of these numbers, counted in training."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if not self.training:
                return y
            self.calls += 1
            return y.detach() if self.calls - 1 in numbers else y

    return Sometimes


@pytest.mark.parametrize("numbers", [{1}, {3}, {4}, {5}, {3, 4, 5}, {1, 4}], ids=str)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_detaching_for_some_microbatches_only(numbers: set[int], where: int) -> None:
    """The first one of a step takes a gradient in the first step: which of the others do is known to the sender."""
    layers: list[Any] = [little.linear() for _ in range(4)]
    layers.insert(where, detaches(numbers))
    everywhere(layers)


@pytest.mark.parametrize("numbers", [{0}, {2}], ids=str)
def test_a_gradient_that_was_not_agreed_is_refused(numbers: set[int]) -> None:
    """A later microbatch of the same shape takes a gradient, and the first one took none: in this step or the next."""
    layers = [little.linear(), detaches(numbers), little.linear(), little.linear()]
    with pytest.raises(MessageMismatchError, match="takes a gradient, and had one that does not"):
        little.train_on(4, lambda: layers, settings(), data())


# --- the first layer and the loss ---


def _nested_loss(output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    keep = output["keep"]
    total = ((output["h"] - target["y"]).square() * keep).double().sum() + output["more"][0].square().sum()
    return total + output["scale"] * target["z"].square().sum(), keep.sum()


def _nested_batches() -> list[Any]:
    return [
        (
            {"x": x, "pair": (x[:, :2], [y.t().contiguous().t()]), "keep": y > 0, "name": "words", "none": None},
            {"y": y, "z": x[:, 0]},
        )
        for x, y in data()
    ]


def test_nested_inputs_and_a_nested_output() -> None:
    layers = [
        apply(
            lambda f, v: {"h": f(v["x"]) + v["pair"][1][0], "keep": v["keep"], "more": v["pair"][:1], "n": v["name"]}
        ),
        apply(lambda f, v: {**v, "h": f(v["h"])}),
        apply(lambda f, v: {**v, "h": f(v["h"]), "more": (v["more"][0] * v["h"][:, :2],)}),
        apply(lambda f, v: {"h": f(v["h"]), "keep": v["keep"], "more": v["more"], "scale": 0.5}),
    ]
    everywhere(layers, _nested_batches(), loss_fn=_nested_loss)


def test_a_loss_that_looks_at_a_part_of_the_output() -> None:
    layers = [
        apply(lambda f, x: (f(x), x)),
        apply(lambda f, v: (f(v[0]), v[1])),
        apply(lambda f, v: (f(v[0]), v[1])),
        apply(lambda f, v: (v[1] > 0, f(v[0]), f(v[1]))),
    ]
    everywhere(layers, loss_fn=lambda output, target: little.square_loss(output[1], target))


@pytest.mark.parametrize("p", [1, 2])
def test_a_batch_that_is_changed_in_place_stays_as_it_was(p: int) -> None:
    """By the first layer and by the loss function: each has its own copy."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)

        def forward(self, v: dict[str, torch.Tensor]) -> torch.Tensor:
            v["x"].mul_(2)
            v["n"].add_(1)
            return self.linear(v["x"]) * v["n"]

    def loss(output: torch.Tensor, target: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        target["y"].neg_()
        return little.square_loss(output, target["y"])

    def clean(output: torch.Tensor, target: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return little.square_loss(output, -target["y"])

    x, y = little.batch(0, 4)
    batch = ({"x": x.clone(), "n": torch.ones(4, 1, dtype=torch.int64)}, {"y": y.clone()})
    layers = [First, little.linear()]
    found = little.train_on(p, lambda: layers, settings(), [batch] * 3, loss_fn=loss, evaluate=lambda _: [batch])
    assert torch.equal(batch[0]["x"], x)
    assert torch.equal(batch[1]["y"], y)
    assert batch[0]["n"].tolist() == [[1]] * 4
    other = [apply(lambda f, v: f(v["x"] * 2) * (v["n"] + 1)), little.linear()]
    alone = little.train_on(1, lambda: other, settings(), [batch] * 3, loss_fn=clean, evaluate=lambda _: [batch])
    little.assert_same(found, alone)


class Noisy(nn.Module):
    """Changes its input in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x += 1
        return self.linear(x)


def test_an_evaluation_first_says_nothing_of_what_training_changes() -> None:
    batch = little.batch(0, 4)
    kept = batch[0].clone()
    with Trainer(settings(), [Noisy, little.linear()], little.square_loss, transport=solo()) as trainer:
        trainer.evaluate([batch])
        first = trainer.step(batch)
        trainer.evaluate([batch])
    with Trainer(settings(), [Noisy, little.linear()], little.square_loss, transport=solo()) as trainer:
        assert trainer.step(batch) == first
    assert torch.equal(batch[0], kept)

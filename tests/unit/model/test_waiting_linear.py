"""The linear map whose weight gradient can wait: torch's bits, now or later, and an ordinary map for everyone else."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn

from mpipipe.errors import EngineError
from mpipipe.model import Head, Use, WeightSink, defer_linear, linear, weight_gradients

SHAPES = [(4, 16), (2, 5, 16), (3, 2, 4, 16), (1, 7, 64), (16, 128, 96)]


def names(y: torch.Tensor) -> str:
    """The classes of the last nodes of the graph."""
    after = [] if y.grad_fn is None else [type(node).__name__ for node, _ in y.grad_fn.next_functions]
    return " ".join([type(y.grad_fn).__name__, *after])


def active() -> WeightSink:
    sink = WeightSink()
    sink.active = True
    return sink


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_torch(shape: tuple[int, ...]) -> None:
    for out, bias, strided in itertools.product((1, 3, 16, 300), (True, False), (True, False)):
        torch.manual_seed(1)
        module = nn.Linear(shape[-1], out, bias=bias)
        x = torch.randn(*shape)
        if strided:
            x = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]] if x.dim() == 2 else x
        x.requires_grad_(True)
        gradient = torch.randn(out).expand(*x.shape[:-1], out) if strided else torch.randn(*x.shape[:-1], out)
        wanted = [x, *module.parameters()]
        y = F.linear(x, module.weight, module.bias)
        expected = torch.autograd.grad(y, wanted, gradient)
        sink = active()
        other = linear(x, module.weight, module.bias, sink)
        assert torch.equal(y, other)
        sink.collect([other])
        found = torch.autograd.grad(other, wanted, gradient, allow_unused=True)
        assert all(value is None for value in found[1:])
        with torch.no_grad():
            late = weight_gradients(sink.take())
        for one, value in zip(expected, [found[0], *(late[id(p)] for p in module.parameters())], strict=True):
            assert torch.equal(one, value)
        whole = torch.autograd.grad(linear(x, module.weight, module.bias, sink), wanted, gradient)
        assert all(torch.equal(one, value) for one, value in zip(expected, whole, strict=True))


def test_a_module_s_own_linear_maps_are_found_and_no_others() -> None:
    class Own(nn.Linear):
        pass

    sink = WeightSink()
    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Bilinear(4, 4, 4), nn.Sequential(nn.Linear(4, 4)))
    before = list(module.state_dict())
    defer_linear(module, sink)
    defer_linear(module, WeightSink())  # a second time changes nothing
    assert "forward" in vars(module[0])
    assert "forward" in vars(module[3][0])
    assert "forward" not in vars(module[1])
    assert list(module.state_dict()) == before
    head = Head("head", 11, 4, 1e-5)
    defer_linear(head, sink)
    assert head.weight_sink is sink


def test_uses_of_one_weight_are_summed() -> None:
    sink = active()
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    y = linear(torch.tanh(linear(x, weight, None, sink)), weight, None, sink)
    expected = torch.autograd.grad(y, weight, torch.ones(3, 4), retain_graph=True)[0]
    sink.collect([y])
    torch.autograd.grad(y, [x, weight], torch.ones(3, 4), allow_unused=True)
    uses = sink.take()
    assert len(uses) == 2
    assert sink.take() == []
    assert torch.equal(weight_gradients(uses)[id(weight)], expected)


def test_a_gradient_inside_a_forward_is_an_ordinary_one() -> None:
    """Energy models take gradients in their forward, of the second order in the backward: the same bits, as the graph
    is that of torch's own map.
    """

    def penalty(sink: WeightSink | None, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        weight, bias = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))
        x = torch.randn(*shape, requires_grad=True)
        energy = x
        for _ in range(3):
            energy = torch.tanh(linear(energy, weight, bias, sink))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (force, *torch.autograd.grad(force.pow(2).sum(), [x, weight, bias]))

    for shape in ((3, 5), (4, 3, 5)):
        for one, other in zip(penalty(None, shape), penalty(active(), shape), strict=True):
            assert torch.equal(one, other)


WAY_OUT = [
    "hook", "frozen", "not a leaf", "vector", "no grad", "another type", "columns", "strided", "input without gradient",
    "weight by columns", "nothing out", "forward mode",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first dual tensor
@pytest.mark.parametrize("case", WAY_OUT)
def test_what_can_not_wait_is_left_to_torch(case: str) -> None:
    sink = active()
    weight: torch.Tensor = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    if case == "hook":
        weight.register_hook(lambda gradient: gradient * 2)
    elif case == "frozen":
        weight.requires_grad_(False)
    elif case == "not a leaf":
        weight = weight * 2
    elif case == "vector":
        x = torch.randn(4, requires_grad=True)
    elif case == "another type":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "_Linear" not in names(linear(x, weight, None, sink))
        return
    elif case == "columns":
        x = torch.randn(4, 3, requires_grad=True).t()
    elif case == "strided":
        x = torch.randn(3, 2, 4, requires_grad=True).transpose(0, 1)
    elif case == "input without gradient":
        x = torch.randn(3, 4)
    elif case == "weight by columns":
        weight = nn.Parameter(torch.randn(4, 4).t())
    elif case == "nothing out":
        weight = nn.Parameter(torch.randn(0, 4))
    elif case == "forward mode":
        with forward_ad.dual_level():
            dual = linear(forward_ad.make_dual(x, torch.ones_like(x)), weight, None, sink)
            assert torch.equal(forward_ad.unpack_dual(dual).tangent, F.linear(torch.ones_like(x), weight))
        return
    with torch.set_grad_enabled(case != "no grad"):
        y = linear(x, weight, None, sink)
    assert "_Linear" not in names(y)


def test_names_finds_a_map_that_can_wait() -> None:
    x, weight = torch.randn(2, 3, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    assert "_Linear" in names(linear(x, weight, None, active()))
    assert "_Linear" not in names(linear(x, weight, None, None))


def split(y: torch.Tensor, sink: WeightSink, wanted: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[Use]]:
    """(What autograd found, what waits.)"""
    sink.collect([y])
    found = torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    return list(found), sink.take()


def test_a_parameter_that_is_used_by_something_else_too_does_not_wait() -> None:
    """Autograd adds the uses in the order of its backward, and (a + b) + c is not a + (b + c)."""
    for bias_too in (True, False):
        sink = active()
        weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        x = torch.randn(3, 4, requires_grad=True)
        y = torch.tanh(linear(x, weight, bias, sink))
        y = torch.tanh(F.linear(y, weight * 2, bias if bias_too else None))
        (of_weight, of_bias), uses = split(linear(y, weight, bias, sink), sink, [weight, bias])
        assert of_weight is not None
        assert (of_bias is not None) is bias_too
        assert [use.weight for use in uses] == [] if bias_too else [None, None]


@pytest.mark.parametrize("dim", [2, 3])
def test_a_backward_inside_the_backward_gets_its_weight_gradients(dim: int) -> None:
    """Of a graph of its own, as a checkpoint makes one, and of this graph."""
    sink = active()
    weight, other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    x = torch.randn(*[3] * (dim - 1), 4, requires_grad=True)
    inside: list[torch.Tensor] = []
    first = linear(x, weight, None, sink)
    y = torch.tanh(first)

    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            again = linear(x.detach().requires_grad_(), weight, None, sink)
        inside.extend(torch.autograd.grad(again, weight, torch.ones_like(again)))
        inside.extend(torch.autograd.grad(first, weight, torch.ones_like(first), retain_graph=True))

    y.register_hook(hook)
    found, uses = split(linear(y, other, None, sink), sink, [x, weight, other])
    assert len(uses) == 2
    assert found[1:] == [None, None]
    expected = torch.autograd.grad(F.linear(x, weight), weight, torch.ones_like(first))[0]
    assert len(inside) == 2
    assert all(torch.equal(one, expected) for one in inside)


@pytest.mark.parametrize("changed", ["input", "gradient"])
def test_a_change_in_place_before_the_weight_half_is_told(changed: str) -> None:
    sink = active()
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    gradient = torch.ones(3, 4)
    y = linear(x, weight, None, sink)
    sink.collect([y])
    torch.autograd.grad(y, [x], gradient)
    uses = sink.take()
    with torch.no_grad():
        (x if changed == "input" else gradient).mul_(2)
        with pytest.raises(EngineError, match=r"input \(3, 4\) of a linear map.*x\.clone\(\).*pipeline\.schedule"):
            weight_gradients(uses)


def test_hooks_that_come_after_the_forward_are_given_the_gradients() -> None:
    sink = active()
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    x = torch.randn(3, 4, requires_grad=True)
    y = linear(x, weight, bias, sink)
    bias.register_hook(lambda gradient: gradient * 2)
    (of_weight, of_bias), uses = split(y, sink, [weight, bias])
    assert of_weight is None
    assert of_bias is not None
    assert torch.equal(of_bias, torch.full((4,), 6.0))
    assert [use.bias for use in uses] == [None]
    y = linear(x, nn.Parameter(weight.detach()), None, sink)
    seen: list[torch.Tensor | None] = []
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda given, _: seen.extend(given))
    assert split(y, sink, [x])[1] == []
    assert len(seen) == 2
    assert all(one is not None for one in seen)


def test_a_second_sink_takes_the_place_of_the_first() -> None:
    """The same modules in a second trainer."""
    module = nn.Sequential(nn.Linear(4, 4))
    assert defer_linear(module, active())
    sink = active()
    assert defer_linear(module, sink)
    y = module(torch.randn(2, 4, requires_grad=True))
    assert len(split(y, sink, list(module.parameters()))[1]) == 1
    assert not defer_linear(nn.Sequential(nn.Tanh()), sink)


@pytest.mark.parametrize("private", ["_graph_is_kept", "_NODE"])
def test_without_what_is_private_to_torch_nothing_waits(private: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[WeightSink.__module__], private, None)
    sink = active()
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    (of_weight,), uses = split(linear(x, weight, None, sink), sink, [weight])
    assert uses == []
    assert of_weight is not None
    assert torch.equal(of_weight, torch.autograd.grad(F.linear(x, weight).sum(), weight)[0])


def test_it_works_inside_vmap_and_functional_gradients() -> None:
    module = nn.Linear(4, 2)
    defer_linear(module, active())
    parameters = dict(module.named_parameters())
    x = torch.randn(3, 4)

    def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, values, (row,)).pow(2).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    assert found["weight"].shape == (3, 2, 4)

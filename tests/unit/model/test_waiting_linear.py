"""The linear map whose weight gradient can wait: torch's bits, now or later, and an ordinary map for everyone else."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpipipe.model import Head, WeightSink, defer_linear, linear, weight_gradients

SHAPES = [(4, 16), (2, 5, 16), (3, 2, 4, 16), (1, 7, 64), (16, 128, 96)]


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
        if strided and x.dim() == 3:
            x = x.transpose(0, 1)
        x.requires_grad_(True)
        gradient = torch.randn(*x.shape[:-1], out)
        wanted = [x, *module.parameters()]
        y = F.linear(x, module.weight, module.bias)
        expected = torch.autograd.grad(y, wanted, gradient)
        sink = active()
        other = linear(x, module.weight, module.bias, sink)
        assert torch.equal(y, other)
        sink.collect()
        found = torch.autograd.grad(other, wanted, gradient, allow_unused=True)
        assert all(value is None for value in found[1:])
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
    sink.collect()
    torch.autograd.grad(y, [x, weight], torch.ones(3, 4), allow_unused=True)
    uses = sink.take()
    assert len(uses) == 2
    assert torch.equal(weight_gradients(uses)[id(weight)], expected)


def test_a_gradient_inside_a_forward_is_an_ordinary_one() -> None:
    """Energy models take gradients in their forward, of the second order in the backward."""

    def penalty(sink: WeightSink | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(5, 5))
        x = torch.randn(3, 5, requires_grad=True)
        energy = torch.tanh(linear(x, weight, None, sink)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return (force, *torch.autograd.grad(force.pow(2).sum(), [x, weight]))

    for one, other in zip(penalty(None), penalty(active()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", ["hook", "frozen", "not a leaf", "vector", "no grad", "another type"])
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
            assert "_Linear" not in type(linear(x, weight, None, sink).grad_fn).__name__
        return
    with torch.set_grad_enabled(case != "no grad"):
        y = linear(x, weight, None, sink)
    assert "_Linear" not in type(y.grad_fn).__name__


def test_it_works_inside_vmap_and_functional_gradients() -> None:
    module = nn.Linear(4, 2)
    defer_linear(module, active())
    parameters = dict(module.named_parameters())
    x = torch.randn(3, 4)

    def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, values, (row,)).pow(2).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    assert found["weight"].shape == (3, 2, 4)

"""The linear map whose weight gradient can wait: what a split backward (I, then W) needs of ``nn.Linear``.

The input gradient of ``y = x @ weight.T + bias`` needs the weight and the output's gradient only, the weight gradient
the input and the output's gradient: it can be made at any later time, and nothing else in the backward waits for it
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2). Both are the products that torch's own backward makes,
in the same layout, and so have the same bits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightSink:
    """Where the weight gradients of one layer's linear maps go.

    ``active``: the layer's forwards use ``linear`` below rather than torch's. During a backward of the engine, between
    ``collect`` and ``take``, a linear map gives its (weight, bias, input, output's gradient) to the sink, and autograd
    gets no gradient of weight and bias. At any other time (a gradient that a module takes inside its own forward, say)
    it is an ordinary linear map.
    """

    __slots__ = ("_uses", "active")

    def __init__(self) -> None:
        self.active = False
        self._uses: list[Use] | None = None

    def collect(self) -> None:
        """Begin: what the backward passes from here on is kept."""
        self._uses = []

    def take(self) -> list[Use]:
        """End: the uses since ``collect``, in the order of the backward."""
        uses, self._uses = self._uses or [], None
        return uses

    def put(self, use: Use) -> bool:
        """Keep a use if between ``collect`` and ``take``; whether it was."""
        if self._uses is None:
            return False
        self._uses.append(use)
        return True


Use = tuple[Tensor, "Tensor | None", Tensor, Tensor]
"""(weight, bias, input, gradient of the output) of one linear map in one microbatch."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightSink | None) -> Tensor:
    """``F.linear``; where ``sink`` is active and the weight a plain parameter, one whose weight gradient can wait."""
    if sink is None or not sink.active or not _can_wait(x, weight, bias):
        return F.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias, sink))  # type: ignore[no-untyped-call]


def defer_linear(module: nn.Module, sink: WeightSink) -> None:
    """Let every ``nn.Linear`` in ``module`` (not its subclasses), and every module with a ``weight_sink``, use
    ``linear`` with ``sink``."""
    for part in module.modules():
        if type(part) is nn.Linear and "forward" not in vars(part):
            part.forward = _Forward(part, sink)  # type: ignore[method-assign]
        elif hasattr(part, "weight_sink"):
            part.weight_sink = cast(Any, sink)


def weight_gradients(uses: list[Use]) -> dict[int, Tensor]:
    """The gradient of each weight and bias, by ``id``, summed over its uses in their order."""
    found: dict[int, Tensor] = {}
    for weight, bias, x, gradient in uses:
        flat = gradient.reshape(-1, gradient.shape[-1])
        _add(found, weight, flat.t().mm(x.reshape(-1, x.shape[-1])))
        if bias is not None and bias.requires_grad:
            _add(found, bias, flat.sum(0))
    return found


def _add(found: dict[int, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    before = found.get(id(parameter))
    found[id(parameter)] = gradient if before is None else before + gradient


class _Forward:
    """In place of ``nn.Linear.forward``; the module's weight and bias are looked up at each call."""

    __slots__ = ("_module", "_sink")

    def __init__(self, module: nn.Linear, sink: WeightSink) -> None:
        self._module = module
        self._sink = sink

    def __call__(self, input: Tensor) -> Tensor:  # the name of torch's argument
        return linear(input, self._module.weight, self._module.bias, self._sink)


def _can_wait(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """A trainable leaf without hooks of its own, plain tensors of one type, no transformation that looks inside."""
    parameters = (weight,) if bias is None else (weight, bias)
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and all(one.is_leaf and not one._backward_hooks and one.dtype == x.dtype for one in parameters)
        and x.dim() >= 2
        and type(x) is Tensor
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightSink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters = (weight, bias)  # what was saved comes back as other objects where hooks unpack it (checkpoint)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = flat.mm(weight).view_as(x) if needs_x else None
        if not torch.is_grad_enabled() and ctx.sink.put((*ctx.parameters, x, gradient)):
            return of_x, None, None, None
        of_weight = flat.t().mm(x.reshape(-1, x.shape[-1]))
        return of_x, of_weight, flat.sum(0) if needs_bias else None, None

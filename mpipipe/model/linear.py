"""The linear map whose weight gradient can wait: what a split backward (I, then W) needs of ``nn.Linear``.

The input gradient of ``y = x @ weight.T + bias`` needs the weight and the output's gradient only, the weight gradient
the input and the output's gradient: it can be made at any later time, and nothing else in the backward waits for it
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2). Both are the products that torch's own backward makes,
in the same layout, and so have the same bits.

A parameter's gradient waits only where all of it can: autograd adds a parameter's uses in the order of its backward,
which is known for linear maps here and not for other uses of the same weight.

In autograd's graph such a map looks as torch's own does, the transpose of the weight and the views of input and output
included; one node is of another class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

from mpipipe.errors import EngineError

_graph_is_kept: Callable[[], bool] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
)
"""Whether the backward that runs now keeps its graph. Private to torch; without it no gradient waits."""


class Use(NamedTuple):
    """One linear map in one microbatch: what its parameters' gradients are made of.

    ``weight``, ``bias``: None for one whose gradient does not wait. ``x``: the input; ``gradient``: of the output; both
    with their leading axes as one. ``versions``: of the two, when they were kept.
    """

    weight: Tensor | None
    bias: Tensor | None
    x: Tensor
    gradient: Tensor
    versions: tuple[int, int]


class WeightSink:
    """Where the weight gradients of one layer's linear maps go.

    ``active``: the layer's forwards use ``linear`` below rather than torch's. In the one backward between ``collect``
    and ``take`` the linear maps of the graph that was given to ``collect`` leave a ``Use`` each, and autograd gets no
    gradient of the parameters in it. In any other backward, one that a hook or a function of the user's runs inside
    this one included, they are ordinary linear maps.
    """

    __slots__ = ("_uses", "active")

    def __init__(self) -> None:
        self.active = False
        self._uses: list[Use] = []

    def collect(self, roots: Sequence[Tensor]) -> None:
        """Begin: look at the graph of ``roots``. A parameter that is used by anything else in it, or that has hooks,
        does not wait: autograd makes its gradient.
        """
        self._uses = []
        seen: dict[Any, None] = {None: None}
        nodes: list[Any] = []
        maps: list[Any] = []
        for root in roots:
            if root.grad_fn not in seen:
                seen[root.grad_fn] = None
                nodes.append(root.grad_fn)
        for node in nodes:  # which grows
            following = node.next_functions
            if type(node) is _NODE:
                maps.append(node)
                if not node.hooked:
                    following = following[-2:-1]  # the input's; the others are seen if something else leads there
            for other, _ in following:
                if other not in seen:
                    seen[other] = None
                    nodes.append(other)
        for node in maps:
            *rest, _, (transposed, _) = node.next_functions
            ((to_weight, _),) = transposed.next_functions
            weight = _if_alone(to_weight, seen)
            bias = _if_alone(rest[0][0], seen) if rest else None
            if weight is not None or bias is not None:
                node.late = (self._uses, weight, bias)

    def take(self) -> list[Use]:
        """End: the uses since ``collect``, in the order of the backward."""
        uses = self._uses.copy()
        self._uses.clear()  # a node whose backward did not run goes on holding the list
        return uses


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightSink | None) -> Tensor:
    """``F.linear``; where ``sink`` is active and the weight a plain parameter, one whose weight gradient can wait."""
    if sink is None or not sink.active or not _can_wait(x, weight, bias):
        return F.linear(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = cast(Tensor, _Linear.apply(bias, rows, weight.t()))  # type: ignore[no-untyped-call]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def defer_linear(module: nn.Module, sink: WeightSink) -> bool:
    """Let every ``nn.Linear`` in ``module`` (not its subclasses), and every module with a ``weight_sink``, use
    ``linear`` with ``sink``; whether there is one. A sink of before is replaced."""
    found = False
    for part in module.modules():
        if type(part) is nn.Linear and type(vars(part).get("forward")) in (type(None), _Forward):
            part.forward = _Forward(part, sink)  # type: ignore[method-assign]
        elif hasattr(part, "weight_sink"):
            part.weight_sink = cast(Any, sink)
        else:
            continue
        found = True
    return found


def weight_gradients(uses: list[Use]) -> dict[int, Tensor]:
    """The gradient of each weight and bias that waited, by ``id``, summed over its uses in their order.

    Raises ``EngineError`` where an input or an output's gradient is no longer what it was.
    """
    found: dict[int, Tensor] = {}
    for weight, bias, x, gradient, versions in uses:
        if (x._version, gradient._version) != versions:
            raise EngineError(
                f"the input {tuple(x.shape)} of a linear map, or the gradient of its output, was changed in place "
                "between the two halves of its backward: give the map, or who changes it, x.clone(); or set "
                "pipeline.schedule to one without W actions"
            )
        if weight is not None:
            _add(found, weight, gradient.t().mm(x))
        if bias is not None:
            _add(found, bias, gradient.sum(0))
    return found


def _if_alone(leaf: Any, seen: dict[Any, None]) -> Tensor | None:
    """The parameter of a leaf of the graph, if nothing but linear maps leads there and it has no hooks."""
    if leaf in seen:
        return None
    parameter: Tensor = leaf.variable
    return None if parameter._backward_hooks else parameter


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
    """A trainable leaf without hooks of its own, plain tensors of one type, no transformation that looks inside; an
    input that takes a gradient (any other may be a buffer that the next microbatch changes in place), in a layout for
    which the products here are torch's.
    """
    return (
        weight.requires_grad
        and x.requires_grad
        and torch.is_grad_enabled()
        and weight.is_leaf
        and not weight._backward_hooks
        and weight.dtype == x.dtype
        and (bias is None or (bias.is_leaf and not bias._backward_hooks and bias.dtype == x.dtype))
        and _is_plain(x)
        and weight.numel() > 0
        and weight.stride() == (weight.shape[1], 1)
        and x.is_floating_point()
        and type(x) is Tensor
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and getattr(forward_ad, "_current_level", -1) < 0
    )


def _is_plain(x: Tensor) -> bool:
    """Contiguous, or rows of a matrix: torch maps other layouts by other operations. A matrix whose columns are
    contiguous, one of a single column or row too, gets its gradient in its own layout.
    """
    if x.dim() != 2:
        return x.dim() > 2 and x.shape[-1] > 1 and x.is_contiguous()
    rows, columns = x.stride()
    return columns == 1 and rows > 1


class _Linear(torch.autograd.Function):
    """``addmm(bias, x, transposed)``, or ``mm`` without bias, of matrices: the node of a linear map."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, x: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(x, transposed)
        ctx.late = None  # where the gradients go that wait, as ``WeightSink.collect`` says
        ctx.hooked = False
        return x.mm(transposed) if bias is None else torch.addmm(bias, x, transposed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, transposed = ctx.saved_tensors
        needs_bias, needs_x, needs_weight = ctx.needs_input_grad
        if ctx.late is not None and _graph_is_kept is not None and not _graph_is_kept():
            (uses, weight, bias), ctx.late = ctx.late, None
            uses.append(Use(weight, bias, x, gradient, (x._version, gradient._version)))
            needs_weight = needs_weight and weight is None
            needs_bias = needs_bias and bias is None
        return (
            gradient.sum(0) if needs_bias else None,
            gradient.mm(transposed.t()) if needs_x else None,
            gradient.t().mm(x).t() if needs_weight else None,
        )


def _register_hook(node: Any, hook: Callable[..., Any]) -> Any:
    """Of a linear map's ``grad_fn``: who looks at its gradients is given them."""
    node.hooked = True
    return super(cast(Any, _NODE), node).register_hook(hook)


_NODE: Any = getattr(_Linear, "_backward_cls", None)
"""The class of a linear map in autograd's graph; without it no gradient waits."""
if _NODE is not None:
    _NODE.register_hook = _register_hook

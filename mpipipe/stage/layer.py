"""One layer of a stage, with what the stage must know of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpipipe.device import Device
from mpipipe.errors import EngineError
from mpipipe.model import KeyedLayer, Use, WeightSink, defer_linear, stable_key, weight_gradients
from mpipipe.stage.autograd import add_gradients, gradients_of
from mpipipe.stage.gradients import Gradient
from mpipipe.stage.key import MicrobatchKey

_DRAWS_NOTHING = frozenset(
    {
        nn.Identity, nn.Linear, nn.Embedding, nn.LayerNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax,
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.Flatten, nn.Unflatten,
    }
)  # fmt: skip
"""Torch's own modules that take no random numbers in their forward. Exact classes: a subclass may."""


class StageLayer:
    """A module, its place in the whole model, and the totals of its parameters' gradients.

    ``parameters`` holds the trainable ones in the module's order; ``names`` their global names; ``gradients`` their
    totals.
    """

    def __init__(self, module: nn.Module, index: int, name: str) -> None:
        self.module = module
        self.index = index
        self.name = name
        self.keyed = isinstance(module, KeyedLayer)
        self._plain = type(module) in _DRAWS_NOTHING
        trainable = [(key, p) for key, p in module.named_parameters() if p.requires_grad]
        self.names = [f"{name}.{key}" for key, _ in trainable]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in trainable]
        self.gradients = [Gradient(parameter) for parameter in self.parameters]
        self._adds_by_itself = all(gradient.direct for gradient in self.gradients)
        self._totals = [(p, total.total) for p, total in zip(self.parameters, self.gradients, strict=True)]
        self.sink = WeightSink()
        self._deferred = self._has_maps = False
        self._forward: object = None  # what ``split`` put in place of the module's own

    def forward(self, inputs: object, key: MicrobatchKey, device: Device) -> object:
        """Run the module.

        A user's module draws from torch's generator, seeded by (seed, step, microbatch, layer), without a draw by
        (microbatch, layer). The user's own draws between steps go on as if there had been none: else ranks that draw
        alike at the start would no longer do so after a step.
        """
        module = self.module
        if self.keyed:
            return module(inputs, key.draw)
        if self._plain and not (module._forward_hooks or module._forward_pre_hooks or self._is_patched()):
            return module(inputs)
        draw = key.draw
        run = "" if draw is None else f"{draw.seed}/{draw.step}/"
        before = device.seed(stable_key(f"{run}{key.microbatch}/{self.index}"))
        try:
            return module(inputs)
        finally:
            device.set_generator(before)

    def _is_patched(self) -> bool:
        """Whether someone put a forward of his own into the module."""
        return self.module.__dict__.get("forward") is not self._forward

    def backward(
        self, leaves: list[torch.Tensor], roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Add this microbatch's parameter gradients to the totals and return those of ``leaves``.

        ``roots``: outputs of the forward that take a gradient, ``gradients`` theirs.
        """
        if not roots or not (leaves or self.parameters):
            return [torch.zeros_like(leaf) for leaf in leaves]
        if self._adds_by_itself:
            for parameter, there in self._totals:
                if parameter.grad is not there:
                    parameter.grad = there
            add_gradients(roots, gradients, (*leaves, *self.parameters))
            for parameter, there in self._totals:
                if parameter.grad is not there:
                    self._refuse_other_totals()
            return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        found = gradients_of(roots, gradients, (*leaves, *self.parameters))
        for total, value in zip(self.gradients, found[len(leaves) :], strict=True):
            if value is not None:
                total.add(value)
        return _of_leaves(leaves, found)

    def _refuse_other_totals(self) -> None:
        others = [name for name, (p, total) in zip(self.names, self._totals, strict=True) if p.grad is not total]
        raise EngineError(
            f"during the backward someone set the grad of parameter {others[0]}, as a hook that updates it, or a call "
            "of zero_grad, does: gradients add up over the microbatches, and the trainer updates once a step"
        )

    def backward_input(
        self, leaves: list[torch.Tensor], roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Halves:
        """The first half of a split backward.

        Everything but the weight gradients of linear maps is made now, in one pass, which frees the graph; parameter
        gradients wait in what is returned. A layer whose input takes no gradient leaves all to the second half.
        """
        if not leaves:
            return Halves([], self, roots, gradients)
        if not roots:
            return Halves([torch.zeros_like(leaf) for leaf in leaves], self)
        if self._has_maps:
            self.sink.collect(roots)
        try:
            found = gradients_of(roots, gradients, (*leaves, *self.parameters))
        finally:
            uses = self.sink.take() if self._has_maps else ()
        return Halves(_of_leaves(leaves, found), self, found=found[len(leaves) :], uses=uses)

    def split(self, wanted: bool) -> None:
        """Before a run: whether its forwards are followed by split backwards; either way, either backward is right.

        Raises ``EngineError`` for a hook that would see, or change, the total instead of a gradient.
        """
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise EngineError(
                    f"parameter {name} has a post-accumulate hook, which would be called after every microbatch with "
                    "the total so far: take register_hook, which is given each gradient, or update after the step"
                )
        if wanted and not self._deferred:
            before = self.module.__dict__.get("forward")
            self._has_maps = defer_linear(self.module, self.sink)
            after = self.module.__dict__.get("forward")
            self._forward = None if after is before else after
            self._deferred = True
        self.sink.active = wanted


def _of_leaves(leaves: list[torch.Tensor], found: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The first of what was found; zeros where there is none."""
    return [torch.zeros_like(a) if b is None else b for a, b in zip(leaves, found, strict=False)]


class Halves:
    """What the first half of a layer's backward leaves to the second, for one microbatch. ``of_input``: gradients of
    the layer's leaves.
    """

    __slots__ = ("_found", "_gradients", "_layer", "_roots", "_uses", "of_input")

    def __init__(
        self,
        of_input: list[torch.Tensor],
        layer: StageLayer,
        roots: Sequence[torch.Tensor] = (),
        gradients: Sequence[torch.Tensor] = (),
        *,
        found: Sequence[torch.Tensor | None] = (),
        uses: Sequence[Use] = (),
    ) -> None:
        self.of_input = of_input
        self._layer = layer
        self._roots = roots
        self._gradients = gradients
        self._found = found
        self._uses = list(uses)

    def backward_weight(self) -> None:
        """Add this microbatch's parameter gradients to the layer's totals, the same bits as in a whole backward."""
        layer = self._layer
        if self._roots:
            layer.backward([], self._roots, self._gradients)
            return
        with torch.no_grad():  # the inputs kept for it are leaves: a sum with a graph would keep them all
            late = weight_gradients(self._uses)
            for total, parameter, early in zip(layer.gradients, layer.parameters, self._found, strict=False):
                value = late.get(id(parameter))
                if value is None:
                    value = early
                elif early is not None:
                    value = early + value
                if value is not None:
                    total.add(value)

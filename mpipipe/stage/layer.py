"""One layer of a stage, with what the stage must know of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpipipe.device import Device
from mpipipe.model import Draw, KeyedLayer, Use, WeightSink, defer_linear, stable_key, weight_gradients
from mpipipe.stage.gradients import Gradient


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
        trainable = [(key, p) for key, p in module.named_parameters() if p.requires_grad]
        self.names = [f"{name}.{key}" for key, _ in trainable]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in trainable]
        self.gradients = [Gradient(parameter) for parameter in self.parameters]
        self.sink = WeightSink()
        self._deferred = False

    def forward(self, inputs: object, draw: Draw | None, microbatch: int, device: Device) -> object:
        """Run the module.

        A user's module draws from torch's generator, seeded by (seed, step, microbatch, layer), without ``draw`` by
        (microbatch, layer). The user's own draws between steps go on as if there had been none: else ranks that draw
        alike at the start would no longer do so after a step.
        """
        if self.keyed:
            return self.module(inputs, draw)
        run = "" if draw is None else f"{draw.seed}/{draw.step}/"
        with device.seeded(stable_key(f"{run}{microbatch}/{self.index}")):
            return self.module(inputs)

    def backward(self, leaf: object, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add this microbatch's parameter gradients to the totals and return the input's, or None if the input takes
        none.
        """
        source = leaf if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None
        wanted = self.parameters if source is None else [source, *self.parameters]
        if not wanted or not output.requires_grad:
            return None if source is None else torch.zeros_like(source)
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for total, value in zip(self.gradients, found if source is None else found[1:], strict=True):
            if value is not None:
                total.add(value)
        if source is None:
            return None
        return found[0] if found[0] is not None else torch.zeros_like(source)

    def backward_input(self, leaf: object, output: torch.Tensor, gradient: torch.Tensor) -> Halves:
        """The first half of a split backward.

        Everything but the weight gradients of linear maps is made now, in one pass, which frees the graph; parameter
        gradients wait in what is returned. A layer whose input takes no gradient leaves all to the second half.
        """
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return Halves(None, self, output, gradient)
        if not output.requires_grad:
            return Halves(torch.zeros_like(leaf), self)
        self.sink.collect()
        try:
            found = torch.autograd.grad(output, [leaf, *self.parameters], gradient, allow_unused=True)
        finally:
            uses = self.sink.take()
        of_input = found[0] if found[0] is not None else torch.zeros_like(leaf)
        return Halves(of_input, self, found=found[1:], uses=uses)

    def split(self, wanted: bool) -> None:
        """Whether the next forwards are followed by split backwards; either way, either backward is right."""
        if wanted and not self._deferred:
            defer_linear(self.module, self.sink)
            self._deferred = True
        self.sink.active = wanted


class Halves:
    """What the first half of a layer's backward leaves to the second, for one microbatch."""

    __slots__ = ("_found", "_gradient", "_layer", "_output", "_uses", "of_input")

    def __init__(
        self,
        of_input: torch.Tensor | None,
        layer: StageLayer,
        output: torch.Tensor | None = None,
        gradient: torch.Tensor | None = None,
        *,
        found: Sequence[torch.Tensor | None] = (),
        uses: Sequence[Use] = (),
    ) -> None:
        self.of_input = of_input
        self._layer = layer
        self._output = output
        self._gradient = gradient
        self._found = found
        self._uses = list(uses)

    def backward_weight(self) -> None:
        """Add this microbatch's parameter gradients to the layer's totals, the same bits as in a whole backward."""
        layer = self._layer
        if self._output is not None:
            assert self._gradient is not None
            layer.backward(None, self._output, self._gradient)
            return
        late = weight_gradients(self._uses)
        for total, parameter, early in zip(layer.gradients, layer.parameters, self._found, strict=False):
            value = late.get(id(parameter))
            if value is None:
                value = early
            elif early is not None:
                value = early + value
            if value is not None:
                total.add(value)

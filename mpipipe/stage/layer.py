"""One layer of a stage, with what the stage must know of it."""

from __future__ import annotations

import torch
from torch import nn

from mpipipe.device import Device
from mpipipe.model import Draw, KeyedLayer, stable_key
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

    def backward_input(self, leaf: object, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """The input's gradient alone, or None if the input takes none. The graph stays for ``backward_weight``."""
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return None
        if not output.requires_grad:
            return torch.zeros_like(leaf)
        keep = bool(self.parameters)
        (found,) = torch.autograd.grad(output, [leaf], gradient, allow_unused=True, retain_graph=keep)
        return found if found is not None else torch.zeros_like(leaf)

    def backward_weight(self, output: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this microbatch's parameter gradients to the totals, the same bits as in ``backward``; the graph goes."""
        if not self.parameters or not output.requires_grad:
            return
        found = torch.autograd.grad(output, self.parameters, gradient, allow_unused=True)
        for total, value in zip(self.gradients, found, strict=True):
            if value is not None:
                total.add(value)

"""Forward and backward of one stage, a microbatch at a time.

Every layer is an autograd graph of its own: its input is a leaf, and its backward runs by itself. Input and gradient
are contiguous and aligned at every layer's border, inside a stage as between stages. So a layer computes the same bits
wherever the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mpipipe.device import Device
from mpipipe.errors import EngineError
from mpipipe.model import Draw
from mpipipe.stage.layer import Halves, StageLayer
from mpipipe.units import counted

LossFunction = Callable[[torch.Tensor, Any], tuple[torch.Tensor, "int | torch.Tensor"]]
"""``loss_fn(output, target) -> (sum over the valid items, how many they are)``. A sum over any items has a gradient;
their number is whole.
"""


_IN_PLACE = (
    "a layer must not change its input: take inplace=False or x = x + 1, or put it and the layer before it into one "
    "nn.Sequential"
)


@dataclass(frozen=True, slots=True)
class MicrobatchKey:
    """What keys the random numbers of one microbatch: its number in the step and the draw of its samples (None: no
    drawing).
    """

    microbatch: int
    draw: Draw | None


@dataclass(slots=True)
class _Kept:
    """What a microbatch leaves behind for its backward: (layer, leaf, output) of every layer that makes one, and (leaf,
    sum) of the loss; after the input half of a split backward what each layer leaves to the weight half, the last
    layer's first."""

    layers: list[tuple[StageLayer, object, torch.Tensor]]
    halves: list[Halves] = field(default_factory=list)
    loss: tuple[torch.Tensor | None, torch.Tensor] | None = None


class Stage:
    """The layers of one stage, and what is kept of each microbatch between its forward and its backward.

    ``live`` is the number of microbatches kept. ``first_trained``: index in the whole model of the first layer with a
    trainable parameter. The layers before it keep nothing and make no backward, a stage of such layers alone neither;
    its own input takes no gradient. -1: every layer makes one.
    """

    def __init__(self, index: int, layers: list[StageLayer], device: Device, loss_fn: LossFunction | None) -> None:
        self.index = index
        self.layers = layers
        self.loss_fn = loss_fn
        self.first_trained = -1
        self._device = device
        self._kept: dict[int, _Kept] = {}

    @property
    def live(self) -> int:
        return len(self._kept)

    def forward(self, inputs: object, key: MicrobatchKey, *, first: bool) -> torch.Tensor:
        """Run all layers and keep what the backward needs: nothing of the layers before ``first_trained``.

        ``inputs``: what the user's batch holds for the first layer of the model (``first``), else the previous stage's
        output, a contiguous tensor that must stay unchanged until this microbatch's backward is done. Returns the last
        layer's output: contiguous, detached, in memory of its own (the input's can be taken back before a later stage
        of this rank is done with it).
        """
        value = inputs
        graph: list[tuple[StageLayer, object, torch.Tensor]] = []
        for layer in self.layers:
            leaf = value
            if isinstance(value, torch.Tensor):
                leaf = value.detach()
                if (leaf.is_floating_point() or leaf.is_complex()) and not first and layer.index > self.first_trained:
                    leaf.requires_grad_(True)
            before = None if first or layer.index > self.first_trained else _version(leaf)
            first = False
            output = self._run(layer, leaf, key)
            if before is not None and before != _version(leaf):
                raise EngineError(f"{_label(layer)} changed its input in place. {_IN_PLACE}")
            if layer.index >= self.first_trained:
                graph.append((layer, leaf, output))
            value = self._device.settle(output)
        if graph or not self.layers:
            self._kept[key.microbatch] = _Kept(graph)
        assert isinstance(value, torch.Tensor)
        return value.clone() if _share(value, inputs) else value

    def evaluate(self, inputs: object, key: MicrobatchKey) -> torch.Tensor:
        """Run all layers and keep nothing."""
        value = inputs
        with torch.no_grad():
            for layer in self.layers:
                value = self._device.settle(self._run(layer, value, key))
        assert isinstance(value, torch.Tensor)
        return value

    def _run(self, layer: StageLayer, leaf: object, key: MicrobatchKey) -> torch.Tensor:
        try:
            output = layer.forward(leaf, key.draw, key.microbatch, self._device)
        except Exception as error:
            error.add_note(f"mpipipe: in {_label(layer)}, stage {self.index}, microbatch {key.microbatch}")
            if "in-place" in str(error) and "leaf" in str(error):
                error.add_note(f"mpipipe: {_IN_PLACE}")
            raise
        if not isinstance(output, torch.Tensor):
            raise EngineError(
                f"{_label(layer)} returned {type(output).__name__}; a layer of a pipeline returns one tensor"
            )
        return output

    def loss(self, microbatch: int, output: torch.Tensor, target: object, *, keep: bool) -> tuple[torch.Tensor, int]:
        """The loss function's (sum, count) of one microbatch; the sum is detached, of shape (), count a whole
        number.

        With ``keep`` it is made of the last layer's own output, and its graph goes on that layer's: the loss follows
        the same layer wherever the model is cut, so one backward of both changes no bit and saves one.
        """
        assert self.loss_fn is not None
        kept = self._kept[microbatch] if keep else None
        own = kept.layers[-1][2] if kept is not None and kept.layers else None
        if own is None or not own.requires_grad:
            own = None
        given = output.detach().requires_grad_(keep) if own is None else own
        with torch.set_grad_enabled(keep):
            try:
                found = self.loss_fn(given, target)
            except Exception as error:
                error.add_note(f"mpipipe: in the loss function, microbatch {microbatch}")
                raise
        total, count = _sum_and_count(found)
        if kept is not None:
            if count and not total.requires_grad:
                raise EngineError(
                    f"the loss function's sum over {counted(count, 'item')} has no gradient: it was detached from the "
                    "output, or made without grad"
                )
            if own is not None and total.requires_grad:
                layer, leaf, _ = kept.layers[-1]
                kept.layers[-1] = (layer, leaf, total)
                kept.loss = (None, total)
            else:
                kept.loss = (given, total)
        return total.detach(), count

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Backward of all layers; adds to the totals and lets go of what was kept.

        ``gradient``: of the stage's output, contiguous (None on the last stage, which begins from its loss). Returns
        the gradient of the stage's input, contiguous, or None on the first stage.
        """
        kept = self._kept.pop(microbatch)
        gradient = self._from_loss(kept, gradient)
        while kept.layers and gradient is not None:
            layer, layer_input, output = kept.layers.pop()
            with _naming(layer, "the backward", microbatch):
                gradient = layer.backward(layer_input, output, gradient)
            gradient = None if gradient is None else self._device.settle(gradient)
        return gradient

    def split(self, wanted: bool) -> None:
        """Whether the backwards of the next forwards are split. Says nothing about what is right, only what is fast."""
        for layer in self.layers:
            layer.split(wanted)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The first half of a split backward: the gradient of the stage's input.

        As ``backward``, and what the second half needs stays until ``backward_weight``, ``gradient`` and the stage's
        input included: leave them unchanged until then. What is returned shares no memory with either.
        """
        kept = self._kept[microbatch]
        given = gradient = self._from_loss(kept, gradient)
        first = kept.layers[0][1]
        while kept.layers and gradient is not None:
            layer, layer_input, output = kept.layers.pop()
            with _naming(layer, "the input backward", microbatch):
                halves = layer.backward_input(layer_input, output, gradient)
            kept.halves.append(halves)
            gradient, halves.of_input = halves.of_input, None
            gradient = None if gradient is None else self._device.settle(gradient)
        if gradient is not None and any(_share(gradient, other) for other in (given, first)):
            gradient = gradient.clone()
        return gradient

    def backward_weight(self, microbatch: int) -> None:
        """The second half of a split backward: adds to the totals, with the same bits as ``backward``, and lets go of
        what was kept."""
        kept = self._kept.pop(microbatch)
        for place, halves in enumerate(kept.halves):
            with _naming(self.layers[-1 - place], "the weight backward", microbatch):
                halves.backward_weight()

    def _from_loss(self, kept: _Kept, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What the last layer's backward begins from: the gradient of the stage's output, on the last stage that of its
        loss; 1 where the loss is in that layer's graph."""
        if kept.loss is None:
            return gradient
        leaf, total = kept.loss
        kept.loss = None
        if leaf is None:
            return torch.ones_like(total)
        (found,) = torch.autograd.grad(total, leaf, allow_unused=True) if total.requires_grad else (None,)
        return torch.zeros_like(leaf) if found is None else self._device.settle(found)

    def drop_kept(self) -> None:
        """Let go of everything, after a step that failed."""
        self._kept.clear()


class _naming:  # used as a function
    """Within it, an error gains the layer and the microbatch."""

    __slots__ = ("_layer", "_microbatch", "_what")

    def __init__(self, layer: StageLayer, what: str, microbatch: int) -> None:
        self._layer, self._what, self._microbatch = layer, what, microbatch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            error.add_note(f"mpipipe: in {self._what} of {_label(self._layer)}, microbatch {self._microbatch}")


def _version(value: object) -> int | None:
    """A number that rises with every change in place, where torch counts them."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _share(one: torch.Tensor, other: object) -> bool:
    """Whether two tensors lie in the same memory."""
    return isinstance(other, torch.Tensor) and (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    )


def _label(layer: StageLayer) -> str:
    """``layer 3 (blocks.2)``; for a layer whose name is its number, the module's class: ``layer 3 (Linear)``."""
    named = layer.name != str(layer.index)
    return f"layer {layer.index} ({layer.name if named else type(layer.module).__name__})"


def _sum_and_count(found: object) -> tuple[torch.Tensor, int]:
    """What a loss function returned, if it is what it must be. Raises ``EngineError``."""
    if isinstance(found, tuple) and len(found) == 2:
        total, count = found
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.item()
        if isinstance(total, torch.Tensor) and total.numel() == 1 and isinstance(count, int | float):
            if not (math.isfinite(count) and count >= 0 and count == int(count)):
                raise EngineError(
                    f"the loss function returned a sum over {count} items: a whole number is needed, of those that "
                    "count. For weights, put them into the sum"
                )
            return total, int(count)
    raise EngineError(
        "the loss function must return (sum of the losses as a tensor of one element, how many items it is the sum "
        "of); "
        f"it returned {type(found).__name__}"
        + (f" ({', '.join(type(member).__name__ for member in found)})" if isinstance(found, tuple) else "")
    )

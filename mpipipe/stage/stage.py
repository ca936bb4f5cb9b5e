"""Forward and backward of one stage, a microbatch at a time.

Every layer is an autograd graph of its own: its inputs are leaves, and its backward runs by itself. Inputs and
gradients are contiguous and aligned at every layer's border, inside a stage as between stages. So a layer computes the
same bits wherever the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from mpipipe.device import Device
from mpipipe.errors import EngineError
from mpipipe.stage.activation import Activation
from mpipipe.stage.handed import HandedOn
from mpipipe.stage.key import MicrobatchKey
from mpipipe.stage.layer import Halves, StageLayer
from mpipipe.stage.lent import Lent
from mpipipe.stage.nested import Nested, Spec, flatten, rebuild, versions
from mpipipe.units import counted

LossFunction = Callable[[Any, Any], tuple[torch.Tensor, "int | torch.Tensor"]]
"""``loss_fn(output, target) -> (sum over the valid items, how many they are)``. A sum over any items has a gradient;
their number is whole.
"""

_IN_PLACE = (
    "a layer must not change its input: take inplace=False or x = x + 1, or put it and the layer before it into one "
    "nn.Sequential"
)


@dataclass(slots=True)
class _Kept:
    """What a microbatch leaves behind for its backward: (layer, leaves, roots) of every layer that makes one, the roots
    being its outputs that take a gradient; after the input half of a split backward what each layer leaves to the
    weight half, the last layer's first. ``taken``, ``made``: which tensors of the stage's input and output take a
    gradient. ``output``: the last layer's, until its loss is made of it.
    """

    taken: tuple[bool, ...]
    layers: list[tuple[StageLayer, list[torch.Tensor], Sequence[torch.Tensor]]]
    made: tuple[bool, ...] = ()
    halves: Sequence[Halves] = ()
    output: tuple[Sequence[torch.Tensor], Spec] | None = None


class Stage:
    """The layers of one stage, and what is kept of each microbatch between its forward and its backward.

    ``live`` is the number of microbatches kept. ``first_trained``: index in the whole model of the first layer with a
    trainable parameter. The layers before it keep nothing and make no backward, a stage of such layers alone neither;
    its own input takes no gradient. -1: every layer makes one. ``between`` is called between two layers, for who has
    something to look after meanwhile.
    """

    def __init__(self, index: int, layers: list[StageLayer], device: Device, loss_fn: LossFunction | None) -> None:
        self.index = index
        self.layers = layers
        self.loss_fn = loss_fn
        self.first_trained = -1
        self.between: Callable[[], None] | None = None
        self._device = device
        self._kept: dict[int, _Kept] = {}
        self._inputs, self._evaluated, self._targets, self._outputs = Lent(), Lent(), Lent(), Lent()
        self._handed_on = HandedOn()
        self._one: torch.Tensor | None = None

    @property
    def live(self) -> int:
        return len(self._kept)

    def forward(self, inputs: Activation | Nested, key: MicrobatchKey) -> Activation:
        """Run all layers and keep what the backward needs: nothing of the layers before ``first_trained``.

        ``inputs``: what the user's batch holds for the first layer of the model, which stays unchanged; or the previous
        stage's output, whose tensors must stay unchanged until this microbatch's backward is done. What is returned may
        lie in the same memory, as the output of a layer that passes a mask on does.
        """
        given = inputs if isinstance(inputs, Activation) else None
        passed, first_trained = given, self.first_trained
        kept = _Kept(() if given is None else given.needs, [])
        tensors: Sequence[torch.Tensor] = ()
        for place, layer in enumerate(self.layers):
            if place and self.between is not None:
                self.between()
            if passed is None:
                leaves: list[torch.Tensor] = []
                output = self._run_first(layer, inputs, key, self._inputs)
            else:
                leaf, leaves = passed.enter(layer.index > first_trained)
                output = self._run_on(layer, passed.tensors, leaf, key)
            if self.loss_fn is not None and layer is self.layers[-1] and _is_plain(output):
                tensors = (output,)  # the loss is made of it, and no one else sees it
                passed = Activation(tensors, _ONE if output.requires_grad else _NONE)
            else:
                passed, tensors = self._leave(layer, output)
            if layer.index >= first_trained:
                roots = tensors if passed.needs == _ONE else [one for one in tensors if one.requires_grad]
                kept.layers.append((layer, leaves, roots))
        assert passed is not None, f"stage {self.index} has no layer"
        if kept.layers:
            kept.made = passed.needs
            kept.output = None if self.loss_fn is None else (tensors, passed.spec)
            self._kept[key.microbatch] = kept
        return self._hand_on(passed)

    def evaluate(self, inputs: Activation | Nested, key: MicrobatchKey) -> Activation:
        """Run all layers and keep nothing. What is returned may lie where that of ``forward`` may."""
        given = inputs if isinstance(inputs, Activation) else None
        passed = given
        with torch.no_grad():
            for place, layer in enumerate(self.layers):
                if place and self.between is not None:
                    self.between()
                if passed is None:
                    output = self._run_first(layer, inputs, key, self._evaluated)
                else:
                    output = self._run_on(layer, passed.tensors, passed.enter(False)[0], key)
                passed, _ = self._leave(layer, output)
        assert passed is not None, f"stage {self.index} has no layer"
        return self._hand_on(passed)

    def _run_on(self, layer: StageLayer, tensors: Sequence[torch.Tensor], value: Nested, key: MicrobatchKey) -> object:
        """Run a layer on ``value``, made of ``tensors``. What it changed could be a parameter, a mask in the batch, or
        what another layer's backward needs, by how the model is cut.
        """
        one = tensors[0] if len(tensors) == 1 else None
        before = versions(tensors) if one is None else one._version
        output = self._run(layer, value, key)
        if before != (versions(tensors) if one is None else one._version):
            raise EngineError(f"{_label(layer)} changed its input in place. {_IN_PLACE}")
        return output

    def _run_first(self, layer: StageLayer, inputs: Nested, key: MicrobatchKey, lent: Lent) -> object:
        output = self._run(layer, lent.out(inputs), key)
        if not lent.back():
            raise EngineError(f"{_label(layer)} changed its input in place, and did not the first time. {_IN_PLACE}")
        return output

    def _run(self, layer: StageLayer, leaf: object, key: MicrobatchKey) -> object:
        try:
            return layer.forward(leaf, key, self._device)
        except (Exception, SystemExit) as error:
            _note(error, f"in {_label(layer)}, stage {self.index}, microbatch {key.microbatch}")
            if isinstance(error, RuntimeError) and "in-place" in (text := str(error)) and "leaf" in text:
                _note(error, _IN_PLACE)
            raise

    def _leave(self, layer: StageLayer, output: object) -> tuple[Activation, Sequence[torch.Tensor]]:
        """What a layer returned: as it goes on, and its tensors as they are."""
        if isinstance(output, torch.Tensor) and output.layout is torch.strided:
            needs = _ONE if output.requires_grad else _NONE
            return Activation((self._settle(layer, output),), needs), (output,)
        try:
            tensors, spec = flatten(output)
        except EngineError as error:
            raise EngineError(f"{_label(layer)} {error}") from None
        settled = [self._settle(layer, tensor) for tensor in tensors]
        return Activation(settled, tuple(tensor.requires_grad for tensor in tensors), spec), tensors

    def _settle(self, layer: StageLayer, tensor: torch.Tensor) -> torch.Tensor:
        settled = self._device.settle(tensor.clone() if tensor.is_inference() else tensor.detach())
        if type(settled) is not torch.Tensor:
            raise EngineError(
                f"{_label(layer)} returned a tensor of class {type(settled).__name__}; only plain ones go from layer "
                "to layer: return x.as_subclass(torch.Tensor)"
            )
        return settled

    def _hand_on(self, passed: Activation) -> Activation:
        """What the stage returns, in memory that stays as it is. A layer that fills a tensor of its own anew for each
        microbatch, and returns it, is told: the earlier contents may still be waiting to be sent.
        """
        if self.loss_fn is not None:
            return passed
        if not self._handed_on.add(passed.tensors):
            raise EngineError(
                f"a layer of stage {self.index} ({_label(self.layers[0])} to {_label(self.layers[-1])}) changed in "
                "place a tensor that it had returned for an earlier microbatch: return x.clone()"
            )
        return passed

    def loss(
        self, microbatch: int, output: Activation, target: object, *, keep: bool
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """The loss function's (sum, count) of one microbatch; the sum is detached, of shape (), count a whole number.
        A count that a device makes stays there, of shape (), for ``whole_count`` when the device has time.

        With ``keep`` it is made of the last layer's own output, and its graph goes on that layer's: the loss follows
        the same layer wherever the model is cut, so one backward of both changes no bit and saves one.
        """
        assert self.loss_fn is not None
        kept = self._kept[microbatch] if keep else None
        fixed: Sequence[torch.Tensor] = ()  # what takes no gradient may be the batch's own memory, or a parameter's
        if kept is None:
            given = self._outputs.out(output.value)
        else:
            assert kept.output is not None
            tensors, spec = kept.output
            kept.output = None
            if not any(kept.made):  # the layer gives nothing to train by; whether the loss would, is looked at
                tensors = [one.detach().requires_grad_(one.is_floating_point()) for one in tensors]
            given = rebuild(spec, tensors)
            if not all(kept.made):
                fixed = [one for one in tensors if not one.requires_grad]
        before = versions(fixed) if fixed else None
        found = self._call_loss(given, self._targets.out(target), microbatch, keep)
        if (fixed and before != versions(fixed)) or (kept is None and not self._outputs.back()):
            raise EngineError("the loss function changed the output in place: take output = output.clone() first")
        if not self._targets.back():
            raise EngineError("the loss function changed the targets in place, and did not the first time")
        total, count = _sum_and_count(found)
        if kept is not None:
            if not total.requires_grad and count:
                raise EngineError(
                    f"the loss function's sum over {counted(int(count), 'item')} has no gradient: it was detached from "
                    "the output, or made without grad"
                )
            layer, leaves, _ = kept.layers[-1]
            kept.layers[-1] = (layer, leaves, [total] if total.requires_grad and any(kept.made) else [])
        return total.detach(), count

    def _call_loss(self, output: Nested, target: Nested, microbatch: int, keep: bool) -> object:
        assert self.loss_fn is not None
        try:
            if keep is torch.is_grad_enabled():
                return self.loss_fn(output, target)
            with torch.set_grad_enabled(keep):
                return self.loss_fn(output, target)
        except (Exception, SystemExit) as error:
            _note(error, f"in the loss function, microbatch {microbatch}")
            raise

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Backward of all layers; adds to the totals and lets go of what was kept.

        ``gradients``: one for each tensor of the stage's output, None for one that takes none; None on the last stage,
        which begins from its loss. Returns those of the stage's input, none on the first stage: contiguous, and maybe
        in memory of ``gradients``.
        """
        kept = self._kept.pop(microbatch)
        found = self._begin(kept, gradients)
        settle = self._device.settle
        while kept.layers:
            layer, leaves, roots = kept.layers.pop()
            try:
                found = [settle(gradient) for gradient in layer.backward(leaves, roots, found)]
            except (Exception, SystemExit) as error:
                _note(error, f"in the backward of {_label(layer)}, microbatch {microbatch}")
                raise
            if kept.layers and self.between is not None:
                self.between()
        return _placed(found, kept.taken)

    def split(self, wanted: bool) -> None:
        """Whether the backwards of the next forwards are split. Says nothing about what is right, only what is fast."""
        for layer in self.layers:
            layer.split(wanted)

    def backward_input(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """The first half of a split backward: the gradients of the stage's input.

        As ``backward``, and what the second half needs stays until ``backward_weight``, ``gradients`` and the stage's
        input included: leave them unchanged until then.
        """
        kept = self._kept[microbatch]
        found = self._begin(kept, gradients)
        kept.halves = left = []
        while kept.layers:
            layer, leaves, roots = kept.layers.pop()
            try:
                halves = layer.backward_input(leaves, roots, found)
            except (Exception, SystemExit) as error:
                _note(error, f"in the input backward of {_label(layer)}, microbatch {microbatch}")
                raise
            left.append(halves)
            found, halves.of_input = [self._device.settle(gradient) for gradient in halves.of_input], []
            if kept.layers and self.between is not None:
                self.between()
        return _placed(found, kept.taken)

    def backward_weight(self, microbatch: int) -> None:
        """The second half of a split backward: adds to the totals, with the same bits as ``backward``, and lets go of
        what was kept."""
        kept = self._kept.pop(microbatch)
        for place, halves in enumerate(kept.halves):
            if place and self.between is not None:
                self.between()
            try:
                halves.backward_weight()
            except (Exception, SystemExit) as error:
                _note(error, f"in the weight backward of {_label(self.layers[-1 - place])}, microbatch {microbatch}")
                raise

    def _begin(self, kept: _Kept, gradients: Gradients | None) -> list[torch.Tensor]:
        """What the last layer's backward begins from: the gradients of its roots; 1 where the loss is its root."""
        kept.output = None
        if gradients is not None:
            return [one for one, made in zip(gradients, kept.made, strict=True) if made and one is not None]
        roots = kept.layers[-1][2]
        if not roots:
            return []
        if self._one is None or self._one.dtype != roots[0].dtype or self._one.shape != roots[0].shape:
            self._one = torch.ones_like(roots[0])
        return [self._one]

    def drop_kept(self) -> None:
        """Let go of everything, after a step that failed."""
        self._kept.clear()
        self._handed_on.clear()


Gradients = Sequence["torch.Tensor | None"]
"""One entry for each tensor of an ``Activation``; None for one that takes no gradient."""

_ONE, _NONE = (True,), (False,)


def _is_plain(output: object) -> TypeGuard[torch.Tensor]:
    return type(output) is torch.Tensor and output.layout is torch.strided


def _placed(found: list[torch.Tensor], taken: tuple[bool, ...]) -> Gradients:
    """The gradients of the leaves, at the places of their tensors."""
    if len(found) == len(taken):
        return found
    rest = iter(found)
    return [next(rest) if wanted else None for wanted in taken] if found else [None] * len(taken)


def _note(error: BaseException, text: str) -> None:
    """Tell more in an error of the user's."""
    with suppress(Exception):  # one that takes no note, as of a frozen dataclass
        error.add_note(f"mpipipe: {text}")


def _label(layer: StageLayer) -> str:
    """``layer 3 (blocks.2)``; for a layer whose name is its number, the module's class: ``layer 3 (Linear)``."""
    named = layer.name != str(layer.index)
    return f"layer {layer.index} ({layer.name if named else type(layer.module).__name__})"


def whole_count(count: float) -> int:
    """The number of items that a loss function counted. Raises ``EngineError`` for one that is no whole number."""
    if not (math.isfinite(count) and count >= 0 and count == int(count)):
        raise EngineError(
            f"the loss function returned a sum over {count} items: a whole number is needed, of those that count. For "
            "weights, put them into the sum"
        )
    return int(count)


def _sum_and_count(found: object) -> tuple[torch.Tensor, int | torch.Tensor]:
    """What a loss function returned, if it is what it must be. Raises ``EngineError``."""
    if isinstance(found, tuple) and len(found) == 2:
        total, count = found
        if type(count) is int and count >= 0 and isinstance(total, torch.Tensor) and not total.dim():
            return total, count
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.item() if count.is_cpu else count.detach().reshape(())
        if isinstance(total, torch.Tensor) and total.numel() == 1:
            if isinstance(count, torch.Tensor) and not count.dim():
                return total.reshape(()), count
            if isinstance(count, int | float):
                return total.reshape(()), whole_count(count)
    raise EngineError(
        "the loss function must return (sum of the losses as a tensor of one element, how many items it is the sum "
        "of); "
        f"it returned {type(found).__name__}"
        + (f" ({', '.join(type(member).__name__ for member in found)})" if isinstance(found, tuple) else "")
    )

"""One step's batch, cut into microbatches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from mpipipe.device import ALIGNMENT, Device
from mpipipe.errors import DataError
from mpipipe.model import Draw
from mpipipe.stage import Nested, map_tensors, tensors_of
from mpipipe.trainer.sameness import NOT_LOOKED_AT, checksum


def _pair(batch: Any) -> tuple[Nested, Nested]:
    """Inputs and targets. Raises ``DataError`` for all that is no tuple or list of two."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"a {type(batch).__name__}"
    if isinstance(batch, torch.Tensor):
        found += f" of shape {tuple(batch.shape)}"
    elif isinstance(batch, Mapping):
        found += " with " + ", ".join(repr(key) for key in list(batch)[:6])
    elif isinstance(batch, tuple | list):
        found += f" of {len(batch)}"
    raise DataError(f"a batch is (inputs, targets); found {found}")


def batch_size(batch: tuple[Nested, Nested]) -> int:
    """Sequences in the batch. Raises ``DataError`` when its tensors do not agree."""
    sizes = {int(tensor.shape[0]) if tensor.dim() else 0 for tensor in tensors_of(list(batch))}
    if len(sizes) != 1 or 0 in sizes:
        raise DataError(
            f"every tensor of a batch has the same first dimension, at least 1; found {sorted(sizes) or 'no tensor'}"
        )
    return sizes.pop()


class TensorFeed:
    """A batch of ``rows`` sequences in microbatches of ``microbatch``; the last one holds what is left.

    ``looked_at``: False where placeholders do as well; ``checksum`` is of the contents, before a layer can change them.
    ``draw_seed``: seed of the step's random numbers, None for an evaluation. ``first_sample``: number of the batch's
    first sequence in the run.
    """

    def __init__(
        self,
        batch: tuple[Nested, Nested],
        microbatch: int,
        device: Device,
        *,
        looked_at: bool = True,
        draw_seed: int | None = None,
        step: int = 0,
        first_sample: int = 0,
    ) -> None:
        self._inputs, self._targets = _pair(batch)
        self.rows = batch_size(batch)
        self.checksum = checksum(tensors_of([self._inputs, self._targets])) if looked_at else NOT_LOOKED_AT
        self._microbatch = microbatch
        self._device = device
        self._seed = draw_seed
        self._step = step
        self._first_sample = first_sample
        self.num_microbatches = -(-self.rows // microbatch)
        shapes = tuple((tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors_of(self._inputs))
        self._first = (min(microbatch, self.rows), shapes)
        self._last = (self.rows % microbatch, shapes) if self.rows % microbatch else self._first
        self._cut_inputs: list[Nested] | None = None
        self._cut_targets: list[Nested] | None = None

    def _cut(self, value: Nested) -> list[Nested]:
        """The value of each microbatch, contiguous and aligned: in the batch's own memory where that is so."""
        size, device = self._microbatch, self._device
        pieces = []
        for tensor in tensors_of(value):
            known = tensor.clone() if tensor.is_inference() else tensor.detach()  # autograd takes no inference tensor
            cut = device.settle(known.to(device.torch_device)).split(size)
            settled = cut[0].nbytes % ALIGNMENT == 0
            pieces.append(cut if settled else [device.settle(piece) for piece in cut])
        if isinstance(value, torch.Tensor):
            return list(pieces[0])
        return [_with_tensors(value, [piece[k] for piece in pieces]) for k in range(self.num_microbatches)]

    def signatures(self, training: bool) -> list[Hashable]:
        whole: list[Hashable] = [(training, self._first)] * self.num_microbatches
        whole[-1] = (training, self._last)
        return whole

    def inputs(self, microbatch: int) -> object:
        if self._cut_inputs is None:
            self._cut_inputs = self._cut(self._inputs)
        return self._cut_inputs[microbatch]

    def targets(self, microbatch: int) -> object:
        if self._cut_targets is None:
            self._cut_targets = self._cut(self._targets)
        return self._cut_targets[microbatch]

    def draw(self, microbatch: int) -> Draw | None:
        if self._seed is None:
            return None
        start = microbatch * self._microbatch
        first, stop = self._first_sample + start, self._first_sample + min(self.rows, start + self._microbatch)
        return Draw(self._seed, self._step, tuple(range(first, stop)))


def _with_tensors(value: Nested, tensors: list[torch.Tensor]) -> Nested:
    rest = iter(tensors)
    return map_tensors(value, lambda _: next(rest))

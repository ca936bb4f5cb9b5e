"""One step's batch, cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from mpipipe.device import Device
from mpipipe.errors import DataError
from mpipipe.model import Draw
from mpipipe.trainer.sameness import NOT_LOOKED_AT, checksum

Nested = object
"""A tensor, or tuples (also named ones), lists and mappings of tensors, with the batch as the first dimension of every
tensor. Numbers, texts and None go to every microbatch as they are.
"""


def map_tensors(value: Nested, change: Callable[[torch.Tensor], object]) -> Nested:
    """The same structure with every tensor replaced by ``change(tensor)``; a mapping becomes a dict. Raises
    ``DataError`` for anything else that a batch can't hold: it would not be cut.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        members = [map_tensors(member, change) for member in value]
        kind: Any = type(value)
        return kind(*members) if hasattr(value, "_fields") else tuple(members) if isinstance(value, tuple) else members
    if isinstance(value, Mapping):
        return {key: map_tensors(member, change) for key, member in value.items()}
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    raise DataError(
        f"a batch holds a {type(value).__module__}.{type(value).__name__}; it may hold torch tensors in tuples, lists "
        "and mappings, and numbers, texts and None"
    )


def _tensors(value: Nested) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


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
    sizes = {int(tensor.shape[0]) if tensor.dim() else 0 for tensor in _tensors(list(batch))}
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
        self.checksum = checksum(_tensors([self._inputs, self._targets])) if looked_at else NOT_LOOKED_AT
        self._microbatch = microbatch
        self._device = device
        self._seed = draw_seed
        self._step = step
        self._first_sample = first_sample
        self.num_microbatches = -(-self.rows // microbatch)
        self._shapes = tuple((tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in _tensors(self._inputs))

    def _bounds(self, microbatch: int) -> tuple[int, int]:
        start = microbatch * self._microbatch
        return start, min(self.rows, start + self._microbatch)

    def _cut(self, value: Nested, microbatch: int) -> Nested:
        start, stop = self._bounds(microbatch)
        device = self._device

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            # A copy: a layer may change its input, the batch is the user's; autograd takes no inference tensor either.
            return device.settle(tensor[start:stop].to(device.torch_device, copy=True))

        return map_tensors(value, cut)

    def signature(self, microbatch: int) -> Hashable:
        start, stop = self._bounds(microbatch)
        return (stop - start, self._shapes)

    def inputs(self, microbatch: int) -> object:
        return self._cut(self._inputs, microbatch)

    def targets(self, microbatch: int) -> object:
        return self._cut(self._targets, microbatch)

    def draw(self, microbatch: int) -> Draw | None:
        if self._seed is None:
            return None
        start, stop = self._bounds(microbatch)
        return Draw(self._seed, self._step, tuple(range(self._first_sample + start, self._first_sample + stop)))

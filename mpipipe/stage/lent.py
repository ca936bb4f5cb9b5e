"""The user's batch is lent to the first layer and to the loss function: what they change in place must stay unseen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpipipe.stage.nested import Nested, map_tensors, tensors_of, versions


class Lent:
    """Hands out values of the batch as they are, or copies of them to one who changes them in place.

    Who that is shows the first time, on a copy. One who changed nothing then and does so later is told of by ``back``.
    """

    __slots__ = ("_before", "_copies", "_known", "_tensors")

    def __init__(self) -> None:
        self._copies = True
        self._known = False
        self._tensors: Sequence[torch.Tensor] = ()
        self._before: Sequence[int] = ()

    def out(self, value: Nested) -> Nested:
        """``value``, or a copy; its tuples, lists and mappings are new ones in any case."""
        if isinstance(value, torch.Tensor):
            value = value.clone() if self._copies else value
            self._tensors = (value,)
        else:
            value = map_tensors(value, torch.clone if self._copies else _itself)
            self._tensors = tensors_of(value)
        self._before = versions(self._tensors)
        return value

    def back(self) -> bool:
        """After the use: False when the batch itself was changed."""
        changed = self._before != versions(self._tensors)
        self._tensors = ()
        if self._known:
            return self._copies or not changed
        self._known, self._copies = True, changed
        return True


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

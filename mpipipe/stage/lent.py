"""The user's batch is lent to the first layer and to the loss function: what they change in place must stay unseen."""

from __future__ import annotations

import torch

from mpipipe.stage.nested import Nested, map_tensors, tensors_of


class Lent:
    """Hands out values of the batch as they are, or copies of them to one who changes them in place.

    Who that is shows the first time, on a copy. One who changed nothing then and does so later is told of by ``back``.
    """

    __slots__ = ("_copies", "_known", "_lent", "_version")

    def __init__(self) -> None:
        self._copies = True
        self._known = False
        self._lent: Nested = None
        self._version: object = None

    def out(self, value: Nested) -> Nested:
        """``value``, or a copy."""
        if self._copies:
            value = map_tensors(value, torch.clone)
        self._lent, self._version = value, _version(value)
        return value

    def back(self) -> bool:
        """After the use: False when the batch itself was changed."""
        changed = self._version != _version(self._lent)
        self._lent = None
        if self._known:
            return self._copies or not changed
        self._known, self._copies = True, changed
        return True


def _version(value: Nested) -> object:
    """What changes with every change in place."""
    if isinstance(value, torch.Tensor):
        return value._version
    return [tensor._version for tensor in tensors_of(value)]

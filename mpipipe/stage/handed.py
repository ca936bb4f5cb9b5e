"""What a stage handed on in this run, to notice a layer that changes it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch


class HandedOn:
    """The tensors that a stage returned, by where they lie, with their versions; it keeps none of them alive.

    A layer that refills tensors of its own, one or several in turn, changes what may still be waiting to be sent. Each
    time the newest are looked at, and what lay where a new one lies: no more however many are still held.
    """

    __slots__ = ("_newest", "_placed")

    def __init__(self) -> None:
        self._newest: Sequence[tuple[ref[torch.Tensor], int]] = ()
        self._placed: dict[int, tuple[ref[torch.Tensor], int]] = {}

    def add(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Take up what is handed on now. False when something from before, which someone still holds, has changed."""
        for before, version in self._newest:
            tensor = before()
            if tensor is not None and tensor._version != version:
                return False
        placed = self._placed
        entries = []
        for one in tensors:
            start = one.data_ptr()
            earlier = placed.get(start)
            if earlier is not None:
                tensor = earlier[0]()
                if tensor is not None and tensor._version != earlier[1]:
                    return False
            placed[start] = entry = (ref(one), one._version)
            entries.append(entry)
        self._newest = entries
        return True

    def clear(self) -> None:
        """Forget all, at the end of a run."""
        self._newest = ()
        self._placed.clear()

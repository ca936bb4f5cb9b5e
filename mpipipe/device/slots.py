"""Memory for messages that is allocated once and used again until the run ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpipipe.device.driver import Slot
from mpipipe.device.protocol import Mark

_LEAST_BYTES = 512


def capacity(nbytes: int) -> int:
    """The size of the slot for a message: at most an eighth more, so that sizes near to each other share slots."""
    if nbytes <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


class Slots:
    """Free slots by size, each with the mark at which it is free; the one given back first goes out first.

    None is freed before the device goes, one that was lost in a failure neither: MPI libraries keep what they have made
    of a device's memory (IPC handles, registrations) by its address, and meet wrong data where it was freed and
    allocated anew.
    """

    def __init__(self, make: Callable[[int], Slot]) -> None:
        self._make = make
        self._all: set[Slot] = set()
        self._free: dict[int, deque[tuple[Slot, Mark | None]]] = {}
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> Slot:
        """A slot that is free now. Where the next one is not yet, another is made: no one waits here."""
        free = self._free.get(capacity(nbytes))
        if free and ((mark := free[0][1]) is None or mark.reached()):
            return free.popleft()[0]
        return self._new(nbytes)

    def take_next(self, nbytes: int) -> tuple[Slot, Mark | None]:
        """A slot, and the mark at which it will be free, None for now."""
        free = self._free.get(capacity(nbytes))
        return free.popleft() if free else (self._new(nbytes), None)

    def give(self, slot: Slot, mark: Mark | None = None) -> None:
        """A slot of ``take`` or ``take_next`` back; free once ``mark`` is reached."""
        self._free.setdefault(slot.nbytes, deque()).append((slot, mark))

    def drop(self, slot: Slot) -> None:
        """Leave a slot to whoever has a tensor in it, for good."""
        self._all.discard(slot)
        self.allocated_bytes -= slot.nbytes

    def _new(self, nbytes: int) -> Slot:
        slot = self._make(capacity(nbytes))
        self._all.add(slot)
        self.allocated_bytes += slot.nbytes
        return slot

"""Receive buffers that are used again instead of allocated anew."""

from __future__ import annotations

from collections import deque

from mpipipe.device.protocol import Buffer, Device


class BufferPool:
    """Free buffers by size. ``allocated_bytes`` is all that was ever allocated: it stops rising once a run is
    steady.

    The one given back last goes out first, since it may still be in a cache; where work goes on after it was issued,
    the one given back first, since its readers are done first.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, deque[Buffer]] = {}
        self._next = deque.popleft if device.timed else deque.pop
        self.allocated_bytes = 0
        self.allocated_buffers = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of exactly ``nbytes`` bytes, owned by the caller until ``give``. Earlier work may still read it:
        receive into it once ``free`` is reached.
        """
        free = self._free.get(nbytes)
        if free:
            return self._next(free)
        self.allocated_bytes += nbytes
        self.allocated_buffers += 1
        return self._device.allocate(nbytes)

    def give(self, buffer: Buffer) -> None:
        """Hand a buffer back, after all work that reads it was issued. One in whose memory someone still has a tensor
        is forgotten instead: it is theirs.
        """
        if self._device.is_kept(buffer):
            self._forget(buffer)
            return
        self._device.release(buffer)
        free = self._free.get(buffer.nbytes)
        if free is None:
            free = self._free[buffer.nbytes] = deque()
        free.append(buffer)

    @property
    def num_sizes(self) -> int:
        """Sizes of which a buffer was ever handed back since the last ``drop_all``."""
        return len(self._free)

    def drop_all(self) -> None:
        """Forget every free buffer, for instance when message sizes change for good."""
        for free in self._free.values():
            for buffer in free:
                self._forget(buffer)
        self._free.clear()

    def _forget(self, buffer: Buffer) -> None:
        self.allocated_bytes -= buffer.nbytes
        self.allocated_buffers -= 1
        self._device.forget(buffer)

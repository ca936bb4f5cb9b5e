"""Receive buffers that are used again instead of allocated anew."""

from __future__ import annotations

from mpipipe.device.protocol import Buffer, Device


class BufferPool:
    """Free buffers by size. ``allocated_bytes`` is all that was ever allocated: it stops rising once a run is
    steady.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[Buffer]] = {}
        self.allocated_bytes = 0
        self.allocated_buffers = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of exactly ``nbytes`` bytes, owned by the caller until ``give``."""
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self.allocated_bytes += nbytes
        self.allocated_buffers += 1
        return self._device.allocate(nbytes)

    def give(self, buffer: Buffer) -> None:
        """Hand a buffer back. One in whose memory someone still has a tensor is forgotten instead: it is theirs."""
        if self._device.is_kept(buffer):
            self.allocated_bytes -= buffer.nbytes
            self.allocated_buffers -= 1
            return
        self._free.setdefault(buffer.nbytes, []).append(buffer)

    @property
    def num_sizes(self) -> int:
        """Sizes of which a buffer was ever handed back since the last ``drop_all``."""
        return len(self._free)

    def drop_all(self) -> None:
        """Forget every free buffer, for instance when message sizes change for good."""
        for free in self._free.values():
            for buffer in free:
                self.allocated_bytes -= buffer.nbytes
                self.allocated_buffers -= 1
        self._free.clear()

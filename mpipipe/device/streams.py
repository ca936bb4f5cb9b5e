"""The GPU twin: what is copied where, and what must wait for what.

The host only issues work. All of a rank's compute is on one stream, and so in the order of the program; copies between
device and host are on two others, so that neither holds compute back. MPI knows no streams: a message is sent once the
mark behind its bytes is reached, and received once the mark behind the memory's last readers is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpipipe.device.driver import Driver, Slot, Stream
from mpipipe.device.protocol import Buffer, Copy, HostMemory, Mark, Stamp
from mpipipe.device.slots import Slots
from mpipipe.device.tensors import TELLS_USES, is_kept, settled, uses

PART_BYTES = 4 << 20
"""Staged messages go in parts of this size: while one is sent, the next is copied to the host, and the one before to
the device.
"""


@dataclass(slots=True)
class _Receiving:
    """What belongs to a receive buffer: ``readers``, the mark behind the work that reads its last message;
    ``pinned``, where the next message arrives when staged; ``landed``, the mark behind its copy to the device, until
    compute waits for it.
    """

    slot: Slot
    readers: Mark | None = None
    pinned: Slot | None = None
    landed: Mark | None = None


@dataclass(slots=True)
class _Part:
    """What belongs to a part of a message, from byte ``offset`` of ``whole`` on; it arrives in ``pinned``."""

    whole: _Receiving
    offset: int
    pinned: Slot


class _Held:
    """The mark behind a copy; keeps the tensor that is copied until it is reached. Torch gives a tensor's memory to the
    next one when the last reference goes, and orders them by its own stream alone. And who looks whether a tensor that
    was handed on is changed, can do so as long as it is there.
    """

    __slots__ = ("_mark", "_tensors")

    def __init__(self, mark: Mark, *tensors: torch.Tensor) -> None:
        self._mark = mark
        self._tensors: tuple[torch.Tensor, ...] | None = tensors

    def reached(self) -> bool:
        if self._tensors is None:
            return True
        if not self._mark.reached():
            return False
        self._tensors = None
        return True


class StreamDevice:
    """A GPU. Tensors are sent out of slots of its own memory (``staged`` False: the MPI library takes device pointers)
    or out of pinned host memory (``staged`` True).

    Slots are plain device memory: neither stream-ordered nor managed memory can be opened by another process.
    """

    timed = True
    blocks_at_once = 1 << 14  # of 65,536 elements

    def __init__(self, driver: Driver, staged: bool) -> None:
        self.name = driver.name
        self.identity = driver.identity
        self.torch_device = driver.torch_device
        self.staged = staged
        self._driver = driver
        self._receive_slots = Slots(driver.device_memory)
        self._send_slots = Slots(driver.pinned_memory if staged else driver.device_memory)
        self._landing_slots = Slots(driver.pinned_memory)
        self._theirs: list[Buffer] = []  # receive buffers in whose memory someone else has a tensor
        self._held: deque[_Held] = deque()
        self._copies: list[Copy] = []
        self._anchor: tuple[Any, int] | None = None

    # --- in ---

    def allocate(self, nbytes: int) -> Buffer:
        self._take_back()
        slot, mark = self._receive_slots.take_next(nbytes)
        buffer = Buffer(slot.first(nbytes), nbytes, slot=_Receiving(slot))
        self._set_free(buffer, mark)
        return buffer

    def receiving(self, buffer: Buffer) -> None:
        if self.staged:
            pinned = self._landing_slots.take(buffer.nbytes)
            buffer.slot.pinned = pinned
            buffer.wire = _host(pinned, buffer.nbytes)
            buffer.landing = True

    def receiving_parts(self, buffer: Buffer) -> list[Buffer]:
        if not self.staged or buffer.nbytes <= PART_BYTES:
            self.receiving(buffer)
            return [buffer]
        parts = []
        for offset in range(0, buffer.nbytes, PART_BYTES):
            nbytes = min(PART_BYTES, buffer.nbytes - offset)
            pinned = self._landing_slots.take(nbytes)
            memory = _host(pinned, nbytes)
            parts.append(Buffer(memory, nbytes, wire=memory, landing=True, slot=_Part(buffer.slot, offset, pinned)))
        return parts

    def landed(self, buffer: Buffer) -> None:
        """Copies pinned memory to the slot, behind the last readers of the slot. The pinned memory is free behind it.
        """
        if not buffer.landing:
            return
        part = buffer.slot if isinstance(buffer.slot, _Part) else None
        own: _Receiving = buffer.slot if part is None else part.whole
        pinned, offset = (own.pinned, 0) if part is None else (part.pinned, part.offset)
        assert pinned is not None
        if own.readers is not None:
            self._await_readers(own.readers)
            own.readers = None
        if buffer.nbytes:
            begun = self._stamp(Stream.IN)
            self._driver.copy_in(own.slot, pinned, buffer.nbytes, Stream.IN, offset)
            self._copies.append(Copy(False, begun, self._stamp(Stream.IN), buffer.nbytes))
        own.landed = self._driver.mark(Stream.IN)  # behind the copies of parts that landed before, too
        self._landing_slots.give(pinned, own.landed)
        own.pinned = buffer.wire = None
        buffer.landing = False

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert not buffer.landing, "landed() comes before tensor()"
        own: _Receiving = buffer.slot
        if own.landed is not None:
            self._await_landing(own.landed)
            own.landed = None
        view = buffer.view
        if view is None or view.dtype != dtype or view.shape != shape:
            assert own.slot.bytes is not None
            view = buffer.view = own.slot.bytes[: buffer.nbytes].view(dtype).view(shape)
            buffer.uses = uses(view)
        return view

    is_kept = staticmethod(is_kept)

    def release(self, buffer: Buffer) -> None:
        self._set_free(buffer, self._driver.mark(Stream.COMPUTE))

    def forget(self, buffer: Buffer) -> None:
        if TELLS_USES:
            self._theirs.append(buffer)
        else:  # no one can tell when it is free again
            self._receive_slots.drop(buffer.slot.slot)

    def _take_back(self) -> None:
        """Slots of forgotten buffers that no one has a tensor in any more: free behind all that was issued."""
        kept = []
        for buffer in self._theirs:
            if self.is_kept(buffer):
                kept.append(buffer)
                continue
            own: _Receiving = buffer.slot
            if own.landed is not None:
                self._await_landing(own.landed)
            self._receive_slots.give(own.slot, self._driver.mark(Stream.COMPUTE))
        self._theirs = kept

    def _set_free(self, buffer: Buffer, mark: Mark | None) -> None:
        """When the memory's readers are done. Staged, the message may come before that, and only the copy waits."""
        if self.staged:
            buffer.slot.readers = mark
        else:
            buffer.free = mark

    # --- out ---

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        """A copy of the tensor on its way into a slot of its own; a device's mark is ``ready``."""
        self._let_go()
        flat = self.settle(tensor)
        nbytes = flat.numel() * flat.element_size()
        slot = self._send_slots.take(nbytes)
        if not self.staged:
            if nbytes:
                self._driver.copy_out(slot, flat, nbytes, Stream.COMPUTE)
            return Buffer(slot.first(nbytes), nbytes, ready=self._driver.mark(Stream.COMPUTE), slot=slot)
        self._await_maker()
        return self._copied_out(tensor, flat, nbytes, slot)

    def outgoing_parts(self, tensor: torch.Tensor) -> list[Buffer]:
        if not self.staged or tensor.nbytes <= PART_BYTES:
            return [self.outgoing(tensor)]
        self._let_go()
        flat = self.settle(tensor).view(-1).view(torch.uint8)
        self._await_maker()
        pieces = flat.split(PART_BYTES)
        return [self._copied_out(tensor, one, len(one), self._send_slots.take(len(one))) for one in pieces]

    def _copied_out(self, tensor: torch.Tensor, flat: torch.Tensor, nbytes: int, slot: Slot) -> Buffer:
        """The copy to pinned memory, on its way. ``flat``: the tensor's bytes, or a part of them, without gaps."""
        if nbytes:
            begun = self._stamp(Stream.OUT)
            self._driver.copy_out(slot, flat, nbytes, Stream.OUT)
            self._copies.append(Copy(True, begun, self._stamp(Stream.OUT), nbytes))
        # Detached: one more in that memory, should it be a slot's.
        held = _Held(self._driver.mark(Stream.OUT), tensor, flat.detach())
        self._held.append(held)
        memory = _host(slot, nbytes)
        return Buffer(memory, nbytes, ready=held, wire=memory, slot=slot)

    def _let_go(self) -> None:
        """Of tensors that were copied."""
        while self._held and self._held[0].reached():
            self._held.popleft()

    def sent(self, buffer: Buffer) -> None:
        if buffer.slot is not None:
            self._send_slots.give(buffer.slot, buffer.ready)
            buffer.slot = None

    settle = staticmethod(settled)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._driver.copy_to_host(tensor.detach())

    # --- waits of one stream for another; the tests take out one at a time ---

    def _await_maker(self) -> None:
        """The copy to the host waits for the work that makes the tensor."""
        self._driver.wait(Stream.OUT, self._driver.mark(Stream.COMPUTE))

    def _await_readers(self, readers: Mark) -> None:
        """The copy to the device waits for the work that reads what lies there."""
        self._driver.wait(Stream.IN, readers)

    def _await_landing(self, landed: Mark) -> None:
        """Compute waits for the message's copy to the device."""
        self._driver.wait(Stream.COMPUTE, landed)

    # --- time and the rest ---

    def finish(self) -> None:
        self._driver.finish()
        self._held.clear()

    def anchor(self) -> None:
        self._anchor = self._driver.anchor()

    def take_copies(self) -> list[Copy]:
        found, self._copies = self._copies, []
        return found

    def stamp(self) -> Stamp:
        return self._stamp(Stream.COMPUTE)

    def _stamp(self, stream: Stream) -> Stamp:
        """(Event, the anchor it is measured from). Events tell time in float32 milliseconds: 60 ns off a second after
        the anchor, and so each step has its own.
        """
        if self._anchor is None:
            self.anchor()
        return self._driver.stamp(stream), self._anchor

    def time_ns(self, stamp: Stamp) -> int:
        event, (anchor, anchor_ns) = stamp
        return int(anchor_ns + round(self._driver.elapsed_ms(anchor, event) * 1e6))

    def repeat_bits(self) -> None:
        self._driver.repeat_bits()

    def seed(self, value: int) -> object:
        """Both generators: a layer may draw on the host, as for whether it is left out."""
        generators = (self._driver.generator, torch.default_generator)
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(value)
        return before

    def set_generator(self, state: Any) -> None:
        self._driver.generator.set_state(state[0])
        torch.default_generator.set_state(state[1])


def _host(slot: Slot, nbytes: int) -> HostMemory:
    memory = slot.first(nbytes)
    assert isinstance(memory, np.ndarray)
    return memory

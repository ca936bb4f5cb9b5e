"""What the engine asks of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt
import torch

from mpipipe.device.memory import DeviceMemory

ALIGNMENT = 64
"""Every buffer and every layer's input starts on a multiple of this many bytes: another alignment can give other
bits.
"""

HostMemory: TypeAlias = npt.NDArray[Any]
"""One-dimensional contiguous NumPy array of unsigned bytes."""

Memory: TypeAlias = HostMemory | DeviceMemory
"""What a transport sends from and receives into. Both have ``nbytes`` and give pieces of themselves by slices."""

Stamp: TypeAlias = Any
"""A moment in the course of the device's work, as ``Device.stamp`` made it."""


class Copy(NamedTuple):
    """A copy of a message, or of a part of one, to host memory or from it: when it began and ended."""

    to_host: bool
    begun: Stamp
    ended: Stamp
    nbytes: int


class Mark(Protocol):
    """A place in the device's work, passed once all that was issued before it is done."""

    def reached(self) -> bool:
        """Whether it has been passed. Never blocks; stays true."""


@dataclass(slots=True)
class Buffer:
    """Bytes that a message travels in.

    ``memory`` has exactly ``nbytes`` bytes and starts on a multiple of ``ALIGNMENT``. Whoever took the buffer owns it
    until it gives it back to its pool; while a request is open on it, nobody writes to it.
    """

    memory: Memory
    nbytes: int
    owner: object = None
    """The tensor whose memory this is, when the buffer only wraps it; keeps that tensor alive."""
    view: torch.Tensor | None = None
    """The last tensor that ``Device.tensor`` made of this memory, for the next message of the same shape and type."""
    uses: int = 0
    """Tensors in its memory when it was made."""
    ready: Mark | None = None
    """Of an outgoing buffer: its bytes are in ``message`` once this is reached; None: they are."""
    free: Mark | None = None
    """Of a receive buffer: a message may be received into it once this is reached; None: it may now."""
    wire: HostMemory | None = None
    """What is sent from or received into in place of ``memory``: pinned host memory."""
    landing: bool = False
    """Of a receive buffer: once the message is there, ``Device.landed`` comes before ``Device.tensor``."""
    slot: Any = None
    """The device's own."""

    @property
    def message(self) -> Memory:
        """What a transport sends from or receives into."""
        return self.memory if self.wire is None else self.wire


class Device(Protocol):
    """A place where tensors live. Twins pass the same contract tests (tests/contracts/test_device.py).

    The host issues work in the order of the program, and need not wait for it. The way of a message in: ``allocate``,
    wait for ``free``, ``receiving``, receive into ``message``, ``landed`` if ``landing``, ``tensor``, use, ``release``.
    The way out: ``outgoing``, wait for ``ready``, send ``message``, ``sent``. A long message through host memory is
    faster in parts, one of which is copied while another is sent: ``receiving_parts`` and ``outgoing_parts``, each part
    a message of its own, in order; both ends cut it alike.
    """

    name: str
    identity: str
    """Tells devices of all nodes apart (a GPU's UUID); "" for host memory."""
    torch_device: torch.device
    timed: bool
    """Whether work goes on after it was issued, so that only ``stamp`` tells when it begins and ends."""
    blocks_at_once: int
    """Blocks of a tensor that an operation over all of it takes together: one where a cache makes a second operation on
    the same block cheap, many where each call costs more than its work.
    """

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer to receive into, of ``nbytes`` bytes, aligned, contents undefined."""

    def receiving(self, buffer: Buffer) -> None:
        """A message is about to be received into ``buffer.message``, which this may set. ``buffer.free`` is reached."""

    def receiving_parts(self, buffer: Buffer) -> list[Buffer]:
        """As ``receiving``: the parts that are about to be received, each into its ``message``, and each ``landed``
        where ``landing``; the buffer itself where there is one part.
        """

    def landed(self, buffer: Buffer) -> None:
        """The message is in ``buffer.message``; begin to bring it to where tensors are made of it. Never blocks."""

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The buffer's memory seen as a contiguous tensor; shares the memory. Its bytes must be exactly the
        buffer's. Work issued from here on sees the message.
        """

    def is_kept(self, buffer: Buffer) -> bool:
        """Whether someone still has a tensor in the memory of ``tensor``'s last result, as a module that keeps its
        input: the memory is theirs then.
        """

    def release(self, buffer: Buffer) -> None:
        """All work that reads the buffer has been issued: ``buffer.free`` is set to when the next message may come."""

    def forget(self, buffer: Buffer) -> None:
        """The caller needs the buffer no more; someone may have a tensor in its memory."""

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        """A buffer with the tensor's bytes, to be sent once ``ready`` is reached. It may share the tensor's memory:
        leave the tensor unchanged until the request is complete."""

    def outgoing_parts(self, tensor: torch.Tensor) -> list[Buffer]:
        """As ``outgoing``, in parts to be sent one after another, each once ``ready``; each goes to ``sent``."""

    def sent(self, buffer: Buffer) -> None:
        """The send of an outgoing buffer is complete; its memory may be used again."""

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is contiguous and aligned, else a copy that is. Detached from any graph."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, after all work that makes it; itself where it lives there. Detached."""

    def finish(self) -> None:
        """Wait until all work issued so far is done."""

    def anchor(self) -> None:
        """Tie the stamps made from here on to the host's clock. May wait for work issued so far."""

    def stamp(self) -> Stamp:
        """The moment when the work issued so far is done and the next begins."""

    def take_copies(self) -> list[Copy]:
        """Copies since the last call, in no order. To be asked after ``finish``."""

    def time_ns(self, stamp: Stamp) -> int:
        """A stamp as ``time.perf_counter_ns`` would have told it. To be asked after ``finish``."""

    def repeat_bits(self) -> None:
        """From here on torch takes kernels that give the same bits each time, where it has them: some are slower, and
        it warns of an operation without one. The host's all do.
        """

    def seed(self, value: int) -> object:
        """Let the generators that a user's modules draw from, on this device and on the host, start at ``value``; their
        state before, for ``set_generator``.
        """

    def set_generator(self, state: Any) -> None:
        """Let them go on from a state that ``seed`` returned."""

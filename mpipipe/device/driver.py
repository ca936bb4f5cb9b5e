"""What ``StreamDevice`` asks of a kind of GPU: three streams, marks, copies that go on alone, memory."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import torch

from mpipipe.device.protocol import Mark, Memory


class Stream(Enum):
    """Work of one stream is done in the order in which it was issued; work of two in any order, but for what
    ``Driver.wait`` says.
    """

    COMPUTE = 0
    """Torch's own: everything that the user's modules do."""
    OUT = 1
    """Copies to host memory that is sent from."""
    IN = 2
    """Copies from host memory that was received into."""


class Slot:
    """Memory that a driver allocated once: ``nbytes`` bytes from ``address`` on, a multiple of ``ALIGNMENT``.

    ``bytes``: the same memory as a one-dimensional tensor of unsigned bytes; None for pinned host memory.
    """

    __slots__ = ("_last", "address", "bytes", "memory", "nbytes")

    def __init__(self, memory: Memory, address: int, nbytes: int, bytes: torch.Tensor | None = None) -> None:
        self.memory = memory
        self.address = address
        self.nbytes = nbytes
        self.bytes = bytes
        self._last = memory

    def first(self, nbytes: int) -> Memory:
        """Its first bytes. The same object for the same size again, so that a transport finds what it left there."""
        if self._last.nbytes != nbytes:
            self._last = self.memory[:nbytes]
        return self._last


class Driver(Protocol):
    """The calls of a GPU's runtime, and nothing else: what must wait for what is said in ``StreamDevice``.

    ``generator``: what torch's modules draw from on this device. All calls come from one thread. Unless said otherwise
    none of them waits for work that was issued.
    """

    name: str
    identity: str
    torch_device: torch.device
    generator: torch.Generator

    def device_memory(self, nbytes: int) -> Slot:
        """New device memory that other processes of this node can open (CUDA IPC), contents undefined. May wait."""

    def pinned_memory(self, nbytes: int) -> Slot:
        """New page-locked host memory as a NumPy array, contents undefined. May wait."""

    def copy_out(self, target: Slot, tensor: torch.Tensor, nbytes: int, stream: Stream) -> None:
        """Copy the bytes of a contiguous tensor to the start of ``target``. Holds neither."""

    def copy_in(self, target: Slot, source: Slot, nbytes: int, stream: Stream, offset: int = 0) -> None:
        """Copy the first bytes of pinned memory to device memory, from byte ``offset`` of ``target`` on."""

    def mark(self, stream: Stream) -> Mark:
        """A mark after all work issued on ``stream`` so far."""

    def wait(self, stream: Stream, mark: Any) -> None:
        """What is issued on ``stream`` from here on begins once ``mark`` is reached."""

    def stamp(self, stream: Stream) -> Any:
        """As a mark, that also tells its time."""

    def anchor(self) -> tuple[Any, int]:
        """A stamp of the compute stream, and ``time.perf_counter_ns`` when it was reached. Waits for it."""

    def elapsed_ms(self, earlier: Any, later: Any) -> float:
        """Milliseconds between two stamps that were reached."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, behind all work of the compute stream. Waits for it."""

    def repeat_bits(self) -> None:
        """As ``Device.repeat_bits``. Before the first matrix product: cuBLAS looks at its variable then."""

    def finish(self) -> None:
        """Wait for all work of all three streams."""

"""What the engine asks of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
import torch

ALIGNMENT = 64
"""Every buffer and every layer's input starts on a multiple of this many bytes: another alignment can give other
bits.
"""

Memory: TypeAlias = npt.NDArray[Any]
"""One-dimensional contiguous array of unsigned bytes: NumPy's on the host, CuPy's on a GPU. MPI takes both."""


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


class Device(Protocol):
    """A place where tensors live. Twins pass the same contract tests (tests/contracts/test_device.py)."""

    name: str
    torch_device: torch.device

    def allocate(self, nbytes: int) -> Buffer:
        """New memory of ``nbytes`` bytes, aligned, contents undefined."""

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The buffer's memory seen as a contiguous tensor; shares the memory. Its bytes must be exactly the
        buffer's.
        """

    def is_kept(self, buffer: Buffer) -> bool:
        """Whether someone still has a tensor in the memory of ``tensor``'s last result, as a module that keeps its
        input: the memory is theirs then.
        """

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        """A buffer with the tensor's bytes, ready to be sent. It may share the tensor's memory: leave the tensor
        unchanged until the request is complete."""

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is contiguous and aligned, else a copy that is. Detached from any graph."""

    def seed(self, value: int) -> torch.Tensor:
        """Let the generator that a user's modules draw from on this device start at ``value``; its state before, for
        ``set_generator``.
        """

    def set_generator(self, state: torch.Tensor) -> None:
        """Let that generator go on from a state that ``seed`` returned."""

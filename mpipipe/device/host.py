"""The NumPy twin: tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mpipipe.device.protocol import ALIGNMENT, Buffer

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class HostDevice:
    """Host memory. Sends go straight out of the tensor's own memory (no copy)."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def allocate(self, nbytes: int) -> Buffer:
        raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return Buffer(raw[start : start + nbytes], nbytes)

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        view = buffer.view
        if view is None or view.dtype != dtype or view.shape != shape:
            view = buffer.view = torch.from_numpy(buffer.memory).view(dtype).view(shape)
            buffer.uses = _uses(view)
        return view

    def is_kept(self, buffer: Buffer) -> bool:
        return _count is None or (buffer.view is not None and _uses(buffer.view) > buffer.uses)

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        if tensor.requires_grad or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            settled = self.settle(tensor)
            tensor = tensor if settled.data_ptr() == tensor.data_ptr() else settled  # it lives while it is being sent
        else:
            settled = tensor
        try:
            memory = settled.numpy().reshape(-1).view(np.uint8)
        except TypeError:  # a type that NumPy lacks, as bfloat16
            memory = settled.view(-1).view(torch.uint8).numpy()
        return Buffer(memory, memory.nbytes, tensor)

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach() if tensor.requires_grad else tensor
        if detached.is_conj() or detached.is_neg():
            detached = detached.resolve_conj().resolve_neg()
        if detached.is_contiguous() and detached.data_ptr() % ALIGNMENT == 0:
            return _usual_strides(detached) if 1 in detached.shape else detached
        return detached.clone(memory_format=torch.contiguous_format)

    def seed(self, value: int) -> torch.Tensor:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(value)
        return before

    def set_generator(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors have this one's memory, by torch's own count; 0 for a torch that does not tell, with which no
    buffer is used again.
    """
    return 0 if _count is None else _count(tensor.untyped_storage()._cdata)


def _usual_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor as a received one is strided. A dimension of size 1 may have any stride, and torch takes
    kernels of other bits by it, as for channels last.
    """
    stride, usual = 1, True
    for size, found in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        usual = usual and found == stride
        stride *= size
    return tensor if usual else tensor.view(-1).view(tensor.shape)

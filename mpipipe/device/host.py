"""The NumPy twin: tensors in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mpipipe.device.protocol import ALIGNMENT, Buffer


class HostDevice:
    """Host memory. Sends go straight out of the tensor's own memory (no copy)."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def allocate(self, nbytes: int) -> Buffer:
        raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return Buffer(raw[start : start + nbytes], nbytes)

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(buffer.memory).view(dtype).view(shape)

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        settled = self.settle(tensor)
        flat = settled.view(-1)
        if flat.numel():
            flat = flat.view(torch.uint8)
        memory = flat.numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
        return Buffer(memory, memory.nbytes, owner=settled)

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach().resolve_conj().resolve_neg()
        if detached.is_contiguous() and detached.data_ptr() % ALIGNMENT == 0:
            return detached
        return detached.clone(memory_format=torch.contiguous_format)

    @contextmanager
    def seeded(self, value: int) -> Iterator[None]:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(value)
        try:
            yield
        finally:
            generator.set_state(before)

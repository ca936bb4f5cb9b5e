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
        view = buffer.view
        if view is None or view.dtype != dtype or view.shape != shape:
            view = buffer.view = torch.from_numpy(buffer.memory).view(dtype).view(shape)
        return view

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        settled = self.settle(tensor)
        try:
            memory = settled.numpy().reshape(-1).view(np.uint8)
        except TypeError:  # a type that NumPy lacks, as bfloat16
            memory = settled.view(-1).view(torch.uint8).numpy()
        return Buffer(memory, memory.nbytes, owner=settled)

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()
        if detached.is_conj() or detached.is_neg():
            detached = detached.resolve_conj().resolve_neg()
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

"""The NumPy twin: tensors in host memory."""

from __future__ import annotations

import time

import numpy as np
import torch

from mpipipe.device.protocol import ALIGNMENT, Buffer, Copy, Stamp
from mpipipe.device.tensors import is_kept, settled, uses


class HostDevice:
    """Host memory. Sends go straight out of the tensor's own memory (no copy). Work is done when it was issued."""

    name = "cpu"
    identity = ""
    torch_device = torch.device("cpu")
    timed = False
    blocks_at_once = 1

    def allocate(self, nbytes: int) -> Buffer:
        raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return Buffer(raw[start : start + nbytes], nbytes)

    def receiving(self, buffer: Buffer) -> None:
        pass

    def receiving_parts(self, buffer: Buffer) -> list[Buffer]:
        return [buffer]

    def landed(self, buffer: Buffer) -> None:
        pass

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        view = buffer.view
        if view is None or view.dtype != dtype or view.shape != shape:
            assert isinstance(buffer.memory, np.ndarray)
            view = buffer.view = torch.from_numpy(buffer.memory).view(dtype).view(shape)
            buffer.uses = uses(view)
        return view

    is_kept = staticmethod(is_kept)

    def release(self, buffer: Buffer) -> None:
        pass

    def forget(self, buffer: Buffer) -> None:
        pass

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        if tensor.requires_grad or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            flat = settled(tensor)
            tensor = tensor if flat.data_ptr() == tensor.data_ptr() else flat  # it lives while it is being sent
        else:
            flat = tensor
        try:
            memory = flat.numpy().reshape(-1).view(np.uint8)
        except TypeError:  # a type that NumPy lacks, as bfloat16
            memory = flat.view(-1).view(torch.uint8).numpy()
        return Buffer(memory, memory.nbytes, tensor)

    def outgoing_parts(self, tensor: torch.Tensor) -> list[Buffer]:
        return [self.outgoing(tensor)]

    def sent(self, buffer: Buffer) -> None:
        pass

    settle = staticmethod(settled)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def finish(self) -> None:
        pass

    def anchor(self) -> None:
        pass

    stamp = staticmethod(time.perf_counter_ns)

    def take_copies(self) -> list[Copy]:
        return []

    def time_ns(self, stamp: Stamp) -> int:
        return int(stamp)

    def repeat_bits(self) -> None:
        pass

    def seed(self, value: int) -> torch.Tensor:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(value)
        return before

    def set_generator(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

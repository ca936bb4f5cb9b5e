"""The driver of NVIDIA GPUs: memory by CuPy, streams and events by torch. The only file that imports CuPy.

Both libraries work in the device's primary context, so addresses and streams of one are the other's too. Torch decides
which memory a tensor has and when the next one gets it; CuPy's allocations are outside of it and stay where they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from mpipipe.device.driver import Slot, Stream
from mpipipe.device.memory import DeviceMemory

_ANCHOR_TRIES = 5
_ANCHOR_NEAR_NS = 20_000


class _Mark:
    """An event of a stream, recorded once."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def reached(self) -> bool:
        return bool(self.event.query())


class CudaDriver:
    """One GPU, by its number among the visible ones; the current device of both libraries from here on.

    Compute is torch's current stream at that time, unless changed the legacy default one, which every thread of the
    user's shares. Torch makes its other streams non-blocking: they do not wait for that one by themselves.
    """

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        torch.cuda.init()
        cupy.cuda.Device(index).use()
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.identity = str(torch.cuda.get_device_properties(index).uuid)
        self.generator: torch.Generator = torch.cuda.default_generators[index]
        self._runtime = cupy.cuda.runtime
        self._streams: dict[Stream, torch.cuda.Stream] = {
            Stream.COMPUTE: torch.cuda.current_stream(self.torch_device),
            Stream.OUT: torch.cuda.Stream(self.torch_device),
            Stream.IN: torch.cuda.Stream(self.torch_device),
        }
        self._pointers = {stream: int(found.cuda_stream) for stream, found in self._streams.items()}

    # --- memory ---

    def device_memory(self, nbytes: int) -> Slot:
        """By ``cudaMalloc`` itself: CuPy's pools and torch's may be of stream-ordered or virtual memory, which CUDA IPC
        does not open.
        """
        allocated = self._with_room(lambda: cupy.cuda.Memory(nbytes))
        array = cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(allocated, 0))
        address = int(array.data.ptr)
        return Slot(DeviceMemory(address, nbytes, array), address, nbytes, from_dlpack(array))

    def _with_room(self, allocate: Callable[[], Any]) -> Any:
        """Torch keeps freed memory for itself: where there is none left, it gives back what it does not use."""
        try:
            return allocate()
        except self._runtime.CUDARuntimeError as error:
            if error.status != self._runtime.errorMemoryAllocation:
                raise
        torch.cuda.empty_cache()
        return allocate()

    def pinned_memory(self, nbytes: int) -> Slot:
        pointer = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
        memory = np.frombuffer(pointer, dtype=np.uint8, count=nbytes)  # keeps the pointer, which keeps the memory
        return Slot(memory, int(pointer.ptr), nbytes)

    # --- copies ---

    def copy_out(self, target: Slot, tensor: torch.Tensor, nbytes: int, stream: Stream) -> None:
        self._copy(target.address, tensor.data_ptr(), nbytes, stream)

    def copy_in(self, target: Slot, source: Slot, nbytes: int, stream: Stream, offset: int = 0) -> None:
        self._copy(target.address + offset, source.address, nbytes, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Asynchronous: host memory is pinned on either side. Which side is the host's, the runtime sees."""
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, self._pointers[stream])

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._streams[Stream.COMPUTE]):
            return tensor.to("cpu")

    # --- order ---

    def mark(self, stream: Stream) -> _Mark:
        return _Mark(self._streams[stream])

    def wait(self, stream: Stream, mark: _Mark) -> None:
        self._streams[stream].wait_event(mark.event)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def repeat_bits(self) -> None:
        """As torch's notes on reproducibility have it. Memory that nobody has written is left as it is: filling it
        costs a pass over it, and nothing here reads it.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    # --- time ---

    def stamp(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[stream])
        return event

    def anchor(self) -> tuple[torch.cuda.Event, int]:
        """On an idle stream an event is reached between its issue and the end of a wait for it: the middle of the
        shortest of a few such times.
        """
        self._streams[Stream.COMPUTE].synchronize()
        shortest, found = -1, None
        for _ in range(_ANCHOR_TRIES):
            before = time.perf_counter_ns()
            event = self.stamp(Stream.COMPUTE)
            event.synchronize()
            took = time.perf_counter_ns() - before
            if found is None or took < shortest:
                shortest, found = took, (event, before + took // 2)
            if shortest <= _ANCHOR_NEAR_NS:
                break
        assert found is not None
        return found

    def elapsed_ms(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later))

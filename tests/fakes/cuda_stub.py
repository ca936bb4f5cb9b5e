"""As much of CuPy and of torch.cuda as ``mpipipe.device.cuda`` calls, in host memory, with the arguments that the real
ones take. It does everything at once: it tells misspelt calls, not missing waits.
"""

from __future__ import annotations

import ctypes
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

MEMORY_ALLOCATION = 2


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Memory:
    """Device memory of ``size`` bytes; ``room`` is what is left to allocate."""

    room = 1 << 40

    def __init__(self, size: int) -> None:
        if size > Memory.room:
            raise CUDARuntimeError(MEMORY_ALLOCATION)
        self.size = size
        self._raw = np.zeros(size + 256, dtype=np.uint8)
        self.ptr = self._raw.ctypes.data + -self._raw.ctypes.data % 256


class MemoryPointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset


class PinnedMemory(Memory):
    def __init__(self, size: int, flags: int = 0) -> None:
        super().__init__(size)


def pinned_pointer(mem: PinnedMemory, offset: int) -> Any:
    """CuPy's has the buffer protocol, format "b"; so has an array of ctypes, which gets the pointer's attribute."""

    class PinnedMemoryPointer(ctypes.c_int8 * mem.size):  # type: ignore[misc]
        pass

    found = PinnedMemoryPointer.from_address(mem.ptr + offset)
    found.ptr = mem.ptr + offset
    found.mem = mem
    return found


class ndarray:
    def __init__(self, shape: tuple[int, ...], dtype: Any = float, memptr: MemoryPointer | None = None) -> None:
        assert memptr is not None
        self.data = memptr
        raw = (ctypes.c_uint8 * shape[0]).from_address(memptr.ptr)
        raw.keeps = memptr
        self.array = np.frombuffer(raw, dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Stream:
    handles = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        Stream.handles += 8
        self.cuda_stream = Stream.handles

    def wait_event(self, event: Event) -> None:
        assert event.recorded_ns is not None

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timing = enable_timing
        self.recorded_ns: int | None = None

    def record(self, stream: Stream) -> None:
        assert self.recorded_ns is None, "an event is recorded once"
        self.recorded_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        assert self.timing
        assert end_event.timing
        assert self.recorded_ns is not None
        assert end_event.recorded_ns is not None
        return float(np.float32((end_event.recorded_ns - self.recorded_ns) / 1e6))


class _Context:
    def __init__(self, stream: Stream) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put both in place. Returns the list that is added to: what was called once."""
    calls: list[str] = []
    default = Stream()
    default.cuda_stream = 0

    def memcpy_async(target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 4
        calls.append(f"memcpy on {stream}")
        ctypes.memmove(target, source, size)

    cupy = ModuleType("cupy")
    runtime = SimpleNamespace(
        memcpyAsync=memcpy_async,
        memcpyDefault=4,
        CUDARuntimeError=CUDARuntimeError,
        errorMemoryAllocation=MEMORY_ALLOCATION,
    )

    class Device:
        def __init__(self, device: int) -> None:
            self.id = device

        def use(self) -> None:
            calls.append(f"cupy device {self.id}")

    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=pinned_pointer,
        runtime=runtime,
    )
    cupy.ndarray, cupy.uint8 = ndarray, np.uint8  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    properties = SimpleNamespace(uuid="0f1e2d3c-0000-1111-2222-333344445555")
    replaced: dict[str, Any] = {
        "set_device": lambda index: calls.append(f"torch device {index}"),
        "init": lambda: calls.append("torch init"),
        "get_device_properties": lambda index: properties,
        "default_generators": (torch.default_generator, torch.default_generator),
        "current_stream": lambda device: default,
        "stream": _Context,
        "Stream": Stream,
        "Event": Event,
        "empty_cache": lambda: calls.append("empty cache"),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls

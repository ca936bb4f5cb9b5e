"""A real GPU under the contract of every device, and what only a real one can show. Skipped without one or CuPy."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Iterator

import device_contract as contract
import numpy as np
import pytest
import torch
from device_contract import Twin, reach

from mpipipe.device import DeviceMemory, Memory, StreamDevice, open_device

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy"),
    pytest.mark.filterwarnings("default"),  # of the libraries, when they are imported
]

SLEEP_CYCLES = 1_000_000
"""Of a kernel that only waits: about half a millisecond."""


class Gpu:
    """The device and what stands for MPI and for kernels that take a while."""

    def __init__(self, staged: bool) -> None:
        device = open_device("cuda", staged=staged)
        assert isinstance(device, StreamDevice)
        self.device = device
        self._own = torch.cuda.Stream(device.torch_device)  # as an MPI library: never the stream that computes
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def twin(self) -> Twin:
        return Twin(self.device, move=self.move, kernel=self.kernel, end=self.end, own_memory=True)

    def move(self, target: Memory, source: Memory) -> None:
        if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
            target[:] = source
            return
        assert isinstance(target, DeviceMemory)
        assert isinstance(source, DeviceMemory)
        import cupy

        runtime = cupy.cuda.runtime
        pointer = self._own.cuda_stream
        runtime.memcpyAsync(target.address, source.address, target.nbytes, runtime.memcpyDefault, pointer)
        self._own.synchronize()

    def kernel(self, reads: Iterable[torch.Tensor]) -> None:
        """Long, and reads at its end what it read at its beginning."""
        before = [tensor.clone() for tensor in reads]
        torch.cuda._sleep(SLEEP_CYCLES)
        self._seen += [(first, tensor.clone()) for first, tensor in zip(before, reads, strict=True)]

    def end(self) -> None:
        self.device.finish()
        for first, last in self._seen:
            assert torch.equal(first, last), "a message was overwritten while a kernel was reading it"
        self._seen.clear()


@pytest.fixture(params=[True, False], ids=["staged", "aware"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    made = Gpu(request.param)
    yield made
    made.device.finish()


@pytest.mark.parametrize("name", contract.CHECKS)
def test_a_gpu_keeps_the_contract(name: str, gpu: Gpu) -> None:
    contract.CHECKS[name](gpu.twin())


def test_a_tensor_is_seen_without_a_copy(gpu: Gpu) -> None:
    buffer = gpu.device.allocate(1000)
    assert isinstance(buffer.memory, DeviceMemory)
    tensor = gpu.device.tensor(buffer, (250,), torch.float32)
    assert tensor.data_ptr() == buffer.memory.address
    seen = torch.as_tensor(buffer.memory, device=gpu.device.torch_device)  # by the CUDA array interface
    assert seen.data_ptr() == buffer.memory.address
    assert seen.shape == (1000,)


def test_another_process_can_open_a_slot(gpu: Gpu) -> None:
    import cupy

    buffer = gpu.device.allocate(1 << 20)
    assert isinstance(buffer.memory, DeviceMemory)
    assert len(cupy.cuda.runtime.ipcGetMemHandle(buffer.memory.address)) == 64


def test_the_host_waits_for_nothing_on_the_way_out(gpu: Gpu) -> None:
    """20 kernels of milliseconds are issued, and the message behind them, before the first is done."""
    device = gpu.device
    tensor = torch.ones(1 << 20, device=device.torch_device)
    device.sent(_reached(device.outgoing(tensor)))  # its slot exists now
    device.finish()
    begin = time.perf_counter()
    for _ in range(20):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
    out = device.outgoing(tensor.mul_(2))
    issued = time.perf_counter() - begin
    assert out.ready is not None
    assert not out.ready.reached()
    device.finish()
    assert out.ready.reached()
    assert issued < (time.perf_counter() - begin) / 4


def _reached(buffer: contract.Buffer) -> contract.Buffer:
    reach(buffer.ready)
    return buffer


def test_stamps_tell_how_long_a_kernel_took(gpu: Gpu) -> None:
    """Two measures of one thing: the device's clock and the host's, around a wait of tens of milliseconds."""
    device = gpu.device
    torch.cuda._sleep(SLEEP_CYCLES)
    device.finish()
    device.anchor()
    begin = time.perf_counter_ns()
    first = device.stamp()
    torch.cuda._sleep(100 * SLEEP_CYCLES)
    last = device.stamp()
    device.finish()
    took = time.perf_counter_ns() - begin
    measured = device.time_ns(last) - device.time_ns(first)
    assert 0.8 * took < measured <= took + 50_000


def test_ranks_tell_their_gpus_apart(gpu: Gpu) -> None:
    assert len(gpu.device.identity) >= 32
    assert gpu.device.name == f"cuda:{gpu.device.torch_device.index}"

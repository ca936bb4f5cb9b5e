"""The real driver over stubs of CuPy and torch.cuda: what it calls, and with what. No GPU is touched."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import device_contract as contract
import numpy as np
import pytest
import torch
from device_contract import Twin
from fakes import cuda_stub

from mpipipe.device import DeviceMemory, Memory, StreamDevice
from mpipipe.device.driver import Stream


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield cuda_stub.install(monkeypatch)
    sys.modules.pop("mpipipe.device.cuda", None)


def open_driver() -> Any:
    driver = importlib.import_module("mpipipe.device.cuda").CudaDriver(1)
    driver.torch_device = torch.device("cpu")  # where the stub's tensors live
    return driver


def move(target: Memory, source: Memory) -> None:
    if isinstance(target, DeviceMemory) and isinstance(source, DeviceMemory):
        cuda_stub.ctypes.memmove(target.address, source.address, target.nbytes)
    else:
        contract._move(target, source)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "aware"])
@pytest.mark.parametrize("name", contract.CHECKS)
def test_the_driver_keeps_the_contract_over_stubs(name: str, staged: bool, calls: list[str]) -> None:
    contract.CHECKS[name](Twin(StreamDevice(open_driver(), staged), move=move, own_memory=True))


def test_both_libraries_take_the_same_device(calls: list[str]) -> None:
    driver = importlib.import_module("mpipipe.device.cuda").CudaDriver(1)
    assert calls == ["torch device 1", "torch init", "cupy device 1"]
    assert (driver.name, driver.torch_device) == ("cuda:1", torch.device("cuda", 1))
    assert driver.identity == "0f1e2d3c-0000-1111-2222-333344445555"


@pytest.mark.parametrize("staged", [True, False])
def test_a_message_leaves_by_its_stream(staged: bool, calls: list[str]) -> None:
    """The default stream, 0, where memory of the device is copied; one of its own on the way to the host."""
    driver = open_driver()
    device = StreamDevice(driver, staged)
    calls.clear()
    device.outgoing(torch.arange(10.0))
    assert calls == [f"memcpy on {driver._pointers[Stream.OUT] if staged else 0}"]
    assert len(set(driver._pointers.values())) == 3


def test_device_memory_is_known_by_its_address(calls: list[str]) -> None:
    slot = open_driver().device_memory(1000)
    assert isinstance(slot.memory, DeviceMemory)
    assert slot.memory.address == slot.address == slot.bytes.data_ptr()
    assert slot.memory.nbytes == slot.nbytes == slot.bytes.numel() == 1000
    assert slot.memory.owner is not None


def test_pinned_memory_is_a_writable_array(calls: list[str]) -> None:
    slot = open_driver().pinned_memory(1000)
    assert isinstance(slot.memory, np.ndarray)
    assert slot.memory.dtype == np.uint8
    assert slot.memory.shape == (1000,)
    assert slot.memory.ctypes.data == slot.address
    slot.memory[:] = 7
    assert slot.bytes is None


def test_torch_gives_back_what_it_does_not_use(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no memory is left, and only then."""
    driver = open_driver()
    monkeypatch.setattr(cuda_stub.Memory, "room", 100)

    def empty_cache() -> None:
        calls.append("empty cache")
        cuda_stub.Memory.room = 1000

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    calls.clear()
    assert driver.device_memory(512).nbytes == 512
    assert calls == ["empty cache"]
    with pytest.raises(cuda_stub.CUDARuntimeError, match="cudaError 2"):
        driver.device_memory(1024)


def test_bits_repeat_where_that_is_asked_for(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fill = torch.utils.deterministic.fill_uninitialized_memory
    device = StreamDevice(open_driver(), True)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        device.repeat_bits()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill

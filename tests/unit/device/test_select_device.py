"""From ``comm.device`` to a device, and what is said where something is missing. No GPU is touched."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from fakes.late import LateDriver

from mpipipe.device import Device, HostDevice, StreamDevice, device_kind, open_device, select
from mpipipe.errors import DeviceBindingError, MissingDependencyError, SetupError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A machine where all is there: change what is in it before opening a device."""
    has: dict[str, object] = {"cuda": "13.0", "gpus": 2, "cupy": True, "opened": []}
    find = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(has["gpus"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["gpus"])
    monkeypatch.setattr(
        select.importlib.util, "find_spec", lambda name: has["cupy"] or None if name == "cupy" else find(name)
    )

    def import_module(name: str) -> object:
        assert name == "cupy"
        if has["cupy"] == "broken":
            raise ImportError("libnvrtc.so.13: cannot open shared object file")
        return object()

    monkeypatch.setattr(select.importlib, "import_module", import_module)

    class Version:
        @property
        def cuda(self) -> object:
            return has["cuda"]

    monkeypatch.setattr(torch, "version", Version())

    def open_gpu(index: int, staged: bool) -> Device:
        has["opened"] = (index, staged)
        return StreamDevice(LateDriver(), staged)

    monkeypatch.setattr(select, "_open_gpu", open_gpu)
    return has


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize("staged", [True, False])
def test_a_gpu_is_opened_where_all_is_there(machine: dict[str, object], name: str, staged: bool) -> None:
    device = open_device(name, local_rank=1, local_size=4, staged=staged)
    assert isinstance(device, StreamDevice)
    assert device.staged is staged
    assert machine["opened"] == (1, staged)


def test_ranks_of_a_node_take_its_gpus_in_turn(machine: dict[str, object]) -> None:
    taken = []
    for rank in range(5):
        open_device("cuda", local_rank=rank, local_size=5)
        taken.append(machine["opened"])
    assert taken == [(0, True), (1, True), (0, True), (1, True), (0, True)]


def test_the_cpu_is_the_cpu(machine: dict[str, object]) -> None:
    assert isinstance(open_device("cpu"), HostDevice)
    assert machine["opened"] == []


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"cuda": None}, MissingDependencyError, r"was built without CUDA: install torch for your GPU's CUDA version"),
        ({"cuda": None, "cupy": False}, MissingDependencyError, r"without CUDA.*CuPy.*'mpipipe\[cuda12\]'"),
        ({"cupy": False}, MissingDependencyError, r"CuPy is not installed: pip install 'mpipipe\[cuda13\]'\."),
        ({"cupy": False, "cuda": "12.8"}, MissingDependencyError, r"'mpipipe\[cuda12\]'"),
        ({"cupy": False, "gpus": 0}, MissingDependencyError, r"CuPy is not installed.*torch finds no GPU"),
        ({"gpus": 0}, DeviceBindingError, r'"cuda": torch finds no GPU that it can use .*CUDA_VISIBLE_DEVICES'),
    ],
)
def test_what_is_missing_is_told(
    machine: dict[str, object], changes: dict[str, object], error: type[SetupError], text: str
) -> None:
    machine.update(changes)
    with pytest.raises(error, match=rf'comm\.device = .*{text}') as found:
        open_device("cuda")
    assert found.value.exit_code == 3
    assert 'comm.device = "cpu"' in str(found.value)
    assert isinstance(open_device("auto"), HostDevice)
    assert machine["opened"] == []


def test_a_cupy_that_can_not_be_imported(machine: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    machine["cupy"] = "broken"
    with pytest.raises(MissingDependencyError, match=r"can't be imported \(libnvrtc"):
        open_device("cuda")
    with caplog.at_level(logging.WARNING, logger="mpipipe.device.select"):
        assert isinstance(open_device("auto"), HostDevice)
        assert device_kind("auto") == "cpu"
    assert "This rank computes on the CPU" in caplog.text
    assert machine["opened"] == []


def test_a_gpu_that_is_left_alone_is_told(
    machine: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who forgot CuPy computes on the CPU of a GPU node, and wonders why it is slow."""
    machine["cupy"] = False
    monkeypatch.setattr(select, "Path", lambda folder: tmp_path)
    assert device_kind("auto") == "cpu"
    assert not caplog.records
    (tmp_path / "nvidia0").touch()
    assert device_kind("auto") == "cpu"
    assert "this rank computes on the CPU: CuPy is not installed: pip install 'mpipipe[cuda13]'" in caplog.text
    caplog.clear()
    assert device_kind("cpu") == "cpu"
    assert not caplog.records


@pytest.mark.parametrize("name", ["gpu", "cuda:1", "", "CPU"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match=r'there are "auto", "cpu" and "cuda"'):
        open_device(name)


def test_cupy_is_not_imported_unasked() -> None:
    open_device("cpu")
    open_device("auto")
    assert "cupy" not in sys.modules or torch.cuda.is_available()

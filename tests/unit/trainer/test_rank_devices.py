"""All ranks compute on one kind of device and send by one path, or all say why not."""

from __future__ import annotations

import logging

import little
import pytest
from fakes.late import LateDriver

from mpipipe.config import Config
from mpipipe.device import Device, HostDevice, StreamDevice
from mpipipe.errors import ConfigError, DeviceBindingError, MissingDependencyError, NotCudaAwareError
from mpipipe.trainer import Trainer, devices
from mpipipe.trainer.devices import open_rank_device
from mpipipe.transport import Transport, run_ranks, solo
from mpipipe.transport.proof import MessagePath


class Opened:
    """Late devices in place of GPUs; ``at``: the rank of each, by the order of its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str = "staged", identity: str = "") -> None:
        self.asked: list[tuple[int, int, bool]] = []
        monkeypatch.setattr(devices, "device_kind", lambda name: "cuda")
        monkeypatch.setattr(devices, "decide_path", lambda transport, comm: MessagePath(path, "for the test"))  # type: ignore[arg-type]
        monkeypatch.setattr(devices, "open_device", self._open)
        self._identity = identity

    def _open(self, name: str, *, local_rank: int = 0, local_size: int = 1, staged: bool = True) -> Device:
        assert name == "cuda"
        self.asked.append((local_rank, local_size, staged))
        driver = LateDriver(local_rank)
        driver.identity = self._identity or driver.identity
        return StreamDevice(driver, staged)


def opened(p: int, **comm: str) -> list[tuple[str, str]]:
    config: Config = little.config(**{f"comm__{key}": value for key, value in comm.items()})

    def work(transport: Transport) -> tuple[str, str]:
        device, path = open_rank_device(config, transport)
        return device.name, path

    return run_ranks(p, work)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_ranks_compute_on_the_host(device: str) -> None:
    assert opened(2, device=device) == [("cpu", "host")] * 2


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_of_all_ranks() -> None:
    said = r'comm\.device = "cuda": .*CuPy is not installed.*comm\.device = "cpu"'
    with pytest.raises(MissingDependencyError, match=said):
        opened(3, device="cuda")
    with pytest.raises(MissingDependencyError):
        Trainer(little.config(comm__device="cuda"), [little.linear()], little.square_loss, transport=solo())


def test_a_path_out_of_gpu_memory_without_a_gpu_is_an_error_of_all_ranks() -> None:
    with pytest.raises(DeviceBindingError, match=r'comm\.path = "cuda-aware": no rank has a GPU'):
        opened(2, path="cuda-aware")


def test_ranks_that_ask_for_different_devices_or_paths_are_told() -> None:
    for given in ({"comm__device": "cpu"}, {"comm__path": "staged"}):

        def work(transport: Transport, given: dict[str, str] = given) -> None:
            open_rank_device(little.config(**(given if transport.rank == 1 else {})), transport)

        with pytest.raises(ConfigError, match=r'rank 0 was given comm\.device = "auto", .*, rank 1 "'):
            run_ranks(3, work)


def test_ranks_with_and_without_a_gpu_do_not_compute_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits differ between kinds of device, and a node without a driver would be found out by its speed alone."""
    config = little.config()

    def work(transport: Transport) -> None:
        open_rank_device(config, transport)

    kinds = iter(["cuda", "cpu", "cuda"])
    monkeypatch.setattr(devices, "device_kind", lambda name: next(kinds))
    said = r'2 of 3 ranks have a GPU, and rank \d has none\. .*comm\.device = "cpu"'
    with pytest.raises(DeviceBindingError, match=said):
        run_ranks(3, work)


@pytest.mark.parametrize("path", ["staged", "cuda-aware"])
def test_each_rank_opens_the_device_of_its_place_on_the_node(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Opened(monkeypatch, path)
    assert opened(3) == [("late:0", path)] * 3
    assert sorted(found.asked) == [(rank, 3, path == "staged") for rank in range(3)]


def test_ranks_that_share_a_gpu_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Opened(monkeypatch, identity="GPU-1")
    with caplog.at_level(logging.WARNING):
        opened(2)
    assert [record.message for record in caplog.records if "share one GPU" in record.message]
    caplog.clear()
    Opened(monkeypatch)
    opened(2)
    assert not caplog.records


def test_a_path_that_is_asked_for_is_tried_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Opened(monkeypatch, "cuda-aware")
    assert opened(3, path="cuda-aware") == [("late:0", "cuda-aware")] * 3

    class Deaf(StreamDevice):
        """Memory that the messages do not reach."""

        def outgoing(self, tensor: object) -> object:  # type: ignore[override]
            buffer = super().outgoing(tensor)  # type: ignore[arg-type]
            self.finish()
            buffer.message[:] = 0  # type: ignore[index]
            return buffer

    monkeypatch.setattr(devices, "open_device", lambda *given, **more: Deaf(LateDriver(1), False))
    with pytest.raises(NotCudaAwareError, match=r'Set comm\.path = "staged"'):
        opened(2, path="cuda-aware")


def test_the_host_is_opened_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch for a GPU takes time, and touches the driver."""

    def never(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(devices, "device_kind", never)
    device, path = open_rank_device(little.config(comm__device="cpu"), solo())
    assert isinstance(device, HostDevice)
    assert path == "host"

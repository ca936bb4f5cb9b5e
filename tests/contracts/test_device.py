"""Host memory, and a GPU that is late, under the contract of every device."""

from __future__ import annotations

import device_contract as contract
import pytest
from device_contract import Twin
from fakes.late import LateDriver

from mpipipe.device import HostDevice, StreamDevice


def late_twin(seed: int, staged: bool) -> Twin:
    driver = LateDriver(seed)
    return Twin(StreamDevice(driver, staged), kernel=driver.kernel, end=driver.check, own_memory=True)


@pytest.mark.parametrize("name", contract.CHECKS)
def test_host_memory_keeps_the_contract(name: str) -> None:
    contract.CHECKS[name](Twin(HostDevice()))


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "aware"])
@pytest.mark.parametrize("name", contract.CHECKS)
def test_a_late_gpu_keeps_the_contract(name: str, staged: bool) -> None:
    for seed in range(5):
        contract.CHECKS[name](late_twin(seed, staged))

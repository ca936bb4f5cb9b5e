"""The late GPU itself: what it does late, and what it tells of."""

from __future__ import annotations

import device_contract as contract
import pytest
import torch
from device_contract import Twin, numbers, reach, send
from fakes.late import LateDriver
from fakes.late_stage import late_stage
from torch import nn

from mpipipe.device import Buffer, StreamDevice
from mpipipe.device.driver import Stream
from mpipipe.stage import Activation, MicrobatchKey, Stage, StageLayer


def test_nothing_is_done_until_time_passes() -> None:
    driver = LateDriver(3)
    done: list[int] = []
    for k in range(20):
        driver.kernel(check=lambda k=k: done.append(k))
    mark = driver.mark(Stream.COMPUTE)
    assert done == []
    counts = []
    while not mark.reached():
        counts.append(len(done))
    assert done == list(range(20))
    assert len(set(counts)) > 5, "time passes in small steps"
    assert mark.reached()


def test_two_streams_go_on_in_a_random_order() -> None:
    orders = set()
    for seed in range(20):
        driver = LateDriver(seed)
        order: list[str] = []
        for _ in range(3):
            driver.kernel(check=lambda order=order: order.append("c"))
            driver._issue(Stream.IN, lambda order=order: order.append("i"))
        while len(order) < 6:
            driver.pass_time()
        orders.add("".join(order))
    assert len(orders) > 5


def test_a_seed_repeats_itself() -> None:
    def passes(seed: int) -> int:
        driver = LateDriver(seed)
        for _ in range(30):
            driver.kernel()
        mark, count = driver.mark(Stream.COMPUTE), 0
        while not mark.reached():
            count += 1
        return count

    assert [passes(seed) for seed in range(5)] == [passes(seed) for seed in range(5)]
    assert len({passes(seed) for seed in range(5)}) > 1


def test_a_wait_goes_through_several_streams() -> None:
    driver = LateDriver(0)
    order: list[str] = []
    driver.kernel(check=lambda: order.append("made"))
    driver.wait(Stream.OUT, driver.mark(Stream.COMPUTE))
    driver._issue(Stream.OUT, lambda: order.append("out"))
    driver.wait(Stream.IN, driver.mark(Stream.OUT))
    driver._issue(Stream.IN, lambda: order.append("in"))
    driver.wait(Stream.COMPUTE, driver.mark(Stream.IN))
    assert order == ["made", "out", "in"]


def test_violations_are_raised_at_the_end() -> None:
    driver = LateDriver(0)
    tensor, slot = torch.zeros(4), driver.pinned_memory(64)
    driver.kernel()
    driver.copy_out(slot, tensor, 16, Stream.OUT)
    with pytest.raises(AssertionError, match="before the kernel that makes it is done"):
        driver.check()
    assert slot.memory[:16].tolist() != [0] * 16, "garbage"


def test_what_the_host_has_seen_needs_no_wait() -> None:
    driver = LateDriver(0)
    tensor, slot = torch.zeros(4), driver.pinned_memory(64)
    driver.kernel()
    reach(driver.mark(Stream.COMPUTE))
    driver.copy_out(slot, tensor, 16, Stream.OUT)
    driver.check()
    assert slot.memory[:16].tolist() == [0] * 16


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def given(twin: Twin, start: float) -> tuple[Buffer, torch.Tensor]:
    into = twin.device.allocate(4 * 24)
    send(twin, twin.device.outgoing(numbers(twin, 24, start)), into)
    return into, twin.device.tensor(into, (3, 8), torch.float32)


@pytest.mark.parametrize("split", [False, True])
def test_a_late_stage_reads_its_input_until_its_backward_is_done(split: bool) -> None:
    """Written to after that, nothing is wrong; before, it is told, at any of the stage's methods."""
    for wrong in (None, "input", "gradient"):
        driver = LateDriver(1)
        device = StreamDevice(driver, staged=False)
        twin = Twin(device, kernel=driver.kernel)
        stage = late_stage(Stage(1, [StageLayer(TwoLayers(), 1, "1")], device, None), driver)
        into, inputs = given(twin, 0.5)
        stage.forward(Activation((inputs.requires_grad_(),), (True,)), MicrobatchKey(0, None))
        back, gradient = given(twin, 2.5)
        if split:
            stage.split(True)
            stage.backward_input(0, [gradient])
            stage.backward_weight(0)
        else:
            stage.backward(0, [gradient])
        if wrong is None:
            driver.finish()
        contract._move((back if wrong == "gradient" else into).memory, device.allocate(96).memory)
        driver.finish()
        told = [text for text in driver.violations if "overwritten while a kernel was reading it" in text]
        assert bool(told) is (wrong is not None)

"""Every wait of ``StreamDevice`` is needed: with one taken out, a late GPU computes wrong numbers or tells of it."""

from __future__ import annotations

from collections.abc import Callable

import device_contract as contract
import pytest
import torch
from device_contract import Twin, numbers, reach, send
from fakes.late import LateDriver

from mpipipe.device import Buffer, BufferPool, Mark, StreamDevice


class NoWaitForMaker(StreamDevice):
    def _await_maker(self) -> None:
        pass


class NoWaitForReaders(StreamDevice):
    def _await_readers(self, readers: Mark) -> None:
        pass


class NoWaitForLanding(StreamDevice):
    def _await_landing(self, landed: Mark) -> None:
        pass


class SentAtOnce(StreamDevice):
    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        buffer = super().outgoing(tensor)
        buffer.ready = None
        return buffer


class LetGoAtOnce(StreamDevice):
    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        buffer = super().outgoing(tensor)
        self._held.clear()
        buffer.ready = buffer.ready._mark
        return buffer


class FreeAtOnce(StreamDevice):
    def release(self, buffer: Buffer) -> None:
        self._set_free(buffer, None)


class LandingMemoryFreeAtOnce(StreamDevice):
    def landed(self, buffer: Buffer) -> None:
        super().landed(buffer)
        for free in self._landing_slots._free.values():
            free.append((free.pop()[0], None))


class SentMemoryFreeAtOnce(StreamDevice):
    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        buffer = super().outgoing(tensor)
        self._send_slots.give(buffer.slot)
        buffer.slot = None
        return buffer


class TheirsFreeAtOnce(StreamDevice):
    def is_kept(self, buffer: Buffer) -> bool:
        return False


STREAM = contract.CHECKS["check_a_message_is_sent_behind_the_work_before_it"]
AT_ONCE = contract.CHECKS["check_messages_that_come_at_once"]
KEPT = contract.CHECKS["check_memory_in_which_someone_has_a_tensor_stays_theirs"]


def run(kind: type[StreamDevice], staged: bool, check: Callable[[Twin], None], seed: int) -> list[str]:
    """What was wrong: violations, or the assertion that failed."""
    driver = LateDriver(seed)
    twin = Twin(kind(driver, staged), kernel=driver.kernel, own_memory=True)
    try:
        check(twin)
    except AssertionError as error:
        driver.violations.append(f"wrong numbers: {error}")
    driver.finish()
    return driver.violations


@pytest.mark.parametrize(
    "kind, staged, check, tells",
    [
        (NoWaitForMaker, True, STREAM, "before the kernel that makes it"),
        (NoWaitForReaders, True, STREAM, "before its last reader"),
        (NoWaitForLanding, True, STREAM, "before it was copied in"),
        (SentAtOnce, True, STREAM, "wrong numbers"),
        (SentAtOnce, False, STREAM, "wrong numbers"),
        (LetGoAtOnce, True, STREAM, "let go while it was being copied"),
        (FreeAtOnce, True, STREAM, "before its last reader"),
        (FreeAtOnce, False, AT_ONCE, "overwritten while a kernel was reading it"),
        (LandingMemoryFreeAtOnce, True, AT_ONCE, "changed in host memory while it was copied in"),
        (SentMemoryFreeAtOnce, True, STREAM, "wrong numbers"),
        (SentMemoryFreeAtOnce, False, STREAM, "wrong numbers"),
        (TheirsFreeAtOnce, True, KEPT, "wrong numbers"),
        (TheirsFreeAtOnce, False, KEPT, "wrong numbers"),
    ],
)
def test_a_wait_that_is_taken_out_is_seen(
    kind: type[StreamDevice], staged: bool, check: Callable[[Twin], None], tells: str
) -> None:
    found = [run(kind, staged, check, seed) for seed in range(4)]
    assert all(any(tells in text for text in texts) for texts in found), found
    assert run(StreamDevice, staged, check, 0) == []


def test_a_wait_taken_out_gives_wrong_numbers_too() -> None:
    """Not only the fake's own book-keeping sees it."""
    for kind in (NoWaitForMaker, NoWaitForLanding, LetGoAtOnce, LandingMemoryFreeAtOnce):
        found = [text for seed in range(8) for check in (STREAM, AT_ONCE) for text in run(kind, True, check, seed)]
        assert any("wrong numbers" in text for text in found), kind


def late(staged: bool, seed: int = 0) -> tuple[LateDriver, StreamDevice, Twin]:
    driver = LateDriver(seed)
    device = StreamDevice(driver, staged)
    return driver, device, Twin(device, kernel=driver.kernel, end=driver.check, own_memory=True)


def test_a_tensor_lives_until_it_was_copied_and_no_longer() -> None:
    driver, device, _ = late(staged=True)
    alive = []
    for k in range(3):
        tensor = numbers(Twin(device), 1000, k)
        alive.append(tensor.untyped_storage()._weak_ref())
        driver.kernel()
        out = device.outgoing(tensor)
        del tensor
        assert not torch.UntypedStorage._expired(alive[-1])
        reach(out.ready)
        assert torch.UntypedStorage._expired(alive[-1])
        device.sent(out)
    for reference in alive:
        torch.UntypedStorage._free_weak_ref(reference)


def test_a_message_that_nobody_sends_is_let_go_all_the_same() -> None:
    """As after a step that failed."""
    driver, device, twin = late(staged=True)
    for k in range(5):
        device.outgoing(numbers(twin, 10, k))
    assert len(device._held) == 5
    device.finish()
    assert not device._held
    driver.check()


@pytest.mark.parametrize("staged", [True, False])
def test_memory_stops_growing(staged: bool) -> None:
    """After a few messages none is allocated any more, of sizes that are near to each other neither."""
    driver, device, twin = late(staged)
    pool = BufferPool(device)
    allocated = []
    for k in range(60):
        count = 1000 + k % 7
        out = device.outgoing(numbers(twin, count))
        into = pool.take(out.nbytes)
        send(twin, out, into)
        driver.kernel([device.tensor(into, (count,), torch.float32)])
        pool.give(into)
        if k % 14 == 13:
            pool.drop_all()
        allocated.append((driver.num_device, driver.num_pinned))
    assert allocated[-1] == allocated[20]
    assert driver.num_device <= (7 if staged else 8)
    driver.check()


@pytest.mark.parametrize("staged", [True, False])
def test_only_the_way_through_the_host_has_pinned_memory(staged: bool) -> None:
    driver, device, twin = late(staged)
    out = device.outgoing(numbers(twin, 100))
    into = device.allocate(400)
    device.receiving(into)
    assert (out.wire is not None, into.wire is not None, into.landing) == (staged, staged, staged)
    assert out.message is (out.wire if staged else out.memory)
    assert into.message is (into.wire if staged else into.memory)
    assert (driver.num_pinned, driver.num_device) == ((2, 1) if staged else (0, 2))


def test_a_message_may_arrive_in_host_memory_before_the_last_one_was_read() -> None:
    """Staged, the copy alone waits for the readers; without staging the message does."""
    for staged in (True, False):
        driver, device, twin = late(staged)
        pool = BufferPool(device)
        into = pool.take(40)
        send(twin, device.outgoing(numbers(twin, 10)), into)
        driver.kernel([device.tensor(into, (10,), torch.float32)])
        pool.give(into)
        assert (pool.take(40).free is None) == staged


def test_a_tensor_is_not_made_of_a_message_that_has_not_landed() -> None:
    _, device, _ = late(staged=True)
    into = device.allocate(40)
    device.receiving(into)
    with pytest.raises(AssertionError, match="landed"):
        device.tensor(into, (10,), torch.float32)


def test_sent_twice_gives_the_slot_once() -> None:
    _, device, twin = late(staged=False)
    out = device.outgoing(numbers(twin, 10))
    reach(out.ready)
    device.sent(out)
    device.sent(out)
    assert sum(map(len, device._send_slots._free.values())) == 1


def test_a_received_tensor_that_is_sent_on_stays_until_it_was_copied() -> None:
    """The same object, so that nobody but the copy has it."""
    driver, device, twin = late(staged=True)
    pool = BufferPool(device)
    into = pool.take(4000)
    send(twin, device.outgoing(numbers(twin, 1000, 5)), into)
    on = device.outgoing(device.tensor(into, (1000,), torch.float32))
    assert device.is_kept(into)
    pool.give(into)
    reach(on.ready)
    assert not device.is_kept(into)
    after = pool.take(4000)
    assert after.slot.slot is into.slot.slot
    driver.check()


@pytest.mark.parametrize("staged", [True, False])
def test_a_stamp_without_an_anchor_has_one(staged: bool) -> None:
    _, device, _ = late(staged)
    first, second = device.stamp(), device.stamp()
    device.finish()
    assert 0 < device.time_ns(first) <= device.time_ns(second)


def test_a_stamp_keeps_the_anchor_it_was_made_under() -> None:
    _, device, _ = late(staged=False)
    device.anchor()
    stamp = device.stamp()
    device.finish()
    before = device.time_ns(stamp)
    device.anchor()
    assert device.time_ns(stamp) == before


def test_a_buffer_that_is_lost_is_not_freed() -> None:
    """As in a step that failed: MPI may still write to it, and knows it by its address."""
    _, device, _ = late(staged=False)
    before = device.allocate(4096).memory.ctypes.data
    assert all(device.allocate(4096).memory.ctypes.data != before for _ in range(20))
    assert device._receive_slots.allocated_bytes == 21 * 4096


def test_a_torch_that_does_not_tell_who_has_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is used again then, and none is kept for that."""
    for place in ("streams", "tensors"):
        monkeypatch.setattr(f"mpipipe.device.{place}.TELLS_USES", False)
    _, device, _ = late(staged=False)
    pool = BufferPool(device)
    for _ in range(5):
        pool.give(pool.take(4096))
    assert pool.allocated_buffers == 0
    assert device._receive_slots.allocated_bytes == 0

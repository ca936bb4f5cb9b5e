"""The contract of every device, written once: each ``check_*`` is given one twin.

tests/contracts/test_device.py runs them over host memory and over a GPU that is late, tests/gpu over a real one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from mpipipe.device import ALIGNMENT, Buffer, BufferPool, Device, Mark, Memory


def _move(target: Memory, source: Memory) -> None:
    assert isinstance(target, np.ndarray)
    target[:] = source


def _no_kernel(reads: Iterable[torch.Tensor]) -> None:
    pass


def _nothing() -> None:
    pass


@dataclass
class Twin:
    """A device; ``move`` is what MPI does, ``kernel`` issues work that takes a while behind what was just computed and
    reads the tensors given, ``end`` is called when all is done and raises if something was seen.
    """

    device: Device
    move: Callable[[Memory, Memory], None] = _move
    kernel: Callable[[Iterable[torch.Tensor]], None] = _no_kernel
    end: Callable[[], None] = _nothing
    own_memory: bool = False
    """Whether messages are sent out of copies, and not out of the tensor's own memory."""


def reach(mark: Mark | None) -> None:
    deadline = time.monotonic() + 20
    while mark is not None and not mark.reached():
        assert time.monotonic() < deadline, "a mark that is not reached"


def send(twin: Twin, out: Buffer, into: Buffer) -> None:
    """One message from an outgoing buffer into a receive buffer, as the engine does it."""
    device = twin.device
    reach(into.free)
    device.receiving(into)
    reach(out.ready)
    assert into.message.nbytes == out.message.nbytes == out.nbytes
    twin.move(into.message, out.message)
    device.sent(out)
    if into.landing:
        device.landed(into)
    assert not into.landing


def numbers(twin: Twin, count: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count, device=twin.device.torch_device) + start).to(dtype)


def check_allocated_memory_has_its_size_and_alignment(twin: Twin) -> None:
    device = twin.device
    for nbytes in (0, 1, 63, 64, 65, 4096, 1 << 20):
        views = []
        for _ in range(5):
            buffer = device.allocate(nbytes)
            assert buffer.nbytes == buffer.memory.nbytes == nbytes
            assert buffer.free is None
            view = device.tensor(buffer, (nbytes,), torch.uint8)
            assert view.device == device.torch_device
            assert view.data_ptr() % ALIGNMENT == 0
            views.append(view)
        assert nbytes == 0 or len({view.data_ptr() for view in views}) == 5


def check_a_tensor_shares_its_buffer_s_memory(twin: Twin) -> None:
    device = twin.device
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        buffer = device.allocate(6 * dtype.itemsize)
        tensor = device.tensor(buffer, (2, 3), dtype)
        tensor.copy_(torch.arange(6).view(2, 3))
        again = device.tensor(buffer, (6,), dtype)
        assert again.tolist() == [0, 1, 2, 3, 4, 5]
        assert tensor.is_contiguous()
        assert device.tensor(buffer, (6,), dtype) is again


def check_what_goes_out_comes_in(twin: Twin) -> None:
    """Strided and misaligned tensors, all kinds of types, views that hold a conjugate or a minus, a graph behind them,
    no element and one.
    """
    device = twin.device
    base = torch.randn(9, 8, device=device.torch_device, requires_grad=True)
    plane = torch.randn(4, 6, dtype=torch.complex64, device=device.torch_device)
    forms = [base, base.t(), base[1:, 1:], base.to(torch.bfloat16), base[:0], base.sum(), base[3, 3], base.view(-1)[1:]]
    forms += [plane, plane.conj(), plane.conj().imag, plane.t().conj(), base.detach().expand(2, 9, 8), base > 0]
    forms += [torch.randn(2, 3, 4, 5, device=device.torch_device).to(memory_format=torch.channels_last)]
    for tensor in forms:
        twin.kernel([])
        out = device.outgoing(tensor)
        assert out.nbytes == tensor.numel() * tensor.element_size()
        into = device.allocate(out.nbytes)
        send(twin, out, into)
        arrived = device.tensor(into, tuple(tensor.shape), tensor.dtype)
        assert not arrived.requires_grad
        assert torch.equal(arrived, tensor.detach())
    twin.end()


def check_a_message_is_sent_behind_the_work_before_it(twin: Twin) -> None:
    """A tensor may be let go as soon as it is on its way; what was in a buffer stays until its readers are done."""
    device, pool = twin.device, BufferPool(twin.device)
    wire: deque[tuple[Buffer, Buffer]] = deque()
    there: deque[Buffer] = deque()
    back: list[tuple[Buffer, int]] = []

    def deliver() -> None:
        out, into = wire.popleft()
        send(twin, out, into)
        there.append(into)

    def answer() -> None:
        into = there.popleft()
        arrived = device.tensor(into, (into.nbytes // 4,), torch.float32)
        made = arrived * 2 + 1
        twin.kernel([arrived])
        back.append((device.outgoing(made), made.numel()))
        del arrived, made
        pool.give(into)

    for k in range(40):
        sent = numbers(twin, 100 + 40 * (k % 3), 1000.0 * k)
        twin.kernel([])
        out = device.outgoing(sent)
        del sent
        wire.append((out, pool.take(out.nbytes)))
        if len(wire) == 4:
            deliver()
        if len(there) == 3:
            answer()
    while wire:
        deliver()
    while there:
        answer()
    for k, (out, count) in enumerate(back):
        into = pool.take(out.nbytes)
        send(twin, out, into)
        found = device.copy_to_host(device.tensor(into, (count,), torch.float32))
        assert torch.equal(found, (torch.arange(count) + 1000.0 * k) * 2 + 1), f"message {k}"
        pool.give(into)
    assert pool.allocated_buffers <= 3 * 7
    twin.end()


def check_messages_that_come_at_once(twin: Twin) -> None:
    """All there before the first is used, twice: the second time into buffers whose readers are not done."""
    device, pool = twin.device, BufferPool(twin.device)
    outs = [[device.outgoing(numbers(twin, 200, 1000.0 * k + turn)) for k in range(6)] for turn in range(2)]
    for out in outs[0] + outs[1]:
        reach(out.ready)
        out.ready = None
    made = []
    for turn in range(2):
        intos = [pool.take(800) for _ in range(6)]
        for out, into in zip(outs[turn], intos, strict=True):
            send(twin, out, into)
        for into in intos:
            tensor = device.tensor(into, (200,), torch.float32)
            made.append(tensor + 1)
            twin.kernel([tensor])
            del tensor
            pool.give(into)
    for number, found in enumerate(made):
        turn, k = divmod(number, 6)
        assert torch.equal(device.copy_to_host(found), torch.arange(200) + 1000.0 * k + turn + 1), f"message {number}"
    assert pool.allocated_buffers == 6
    twin.end()


def check_a_long_message_in_parts(twin: Twin) -> None:
    """Cut alike at both ends, sent in order; twice through the same buffer, which someone still reads."""
    device, pool, count = twin.device, BufferPool(twin.device), (9 << 18) + 5
    for turn in range(3):
        whole = numbers(twin, count, float(turn))
        twin.kernel([])
        outs = device.outgoing_parts(whole)
        del whole
        into = pool.take(4 * count)
        reach(into.free)
        parts = device.receiving_parts(into)
        assert [part.nbytes for part in parts] == [out.nbytes for out in outs]
        assert sum(part.nbytes for part in parts) == into.nbytes
        for out, part in zip(outs, parts, strict=True):
            reach(out.ready)
            twin.move(part.message, out.message)
            device.sent(out)
            if part.landing:
                device.landed(part)
        tensor = device.tensor(into, (count,), torch.float32)
        twin.kernel([tensor])
        assert torch.equal(device.copy_to_host(tensor), torch.arange(count) + float(turn))
        del tensor
        pool.give(into)
    assert pool.allocated_buffers == 1
    twin.end()


def check_memory_in_which_someone_has_a_tensor_stays_theirs(twin: Twin) -> None:
    device, pool = twin.device, BufferPool(twin.device)
    kept: list[torch.Tensor] = []
    for k in range(12):
        sent = numbers(twin, 64, 100.0 * k)
        out = device.outgoing(sent)
        into = pool.take(256)
        send(twin, out, into)
        tensor = device.tensor(into, (64,), torch.float32)
        if k % 3 == 0:
            kept.append(tensor.view(8, 8)[2:])
            assert device.is_kept(into)
        twin.kernel([tensor])
        del tensor
        pool.give(into)
        assert (pool.allocated_buffers, pool.allocated_bytes) == ((0, 0) if k % 3 == 0 else (1, 256))
    for k, tensor in zip(range(0, 12, 3), kept, strict=True):
        assert torch.equal(device.copy_to_host(tensor), torch.arange(16.0, 64.0).view(6, 8) + 100.0 * k)
    kept.clear()
    for k in range(8):
        sent = numbers(twin, 64, -k)
        out = device.outgoing(sent)
        into = device.allocate(256)
        send(twin, out, into)
        assert torch.equal(device.copy_to_host(device.tensor(into, (64,), torch.float32)), torch.arange(64.0) - k)
    twin.end()


def check_the_tensor_may_change_once_it_was_copied(twin: Twin) -> None:
    """Until ``ready`` it may not; behind that it may, on a device that sends out of memory of its own."""
    if not twin.own_memory:
        return
    device = twin.device
    sent = numbers(twin, 500)
    twin.kernel([])
    out = device.outgoing(sent)
    reach(out.ready)
    sent.zero_()
    into = device.allocate(out.nbytes)
    send(twin, out, into)
    assert torch.equal(device.copy_to_host(device.tensor(into, (500,), torch.float32)), torch.arange(500.0))
    twin.end()


def check_settling_copies_only_what_is_strided_or_misaligned(twin: Twin) -> None:
    device = twin.device
    whole = torch.randn(64, 64, device=device.torch_device)
    assert device.settle(whole).data_ptr() == whole.data_ptr()
    for other in (whole.t(), whole.view(-1)[1:], whole[:, :3], torch.randn(3, 4, dtype=torch.complex64).conj()):
        other = other.to(device.torch_device)
        settled = device.settle(other)
        assert torch.equal(settled, other)
        assert settled.is_contiguous()
        assert settled.data_ptr() % ALIGNMENT == 0
        assert not settled.is_conj()
    last = torch.randn(2, 1, 4, 4, device=device.torch_device).to(memory_format=torch.channels_last)
    assert device.settle(last).stride() == (16, 16, 4, 1)
    made = torch.ones(3, requires_grad=True, device=device.torch_device) * 2
    assert not device.settle(made).requires_grad


def check_the_pool_gives_memory_again(twin: Twin) -> None:
    pool = BufferPool(twin.device)
    first, second = pool.take(100), pool.take(100)
    assert first is not second
    pool.give(first)
    assert pool.take(100) is first
    assert pool.take(200).nbytes == 200
    assert (pool.allocated_buffers, pool.allocated_bytes) == (3, 400)
    pool.give(first)
    pool.give(second)
    assert pool.take(100) is (first if twin.device.timed else second)
    pool.drop_all()
    assert (pool.allocated_buffers, pool.allocated_bytes) == (2, 300)
    assert pool.num_sizes == 0
    assert pool.take(100).nbytes == 100


def check_seeding_fixes_what_a_module_draws(twin: Twin) -> None:
    device, drawn = twin.device, []
    for seed in (5, 6, 5):
        before = device.seed(seed)
        drawn.append(torch.rand(3, device=device.torch_device).tolist())
        device.set_generator(before)
    assert drawn[0] == drawn[2] != drawn[1]


def check_seeding_leaves_the_user_s_own_draws_alone(twin: Twin) -> None:
    device = twin.device
    torch.manual_seed(11)
    expected = torch.rand(6, device=device.torch_device)
    torch.manual_seed(11)
    first = torch.rand(3, device=device.torch_device)
    before = device.seed(5)
    torch.rand(2, device=device.torch_device)
    device.set_generator(before)
    rest = torch.rand(3, device=device.torch_device)
    if device.torch_device.type == "cpu":
        assert torch.equal(torch.cat([first, rest]), expected)
    else:  # two draws of 3 are not one of 6 there
        torch.manual_seed(11)
        again = [torch.rand(3, device=device.torch_device) for _ in range(2)]
        assert torch.equal(torch.cat([first, rest]), torch.cat(again))


def check_what_is_copied_to_the_host_is_there(twin: Twin) -> None:
    made = (numbers(twin, 1000).requires_grad_() * 3)[::2]
    twin.kernel([])
    found = twin.device.copy_to_host(made)
    assert found.device.type == "cpu"
    assert not found.requires_grad
    assert found.tolist() == [3.0 * k for k in range(0, 1000, 2)]


def check_stamps_are_in_the_host_s_time(twin: Twin) -> None:
    """In order, and between the clock before the first was made and after the last was reached; 0.1 ms for a clock."""
    device, near = twin.device, 100_000 if twin.device.timed else 0
    for _ in range(2):
        device.anchor()
        before, stamps = time.perf_counter_ns(), []
        for _ in range(4):
            stamps.append(device.stamp())
            twin.kernel([])
        stamps.append(device.stamp())
        device.finish()
        after = time.perf_counter_ns()
        times = [device.time_ns(stamp) for stamp in stamps]
        assert times == sorted(times)
        assert before - near <= times[0]
        assert times[-1] <= after + near


CHECKS = {name: function for name, function in list(globals().items()) if name.startswith("check_")}

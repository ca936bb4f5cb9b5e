"""The contract of every device twin."""

from __future__ import annotations

import pytest
import torch

from mpipipe.device import ALIGNMENT, BufferPool, Device, HostDevice, open_device
from mpipipe.errors import SetupError

DEVICES = [HostDevice()]


@pytest.fixture(params=DEVICES, ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Device:
    return request.param


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 1 << 20])
def test_allocated_memory_has_its_size_and_alignment(device: Device, nbytes: int) -> None:
    buffers = [device.allocate(nbytes) for _ in range(5)]
    for buffer in buffers:
        assert buffer.nbytes == buffer.memory.nbytes == nbytes
        assert nbytes == 0 or buffer.memory.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_tensor_shares_its_buffer_s_memory(device: Device, dtype: torch.dtype) -> None:
    buffer = device.allocate(6 * dtype.itemsize)
    tensor = device.tensor(buffer, (2, 3), dtype)
    tensor.copy_(torch.arange(6).view(2, 3))
    again = device.tensor(buffer, (6,), dtype)
    assert again.tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor.is_contiguous()


def test_what_goes_out_comes_in(device: Device) -> None:
    """Strided and misaligned tensors, bfloat16, and a graph behind them."""
    base = torch.randn(9, 8, device=device.torch_device, requires_grad=True)
    for tensor in (base, base.t(), base[1:, 1:], base.to(torch.bfloat16), base[:0], base.sum()):
        out = device.outgoing(tensor)
        arrived = device.allocate(out.nbytes)
        arrived.memory[:] = out.memory
        assert torch.equal(device.tensor(arrived, tuple(tensor.shape), tensor.dtype), tensor.detach())


def test_settling_copies_only_what_is_strided_or_misaligned(device: Device) -> None:
    whole = torch.randn(64, 64, device=device.torch_device)
    assert device.settle(whole).data_ptr() == whole.data_ptr()
    for other in (whole.t(), whole.view(-1)[1:], whole[:, :3]):
        settled = device.settle(other)
        assert torch.equal(settled, other)
        assert settled.is_contiguous()
        assert settled.data_ptr() % ALIGNMENT == 0
    assert not device.settle(torch.ones(3, requires_grad=True) * 2).requires_grad


def test_the_pool_gives_memory_again(device: Device) -> None:
    pool = BufferPool(device)
    first, second = pool.take(100), pool.take(100)
    assert first is not second
    pool.give(first)
    assert pool.take(100) is first
    assert pool.take(200).nbytes == 200
    assert (pool.allocated_buffers, pool.allocated_bytes) == (3, 400)
    pool.give(second)
    pool.drop_all()
    assert (pool.allocated_buffers, pool.allocated_bytes) == (2, 300)


def test_seeding_fixes_what_a_module_draws(device: Device) -> None:
    drawn = []
    for seed in (5, 6, 5):
        before = device.seed(seed)
        drawn.append(torch.rand(3, device=device.torch_device).tolist())
        device.set_generator(before)
    assert drawn[0] == drawn[2] != drawn[1]


def test_seeding_leaves_the_user_s_own_draws_alone(device: Device) -> None:
    torch.manual_seed(11)
    expected = torch.rand(6, device=device.torch_device)
    torch.manual_seed(11)
    first = torch.rand(3, device=device.torch_device)
    before = device.seed(5)
    torch.rand(2, device=device.torch_device)
    device.set_generator(before)
    assert torch.equal(torch.cat([first, torch.rand(3, device=device.torch_device)]), expected)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert open_device("auto").name == "cpu"
    with pytest.raises(SetupError, match=r'comm\.device'):
        open_device("cuda")

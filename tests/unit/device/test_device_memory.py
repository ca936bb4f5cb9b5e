"""Device memory by its address, and the slots it is dealt out in. No GPU: an address is a number."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.device import DeviceMemory, Mark
from mpipipe.device.driver import Slot
from mpipipe.device.slots import Slots, capacity


def test_a_piece_lies_in_the_same_memory() -> None:
    owner = object()
    whole = DeviceMemory(0x10000, 1000, owner)
    piece = whole[100:300]
    assert (piece.address, piece.nbytes, len(piece), piece.owner) == (0x10064, 200, 200, owner)
    assert piece[50:][:7].address == 0x10064 + 50
    assert piece[50:][:7].nbytes == 7
    assert whole[900:2000].nbytes == 100
    assert whole[1000:].nbytes == whole[5:5].nbytes == whole[9:3].nbytes == 0
    assert whole[:].nbytes == 1000


def test_a_piece_has_no_gaps() -> None:
    with pytest.raises(ValueError, match="step 2"):
        DeviceMemory(0, 10)[::2]
    with pytest.raises(ValueError, match="negative"):
        DeviceMemory(0, -1)


def test_what_a_transport_made_of_it_stays_with_it() -> None:
    whole = DeviceMemory(64, 10)
    assert whole.message is None
    whole.message = "made once"
    assert whole.message == "made once"
    assert whole[:5].message is None


def test_the_interface_of_cuda_arrays() -> None:
    """As numba's page on it asks: version 3, no strides where it is contiguous, address 0 where it is empty."""
    whole = DeviceMemory(0x7F0000, 12)
    assert whole.__cuda_array_interface__ == {
        "shape": (12,),
        "typestr": "|u1",
        "data": (0x7F0000, False),
        "version": 3,
        "strides": None,
        "stream": None,
    }
    assert whole[3:].__cuda_array_interface__["data"] == (0x7F0003, False)
    assert whole[12:].__cuda_array_interface__["data"] == (0, False)


def test_a_slot_is_at_most_an_eighth_larger_than_what_it_is_for() -> None:
    sizes = set()
    for nbytes in [*range(5000), 10**6, 10**6 + 1, 1 << 30, (1 << 30) + 1, (5 << 30) + 12345]:
        found = capacity(nbytes)
        assert found >= nbytes
        assert found % 64 == 0
        assert capacity(found) == found
        if nbytes > 512:
            assert found <= nbytes * 9 / 8
        sizes.add(found)
    assert capacity(0) == capacity(512) == 512
    assert [capacity(n) for n in (513, 576, 577, 1024, 1025)] == [576, 576, 640, 1024, 1152]


class Switch:
    def __init__(self) -> None:
        self.on = False

    def reached(self) -> bool:
        return self.on


def made() -> tuple[Slots, list[int]]:
    sizes: list[int] = []

    def make(nbytes: int) -> Slot:
        sizes.append(nbytes)
        return Slot(np.zeros(nbytes, dtype=np.uint8), 0, nbytes)

    return Slots(make), sizes


def test_a_slot_goes_out_again_once_it_is_free() -> None:
    slots, sizes = made()
    first = slots.take(1000)
    mark: Mark = Switch()
    slots.give(first, mark)
    second = slots.take(1001)
    assert second is not first
    mark.on = True
    assert slots.take(1010) is first
    assert sizes == [1024, 1024]
    assert slots.allocated_bytes == 2048
    slots.give(second)
    assert slots.take(1024) is second
    assert slots.take(1025).nbytes == 1152


def test_who_can_wait_is_given_the_mark() -> None:
    slots, sizes = made()
    first, none = slots.take_next(100)
    assert none is None
    mark = Switch()
    slots.give(first, mark)
    assert slots.take_next(100) == (first, mark)
    assert sizes == [512]


def test_the_first_bytes_of_a_slot_are_the_same_object_again() -> None:
    slot = Slot(DeviceMemory(1024, 512), 1024, 512)
    piece = slot.first(100)
    piece.message = "made once"
    assert slot.first(100) is piece
    assert slot.first(512).nbytes == 512
    assert slot.first(0).nbytes == 0

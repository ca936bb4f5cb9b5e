"""A piece of a GPU's memory, known by its address."""

from __future__ import annotations

from typing import Any


class DeviceMemory:
    """``nbytes`` bytes of device memory from ``address`` on; ``owner`` keeps them alive.

    Stands where host memory has a NumPy array: it has ``nbytes``, and a slice of it is a piece of it. It never reads or
    writes the bytes itself. ``message`` is for a transport, which may keep there what it has made of the memory.
    """

    __slots__ = ("address", "message", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        if address < 0 or nbytes < 0:
            raise ValueError(f"{nbytes} bytes at address {address}: neither may be negative")
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self.message: object | None = None

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, piece: slice) -> DeviceMemory:
        """The bytes of a slice without a step, in the same memory. Keeps what keeps this memory alive."""
        start, stop, step = piece.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a piece of memory is without gaps: step {step}, needed 1")
        return DeviceMemory(self.address + start, max(stop - start, 0), self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface, as a one-dimensional array of unsigned bytes; no stream: whoever takes it has
        waited for the bytes. No bytes have no address there.
        """
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address if self.nbytes else 0, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __repr__(self) -> str:
        return f"DeviceMemory(0x{self.address:x}, {self.nbytes} bytes)"

"""Devices for the probe, by name: ``proof_devices:NAME``. Each is right, or fails in a way of its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from mpipipe.device import Buffer, DeviceMemory, HostDevice


class Wrong(HostDevice):
    """Sends other bytes than it was given."""

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        return super().outgoing(tensor + 1)


class Crashing(HostDevice):
    """Sends from an address at which there is nothing, as that of a GPU's memory is to a library that is not aware."""

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        return Buffer(DeviceMemory(1 << 40, tensor.numel()), tensor.numel(), tensor)


class Stuck(HostDevice):
    """Goes on for longer than the proof waits."""

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        time.sleep(600)
        return super().outgoing(tensor)


class ByAddress(HostDevice):
    """Right, with memory that NumPy has no array for."""

    def outgoing(self, tensor: torch.Tensor) -> Buffer:
        buffer = super().outgoing(tensor)
        return Buffer(DeviceMemory(tensor.data_ptr(), buffer.nbytes), buffer.nbytes, tensor)


def __getattr__(name: str) -> Any:
    """``stuck_MARKER`` is a stuck one: the marker is there to be found in the command line."""
    if name.startswith("stuck_"):
        return Stuck
    raise AttributeError(name)

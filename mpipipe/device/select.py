"""From ``comm.device`` to a device."""

from __future__ import annotations

from mpipipe.device.host import HostDevice
from mpipipe.device.protocol import Device
from mpipipe.errors import SetupError


def open_device(name: str) -> Device:
    """The device for ``comm.device``: ``"auto"`` and ``"cpu"`` give the host.

    Raises ``SetupError`` for a device that this version does not have.
    """
    if name in ("auto", "cpu"):
        return HostDevice()
    raise SetupError(f"comm.device = {name!r}: this version trains on the CPU; use comm.device = \"cpu\" or \"auto\"")

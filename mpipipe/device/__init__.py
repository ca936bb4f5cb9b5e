"""Memory that messages are sent from and received into: one protocol, one twin a kind of device.

Nobody outside this room asks which device it is.
"""

from __future__ import annotations

from mpipipe.device.host import HostDevice
from mpipipe.device.pool import BufferPool
from mpipipe.device.protocol import ALIGNMENT, Buffer, Device, Memory
from mpipipe.device.select import open_device

__all__ = ["ALIGNMENT", "Buffer", "BufferPool", "Device", "HostDevice", "Memory", "open_device"]

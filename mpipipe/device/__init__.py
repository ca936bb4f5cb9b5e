"""Memory that messages are sent from and received into: one protocol, one twin a kind of device.

Nobody outside this room asks which device it is.
"""

from __future__ import annotations

from mpipipe.device.binding import choose_device, shared_devices
from mpipipe.device.host import HostDevice
from mpipipe.device.memory import DeviceMemory
from mpipipe.device.pool import BufferPool
from mpipipe.device.protocol import ALIGNMENT, Buffer, Copy, Device, HostMemory, Mark, Memory, Stamp
from mpipipe.device.select import device_kind, open_device
from mpipipe.device.streams import StreamDevice

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "BufferPool",
    "Copy",
    "Device",
    "DeviceMemory",
    "HostDevice",
    "HostMemory",
    "Mark",
    "Memory",
    "Stamp",
    "StreamDevice",
    "choose_device",
    "device_kind",
    "open_device",
    "shared_devices",
]

"""pagetide.monitor: observes the memory of the devices from a separate process.

    from pagetide import monitor

    with monitor.watch() as watched:                      # starts the monitor's process if none runs
        for device in watched.devices():
            memory = watched.memory(device.uuid)          # no lock, a few microseconds
            print(device.name, memory.free_bytes, memory.is_stale())

Names are imported on first access, to keep the import of a part of this package cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cuda_devices import find_device, visible_devices
    from .errors import MonitorError
    from .snapshot import Device, DeviceInfo, DeviceMemory, Snapshot
    from .watching import Watch, watch

__all__ = [
    "Device",
    "DeviceInfo",
    "DeviceMemory",
    "MonitorError",
    "Snapshot",
    "Watch",
    "find_device",
    "visible_devices",
    "watch",
]

_MODULE_OF = {
    "Device": ".snapshot",
    "DeviceInfo": ".snapshot",
    "DeviceMemory": ".snapshot",
    "MonitorError": ".errors",
    "Snapshot": ".snapshot",
    "Watch": ".watching",
    "find_device": ".cuda_devices",
    "visible_devices": ".cuda_devices",
    "watch": ".watching",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value  # later accesses find it there
    return value

"""What waits for memory of a device that idle models of this server hold: reservations, and requests of other engines."""

from __future__ import annotations

from ..allocator.broker_client import BrokerClient
from ..allocator.errors import AllocatorError
from ..monitor.runtime_dir import readable_dirs
from .residency import Taker

LOOK_S = 0.25
PATIENCE_MS = 250  # until then engines give back what no request needs
GRANTED_S = 1.0  # until requests have the memory that a model has left for them
_TIMEOUT_S = 1.0


def waiting() -> dict[tuple[str, str], Taker]:
    """By the name of each lease and the uuid of its device, what waits for memory there: the first reservation, else the engine
    with the most requests in its queue.

    Blocks for the broker's answer; none without a broker.
    """
    for directory in readable_dirs():
        client = BrokerClient(directory.socket, timeout_s=_TIMEOUT_S)
        try:
            leases = client.leases()
            lacking = [one for one in leases if one.num_waiting and (one.lacking_ms or 0) >= PATIENCE_MS]
            lacking.sort(key=lambda one: one.num_waiting)
            found = {one.device_uuid: Taker(one.name, one.num_waiting) for one in lacking}
            reserving = [one for one in client.reservations() if (one.waiting_ms or 0) >= PATIENCE_MS]
            found |= {one.device_uuid: Taker(f"the reservation {one.name}") for one in reversed(reserving)}
        except AllocatorError:
            continue
        if found:
            return {(one.name, one.device_uuid): found[one.device_uuid] for one in leases if one.device_uuid in found}
    return {}

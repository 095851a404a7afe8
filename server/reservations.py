"""Reservations of other programs that wait for memory which idle models of this server hold."""

from __future__ import annotations

from ..allocator.broker_client import BrokerClient
from ..allocator.errors import AllocatorError
from ..monitor.runtime_dir import readable_dirs

LOOK_S = 0.25
PATIENCE_MS = 250  # until then engines give back what no request needs
_TIMEOUT_S = 1.0


def waited_for() -> dict[str, str]:
    """The leases on devices where reservations wait for memory, by name, each with the name of the first of these.

    Blocks for the broker's answer; none without a broker.
    """
    for directory in readable_dirs():
        client = BrokerClient(directory.socket, timeout_s=_TIMEOUT_S)
        try:
            waiting = [one for one in client.reservations() if (one.waiting_ms or 0) >= PATIENCE_MS]
            if names := {one.device_uuid: one.name for one in reversed(waiting)}:
                return {lease.name: names[lease.device_uuid] for lease in client.leases() if lease.device_uuid in names}
        except AllocatorError:
            continue
    return {}

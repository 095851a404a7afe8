"""A shard: `python -m pagetide.engine.shards.process FD`, started by the driver, with one of its sockets.

It does what the driver says, in order, and keeps nothing that the driver does not know. It ends with the driver, however that
ends: its heartbeat checks the parent process, the kernel kills it with the thread that started it, and its socket closes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from .channel import ChannelClosed, ShardChannel
from .messages import Launch
from .pulse import Heartbeat, Pulse

_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Serve the inherited socket. Its descriptor is the only argument."""
    (descriptor,) = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver ends its shards
    channel = ShardChannel(socket.socket(fileno=int(descriptor)))
    try:
        number, launch = channel.receive()
    except ChannelClosed:
        return 0
    assert isinstance(launch, Launch)
    _die_with_the_driver(launch.driver_pid)
    sys.path.extend(place for place in launch.search_path if place not in sys.path)
    logging.basicConfig(level=logging.WARNING, format=f"shard {launch.rank} %(name)s %(levelname)s: %(message)s")
    logging.getLogger("pagetide").setLevel(launch.log_level)
    heartbeat = Heartbeat(Pulse(launch.pulse_fd), launch.rank, launch.driver_pid, _end)
    heartbeat.start()  # before torch is imported, which takes seconds
    from .shard import Shard

    Shard(launch, channel, heartbeat).serve(number)
    _end()


def _die_with_the_driver(driver_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != driver_pid:
        _end()


def _end() -> NoReturn:
    """End without cleaning up: other threads may be stuck in a collective, and all memory goes with the process."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

"""A shard: `python -m pagetide.engine.shards.process`, started by the driver.

It does what the driver says, in order, and keeps nothing that the driver does not know. It ends with the driver, however that
ends: the kernel kills it with the thread that started it, its socket closes, and its heartbeat notices that.
"""

from __future__ import annotations

import logging
import sys

from ...common.child_process import parent_channel
from ...common.frames import ChannelClosed
from .messages import Launch
from .pulse import Heartbeat, end_process


def main() -> int:
    """Serve the driver's messages."""
    channel = parent_channel()
    try:
        number, launch = channel.receive()
    except ChannelClosed:
        return 0
    assert isinstance(launch, Launch)
    sys.path.extend(place for place in launch.search_path if place not in sys.path)
    logging.basicConfig(level=logging.WARNING, format=f"shard {launch.rank} %(name)s %(levelname)s: %(message)s")
    logging.getLogger("pagetide").setLevel(launch.log_level)
    heartbeat = Heartbeat(channel)
    heartbeat.start()  # before torch is imported, which takes seconds
    from .shard import Shard

    Shard(launch, channel, heartbeat).serve(number)
    end_process()


if __name__ == "__main__":
    sys.exit(main())

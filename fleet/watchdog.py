"""Kills a process whose event loop hangs, so that it is started again. A process of its own: `Watchdog` starts it.

    python -m pagetide.fleet.watchdog PID SECONDS

A thread would hang with its process where that is stopped, or where a call holds the interpreter. Each beat of the loop is a
byte on the parent's socket; it ends with the process that beats.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from ..common.child_process import ChildProcess, parent_socket
from ..common.heartbeat import STILL_S, SilenceWatch

BEAT_S = 1.0


class Watchdog:
    """The process beside this one, and the beats of the running event loop. Make it on that loop; it stays for good."""

    def __init__(self, most_s: float = STILL_S) -> None:
        self.process = ChildProcess(("-m", __name__, str(os.getpid()), str(most_s)))
        self.process.socket.setblocking(False)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            with suppress(OSError):  # it is gone, or does not read
                self.process.socket.send(b".")
            await asyncio.sleep(BEAT_S)


def main() -> int:
    """Watch this process's parent."""
    pid, most_s = sys.argv[1:]
    return watch(parent_socket(), int(pid), float(most_s))


def watch(beats: socket.socket, pid: int, most_s: float) -> int:
    """Watch until the socket ends, or until there was no beat for `most_s`: then kill the process. Returns an exit status."""
    silence, num_beats = SilenceWatch(2 * BEAT_S), 0
    while silence.look(num_beats, time.monotonic()) <= most_s:
        if select.select([beats], [], [], BEAT_S)[0]:
            if not (data := beats.recv(4096)):
                return 0
            num_beats += len(data)
    print(f"pagetide: the process {pid} hangs: no beat for {most_s:g} s; it is killed", file=sys.stderr, flush=True)
    os.kill(pid, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Kills a process whose event loop hangs, so that it is started again. A process of its own: `Watchdog` starts it.

    python -m pagetide.fleet.watchdog FD PID SECONDS

A thread would hang with its process where that is stopped, or where a call holds the interpreter. FD is the end of a pipe from
which the beats of the loop are read; it ends with the process that beats.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from ..common.heartbeat import STILL_S, SilenceWatch

BEAT_S = 1.0


class Watchdog:
    """The process beside this one, and the beats of the running event loop. Make it on that loop; it stays for good."""

    def __init__(self, most_s: float = STILL_S) -> None:
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            arguments = [str(theirs), str(os.getpid()), str(most_s)]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *arguments], stdin=subprocess.DEVNULL, pass_fds=(theirs,)
            )
        finally:
            os.close(theirs)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            with suppress(OSError):  # it is gone, or does not read
                os.write(self._pipe, b".")
            await asyncio.sleep(BEAT_S)


def main(argv: list[str] | None = None) -> int:
    """Watch until the pipe ends, or until there was no beat for SECONDS: then kill the process."""
    pipe, pid, most_s = sys.argv[1:] if argv is None else argv
    watch, num_beats = SilenceWatch(2 * BEAT_S), 0
    while watch.look(num_beats, time.monotonic()) <= float(most_s):
        if select.select([int(pipe)], [], [], BEAT_S)[0]:
            if not (beats := os.read(int(pipe), 4096)):
                return 0
            num_beats += len(beats)
    print(f"pagetide: the process {pid} hangs: no beat for {float(most_s):g} s; it is killed", file=sys.stderr, flush=True)
    os.kill(int(pid), signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""An engine process without a model: streams a fixed text, so that what is left is the cost of the server.

    python benchmarks/stand_in_engine.py STEP_S FD

Every STEP_S seconds each running request gets one token, as from an engine whose steps take so long.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from pagetide.server.connection import MessageConnection
from pagetide.server.messages import (
    Aborted,
    Accepted,
    Call,
    CallResult,
    Cancel,
    ModelInfo,
    ModelReady,
    OutputPieces,
    Piece,
    RequestEnd,
    Start,
    Stop,
    Submit,
    ToEngine,
)
from pagetide.version import __version__

INFO = ModelInfo("stand-in", 1 << 20, 1 << 16, 16, 1 << 16, True, "{{ messages }}", "cpu", "none", __version__)


class StandInEngine:
    """Serves one connection. Every token's text is "tide ", its id 7."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[int, int] = {}  # tokens that each request has still to get
        self._ended = asyncio.Event()
        self._connection: MessageConnection[ToEngine]

    async def run(self, end: socket.socket) -> None:
        """Serve until the connection ends."""
        self._connection = await MessageConnection.open(end, ToEngine, self._receive, self._ended.set)
        loop = asyncio.get_running_loop()
        until = loop.time()
        while not self._ended.is_set():
            until = max(until + self._step_s, loop.time())
            await asyncio.sleep(until - loop.time())
            self._step()

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Start():
                self._connection.send(ModelReady(INFO))
            case Submit():
                self._left[message.number] = message.params.get("max_new_tokens", 16)
                self._connection.send(Accepted(message.number, [7] * 8))
            case Cancel():
                self._left.pop(message.number, None)
                self._connection.send(Aborted(message.number, 0))
            case Call():
                self._connection.send(CallResult(message.number, {}))
            case Stop():
                self._ended.set()

    def _step(self) -> None:
        pieces, ended = [], []
        for number, left in self._left.items():
            pieces.append(Piece(number, 0, "tide ", [7], None, None if left > 1 else "length"))
            self._left[number] = left - 1
            if left <= 1:
                ended.append(number)
        if pieces:
            self._connection.send(OutputPieces(pieces))
        for number in ended:
            del self._left[number]
            self._connection.send(RequestEnd(number, [], 0))


async def _main(step_s: float, descriptor: int) -> None:
    await StandInEngine(step_s).run(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1]), int(sys.argv[2])))

"""Stand-ins for a model, in place of `ModelRunner.model`, and for an engine's process.

Of a model's the logits determine the next token. As a program, `python benchmarks/stand_ins.py STEP_S FD` is an engine process
without a model: every STEP_S seconds each running request gets one token, as from an engine with steps that take so long. It
starts at once, so what loads torch is imported where it is used.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from pagetide.common.child_process import parent_socket
from pagetide.server.connection import MessageConnection
from pagetide.server.messages import (
    BEAT_S,
    Aborted,
    Accepted,
    Alive,
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

if TYPE_CHECKING:
    import torch

    from pagetide.engine.attention.context import StepContext


class Always:
    """A step takes `step_s`, in which other threads run as they do beside torch; the next token is always `token`."""

    def __init__(self, token: int, vocab_size: int, step_s: float = 0.0) -> None:
        self._token, self._vocab_size, self._step_s = token, vocab_size, step_s

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, step: StepContext,
        logits_to_keep: torch.Tensor | int,
    ) -> SimpleNamespace:  # fmt: skip
        """See `Runner.model`."""
        import torch

        if self._step_s:
            time.sleep(self._step_s)
        count = logits_to_keep if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return output_of(torch.full((count,), self._token), self._vocab_size)


def output_of(tokens: torch.Tensor, vocab_size: int) -> SimpleNamespace:
    """A model output with logits [1, n, vocab_size] that select `tokens`, int64 [n]."""
    import torch

    logits = torch.zeros(1, len(tokens), vocab_size)
    logits[0].scatter_(1, tokens[:, None], 1.0)
    return SimpleNamespace(logits=logits)


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
        until = told = loop.time()
        while not self._ended.is_set():
            if until >= told:
                self._connection.send(Alive(0, 0.0))
                told = until + BEAT_S
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


if __name__ == "__main__":
    asyncio.run(StandInEngine(float(sys.argv[1])).run(parent_socket()))

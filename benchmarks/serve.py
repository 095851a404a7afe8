"""The cost of the HTTP server without an engine: CPU time of its process for a request and for a streamed token.

    python -m benchmarks.serve [--json FILE] [--streams 1,64,256] [--tokens 400] [--requests 400] [--step-ms 10] [--seed 0]

The engine is a stand-in process (`stand_in_engine.py`) that gives each running request a token every step. The clients are
sockets in a process of their own (`stream_client.py`); their CPU time is a figure too. A server that falls behind sends several
tokens in an event: the figure "tokens an event" tells.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.arguments import above_0, whole
from benchmarks.figures import Figure, report
from pagetide.server.app import AppOptions, Server, make_app
from pagetide.server.engine_client import RemoteEngine
from pagetide.server.keys import ApiKeys
from pagetide.server.models import ModelOptions, ModelRegistry

TARGET_US = {64: 60.0}  # a streamed token, by the number of streams
START_S = 30.0
HERE = Path(__file__).parent


class MeasuredServer:
    """The real application on a free port, over a stand-in engine. The server is this process."""

    def __init__(self, step_s: float) -> None:
        command = [sys.executable, "-P", str(HERE / "stand_in_engine.py"), str(step_s)]
        self._models = ModelRegistry(partial(RemoteEngine.start, command=command))
        app = make_app(Server(self._models, ApiKeys(), AppOptions(max_queue=1 << 20)))
        config = uvicorn.Config(
            app, port=0, log_config=None, access_log=False, lifespan="on", server_header=False, date_header=False
        )
        self._http = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> MeasuredServer:
        logging.getLogger("pagetide.access").setLevel(logging.WARNING)
        self._models.add(ModelOptions("stand-in", "stand-in"))
        self._serving = asyncio.create_task(self._http.serve())
        async with asyncio.timeout(START_S):
            while not (self._http.started and self._models.is_ready):
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.should_exit = True
        assert self._serving is not None
        await self._serving

    @property
    def port(self) -> int:
        """The port of the server."""
        port: int = self._http.servers[0].sockets[0].getsockname()[1]
        return port

    async def measure(self, streams: int, tokens: int, requests: int) -> dict[str, Any]:
        """Serve `requests` requests of `tokens` tokens over `streams` connections.

        Returns what the client counted, and `server_s`, the CPU time of this process. With `tokens` 0 the requests do not
        stream.
        """
        arguments = map(str, (self.port, streams, tokens, requests))
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(HERE / "stream_client.py"), *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        await client.stdout.readline()  # it has started
        began = time.process_time()
        counted: dict[str, Any] = json.loads(await client.stdout.read())
        return counted | {"server_s": time.process_time() - began}


async def measured(each: Sequence[int], tokens: int, requests: int, step_s: float) -> list[Figure]:
    """The figures."""
    figures = []
    async with MeasuredServer(step_s) as server:
        await server.measure(4, 8, 4)  # warms up
        for streams in each:
            found = await server.measure(streams, tokens, streams)
            count, name = found["tokens"], f"{streams} streams"
            cost = 1e6 * found["server_s"] / count
            figures += [
                Figure(f"CPU for a streamed token, {name}", cost, "us", TARGET_US.get(streams), "lower", [cost]),
                Figure(f"... of the client, {name}", 1e6 * found["client_s"] / count, "us"),
                Figure(f"tokens an event, {name}", count / found["events"], "tokens"),
            ]
        found = await server.measure(8, 0, requests)
        figures.append(Figure("CPU for a request of one token", 1e6 * found["server_s"] / requests, "us"))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="The cost of the HTTP server without an engine.")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--streams", default="1,64,256", help="at the same time, separated by commas")
    parser.add_argument("--tokens", type=whole, default=400, help="of each stream")
    parser.add_argument("--requests", type=whole, default=400, help="that do not stream")
    parser.add_argument("--step-ms", type=above_0, default=10.0, help="of the stand-in engine")
    parser.add_argument("--seed", type=int, default=0, help="recorded; nothing is drawn")
    args = parser.parse_args(argv)
    each = [whole(text) for text in args.streams.split(",")]
    figures = asyncio.run(measured(each, args.tokens, args.requests, args.step_ms / 1000))
    report("Server", figures, args.seed, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

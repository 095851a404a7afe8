"""The cost of the HTTP server: CPU time of its process for a request and for a streamed token, and throughput with an engine.

    python -m benchmarks.serve [--json FILE] [--streams 1,64,256] [--tokens 400] [--requests 400] [--step-ms 10] [--seed 0]
        [--hidden 1536] [--layers 13] [--rounds 3]

The engine is a stand-in process (`stand_in_engine.py`) that gives each running request a token every step. The clients are
sockets in a process of their own (`stream_client.py`); their CPU time is a figure too. A server that falls behind sends several
tokens in an event: the figure "tokens an event" tells.

Throughput is that of a random float32 model, 0.4 B parameters by default, on the CPU: 8 streams through the server, and by
`AsyncLLM` in this process, in turn. The share is that of the medians.
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
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn

from benchmarks.arguments import above_0, whole
from benchmarks.figures import Figure, report
from benchmarks.random_batches import save_model
from pagetide import AsyncLLM, SamplingParams
from pagetide.server.app import AppOptions, Server, make_app
from pagetide.server.engine_client import RemoteEngine
from pagetide.server.keys import ApiKeys
from pagetide.server.models import ModelOptions, ModelRegistry

TARGET_SHARE = 0.95  # tokens/s through the server, of those of AsyncLLM
ENGINE_STREAMS, ENGINE_TOKENS = 8, 32
TARGET_US = {64: 60.0}  # a streamed token, by the number of streams
START_S = 30.0
HERE = Path(__file__).parent


class MeasuredServer:
    """The real application on a free port. The server is this process.

    Args:
        model: What to serve.
        step_s: The step of a stand-in for the engine; None starts a real one.
    """

    def __init__(self, model: ModelOptions, step_s: float | None = None) -> None:
        self._model = model
        command = [sys.executable, "-P", str(HERE / "stand_in_engine.py"), str(step_s)]
        self._models = ModelRegistry(
            RemoteEngine.start if step_s is None else partial(RemoteEngine.start, command=command)
        )
        app = make_app(Server(self._models, ApiKeys(), AppOptions(max_queue=1 << 20)))
        config = uvicorn.Config(
            app, port=0, log_config=None, access_log=False, lifespan="off", server_header=False, date_header=False
        )
        self._http = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> MeasuredServer:
        logging.getLogger("pagetide.access").setLevel(logging.WARNING)
        self._models.add(self._model)
        self._serving = asyncio.create_task(self._http.serve())
        async with asyncio.timeout(START_S):
            while not (self._http.started and self._models.is_ready):
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.should_exit = True
        assert self._serving is not None
        await self._serving
        await self._models.stop()

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
    async with MeasuredServer(ModelOptions("stand-in", "stand-in"), step_s) as server:
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


async def share_of_engine(hidden: int, layers: int, rounds: int, seed: int) -> list[Figure]:
    """Tokens/s through the server and by `AsyncLLM`."""
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "kv_memory": "64MiB", "share": False, "prefix_caching": False
    }  # fmt: skip
    prompts = [[5 + number] * 16 for number in range(ENGINE_STREAMS)]
    params = SamplingParams(max_new_tokens=ENGINE_TOKENS, temperature=0, ignore_eos=True)
    direct, served = [], []
    count = ENGINE_STREAMS * ENGINE_TOKENS
    with TemporaryDirectory() as folder:
        save_model(Path(folder), hidden, layers, seed)
        llm = AsyncLLM(folder, **options)

        async def by_engine(prompt: list[int]) -> None:
            async for _ in llm.stream([prompt], params):
                pass

        async with MeasuredServer(ModelOptions("random", folder, options)) as server:
            for number in range(rounds + 1):
                began = time.perf_counter()
                await asyncio.gather(*map(by_engine, prompts))
                middle = time.perf_counter()
                await asyncio.gather(*(_by_server(server.port, prompt) for prompt in prompts))
                if number:  # the first warms up
                    direct.append(count / (middle - began))
                    served.append(count / (time.perf_counter() - middle))
        await llm.stop()
    share = median(served) / median(direct)
    return [
        Figure("tokens/s by AsyncLLM", median(direct), "tokens/s", None, "higher", direct),
        Figure("tokens/s through the server", median(served), "tokens/s", None, "higher", served),
        Figure("throughput of the server, of AsyncLLM's", share, "x", TARGET_SHARE, "higher", [share]),
    ]


async def _by_server(port: int, prompt: list[int]) -> None:
    """Stream one completion to its end."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": ENGINE_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    answer = await reader.read()
    writer.close()
    if b"data: [DONE]" not in answer or b'"error"' in answer:
        raise RuntimeError(f"the server did not serve a stream: {answer[:500]!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="The cost of the HTTP server.")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--streams", default="1,64,256", help="at the same time, separated by commas")
    parser.add_argument("--tokens", type=whole, default=400, help="of each stream")
    parser.add_argument("--requests", type=whole, default=400, help="that do not stream")
    parser.add_argument("--step-ms", type=above_0, default=10.0, help="of the stand-in engine")
    parser.add_argument("--hidden", type=whole, default=1536, help="of the random model")
    parser.add_argument("--layers", type=whole, default=13, help="of the random model")
    parser.add_argument("--rounds", type=whole, default=3, help="of the throughput")
    parser.add_argument("--seed", type=int, default=0, help="of the random model")
    args = parser.parse_args(argv)
    each = [whole(text) for text in args.streams.split(",")]
    figures = asyncio.run(measured(each, args.tokens, args.requests, args.step_ms / 1000))
    figures += asyncio.run(share_of_engine(args.hidden, args.layers, args.rounds, args.seed))
    report("Server", figures, args.seed, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

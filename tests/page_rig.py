"""The server's page with made-up engines: the real application on a real socket, and viewers that read its events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import uvicorn

from pagetide.server.app import AppOptions, Server, make_app
from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import EngineUnavailable
from pagetide.server.http_protocol import BoundedHttpProtocol
from pagetide.server.keys import ApiKey, ApiKeys, digest_of
from pagetide.server.messages import ModelInfo
from pagetide.server.models import ModelRegistry
from pagetide.server.page import PageEndpoints, PageFiles

httpx2 = pytest.importorskip("httpx2")  # of transformers: environments without torch may lack it

FAR_S = 60.0
ALICE, OPS = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-1234", "sk-operator-1"))
INFO = ModelInfo("made up", 1024, 8, 16, 256, True, None, "cpu", "none", "0")


def two_keys() -> ApiKeys:
    """Those of ALICE, and of OPS, who is an admin."""
    return ApiKeys([ApiKey("alice", digest_of("sk-alice-1234")), ApiKey("ops", digest_of("sk-operator-1"), admin=True)])


class MadeUpEngine:
    """Answers `frame` as an engine does: numbered, whole if asked for or the first one, else what was said since.

    Attributes:
        state: What the next frame tells of; without a change it says the same.
        filling: Makes frames larger.
        cost_s: Said of each frame.
        calls, arguments: What was asked for, in order.
        error: Raised by each call.
    """

    is_durable = False

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.info = INFO
        self.ended = asyncio.Event()
        self.num_unfinished = 0
        self.state = 0
        self.filling = ""
        self.cost_s = 0.0
        self.calls: list[str] = []
        self.arguments: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._said: int | None = None
        self._number = 0

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    async def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append(method)
        self.arguments.append(arguments)
        if self.ended.is_set():
            raise EngineUnavailable("it has ended")
        if self.error is not None:
            raise self.error
        if method == "stats":
            return {}
        if method == "sleep":
            self._said = None  # what wakes up is another engine in the same process
        if method != "frame":
            return {"asked": arguments}
        full = arguments["full"] or self._said is None
        changed = None if not full and self._said == self.state else self.state
        self._said = self.state
        self._number += 1
        frame = {"v": 1, "seq": self._number, "time": self._number, "step": self.state, "full": full, "state": changed}
        return [json.dumps(frame | {"filling": self.filling}).encode(), self.cost_s]

    async def stop(self, drain_s: float = 0.0) -> None:
        self.ended.set()

    kill = stop


class LocalServer:
    """The application in this process on a real socket, with engines that `start` makes. Use it as an async context manager."""

    def __init__(
        self, start: Callable[[str, dict[str, Any], str], Any], models: Sequence[ModelOptions], keys: ApiKeys | None = None,
        options: AppOptions | None = None,
    ) -> None:  # fmt: skip
        self.models = ModelRegistry(start)
        self.server = Server(self.models, keys or ApiKeys(), options or AppOptions())
        self.http: uvicorn.Server
        self._first = models
        self._serving: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self.http = uvicorn.Server(
            uvicorn.Config(make_app(self.server), port=0, http=BoundedHttpProtocol, log_config=None, lifespan="off",
                           timeout_graceful_shutdown=1)
        )  # fmt: skip
        for model in self._first:
            self.models.add(model)
        self._serving = asyncio.create_task(self.http.serve())
        await eventually(lambda: self.http.started and self.models.is_ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.page.feed.stop()
        self.http.should_exit = True
        await self._serving
        await self.models.stop()

    @property
    def port(self) -> int:
        return int(self.http.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class PageServer(LocalServer):
    """With made-up engines.

    Attributes:
        engines: All that were started, by the name of their model, the newest last.
    """

    def __init__(
        self, names: Sequence[str] = ("one",), keys: ApiKeys | None = None, files: Path | None = None,
        options: AppOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__(self._start, [ModelOptions(name, "made up") for name in names], keys, options)
        self.engines: dict[str, list[MadeUpEngine]] = {}
        if files is not None:
            self.server.page = PageEndpoints(self.models, self.server.keys, PageFiles(files))

    async def _start(self, reference: str, arguments: dict[str, Any], name: str) -> Any:
        self.engines.setdefault(name, []).append(MadeUpEngine(arguments))
        return self.engines[name][-1]

    @property
    def engine(self) -> MadeUpEngine:
        """The newest engine of the first model."""
        return self.engines[self._first[0].name][-1]

    def client(self, **headers: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=FAR_S)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0.005)


class EventReader:
    """The events of a response: `await reader.next("frame")`."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self, wanted: str | None = None) -> Any:
        """The data of the next event, of the next one of this kind if one is named. Raises EOFError at the end."""
        kind = ""
        async with asyncio.timeout(FAR_S):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data" and wanted in (None, kind):
                    return json.loads(value)
        raise EOFError

    async def to_the_end(self) -> None:
        """Read all that comes. Raises EOFError at the end."""
        while True:
            await self.next()

    async def frame(self, model: str = "one") -> Any:
        """The next frame of a model."""
        while (data := await self.next("frame"))["model"] != model:
            pass
        return data["frame"]


@asynccontextmanager
async def looking(client: httpx2.AsyncClient, **params: Any) -> AsyncIterator[EventReader]:
    """A viewer's events."""
    async with client.stream("GET", "/page/events", params=params) as response:
        yield EventReader(response)

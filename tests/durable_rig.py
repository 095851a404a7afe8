"""A queue of requests without engines, and servers in front of it: `KeptRequests`, `DurableEngine`, `FrontEnd`, `scripted`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from page_rig import FAR_S, LocalServer, httpx2

from pagetide.scheduler.request import FinishReason
from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import Generation, Observer, RequestFailed
from pagetide.server.keys import ApiKeys
from pagetide.server.messages import Accepted, ModelInfo, Piece, RequestEnd, Score

INFO = ModelInfo("kept", 1 << 20, 64, 16, 1 << 16, True, "{{ messages }}", "cpu", "none", "0")
PROMPT = [7] * 8
TEXTS = ("The ", "whale", " ", "sw", "ims", "", " —", " d", "eep", ".")
# What a model says that thinks, answers, and calls the tool `dive`, in pieces that cut its marks.
CALL = '<tool_call>\n{"name": "dive", "arguments": {"depth": 3}}\n</tool_call>'
DIVING = ("<think>\nHm", "m.\n</thi", "nk>\n\nDown", " we go.\n", "<tool_", *CALL.removeprefix("<tool_"))

Record = Accepted | Piece | RequestEnd
Deliver = Callable[["KeptRequest", Generation], "asyncio.Task[None] | None"]


@dataclass
class KeptRequest:
    """A durable request: its fields and its records."""

    request: dict[str, Any]
    created: int
    records: list[Record]
    num_readers: int = 0
    is_cancelled: bool = False


def output(request: dict[str, Any], texts: tuple[str, ...] = TEXTS, reason: FinishReason = "stop") -> Iterator[Piece]:
    """The pieces of all continuations, in turn. A continuation has fewer of them than the one before it."""
    params = request["params"]
    num = params.get("n", 1)
    scored = params.get("logprobs") is not None
    for step in range(len(texts)):
        for index in range(num):
            last = len(texts) - 1 - index
            if step <= last:
                text = texts[step]
                ids = [step, index] if step % 3 == 2 else [step]
                scores = [Score(i, b"" if at else text.encode(), -0.5 - i, 1) for at, i in enumerate(ids) if scored]
                yield Piece(0, index, text, ids, scores or None, reason if step == last else None)


class KeptRequests:
    """The requests of a queue by durable id. Their records are complete at once; how they are delivered differs.

    Attributes:
        texts: The texts of each continuation's pieces.
        reason: Why each continuation ends.
        prompt_end: The text at the end of the prompt.
        num_begun: Requests that were begun.
        last_created: When the newest request began.
    """

    def __init__(self, texts: tuple[str, ...] = TEXTS, reason: FinishReason = "stop", prompt_end: str = "") -> None:
        self.texts, self.reason, self.prompt_end = texts, reason, prompt_end
        self.requests: dict[str, KeptRequest] = {}
        self.num_begun = 0
        self.last_created = 1_000_000_000

    def begin(self, request: dict[str, Any]) -> KeptRequest:
        """Begin a request."""
        self.num_begun += 1
        self.last_created += 1000
        pieces = list(output(request, self.texts, self.reason))
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        whole = [] if request["streams"] else list(_wholes(pieces))
        prompt_scores = None if request["params"].get("prompt_logprobs") is None else [Score(7, b"x", -1.0, 1)] * len(PROMPT)
        end = RequestEnd(0, whole, 3, prompt_scores, 0.1, 0.2, 1.0, num_tokens)
        records: list[Record] = [Accepted(0, PROMPT, 16, self.prompt_end), *(pieces if request["streams"] else ()), end]
        kept = self.requests[request["durable_id"]] = KeptRequest(request, self.last_created, records)
        return kept


def _wholes(pieces: list[Piece]) -> Iterator[Piece]:
    for index in sorted({piece.index for piece in pieces}):
        own = [piece for piece in pieces if piece.index == index]
        scores = None if own[0].scores is None else [score for piece in own for score in piece.scores or ()]
        ids = [i for piece in own for i in piece.token_ids]
        yield Piece(0, index, "".join(piece.text for piece in own), ids, scores, own[-1].finish_reason)


def one_by_one(kept: KeptRequest, generation: Generation) -> asyncio.Task[None]:
    """Deliver a record whenever the reader has taken the last one, so that no two are joined."""

    async def deliver() -> None:
        for record in kept.records:
            while generation.pieces:
                await asyncio.sleep(0)
            generation.take(record)

    return asyncio.create_task(deliver())


def at_once(kept: KeptRequest, generation: Generation) -> None:
    """Deliver all records together."""
    for record in kept.records:
        generation.take(record)


def only(num: int) -> Deliver:
    """Deliver the first `num` records, and not the end."""

    def deliver(kept: KeptRequest, generation: Generation) -> None:
        for record in kept.records[:-1][:num]:
            generation.take(record)

    return deliver


def failing_after(num: int) -> Deliver:
    """Deliver the first `num` records, and fail once they are taken."""
    first, tasks = only(num), set[asyncio.Task[None]]()

    async def fail(generation: Generation) -> None:
        while generation.pieces:
            await asyncio.sleep(0)
        generation.take(RequestFailed("internal", "a fault"))

    def deliver(kept: KeptRequest, generation: Generation) -> None:
        first(kept, generation)
        tasks.add(asyncio.create_task(fail(generation)))

    return deliver


class DurableEngine:
    """A durable engine client in front of kept requests. `is_durable` may be set to False: it is an ordinary one then.

    Attributes:
        deliver: How records come.
        cancelled, left: The durable ids of these.
        answers: What `call` returns, or raises, by method; a function is called with the arguments.
        calls: The methods that were called, in order.
    """

    def __init__(self, queue: KeptRequests, deliver: Deliver = one_by_one) -> None:
        self.name = "kept"
        self.is_durable = True
        self.info = INFO
        self.is_alive = True
        self.ended = asyncio.Event()
        self.num_unfinished = 0
        self.deliver = deliver
        self.cancelled: list[str] = []
        self.left: list[str] = []
        self.answers: dict[str, Any] = {}
        self.calls: list[str] = []
        self.queue = queue
        self._numbers = count()
        self._ids: dict[int, str] = {}
        self._tasks: dict[int, asyncio.Task[None] | None] = {}

    def submit(self, changed: asyncio.Event, observer: Observer | None = None, **request: Any) -> Generation:
        generation = Generation(next(self._numbers), changed, observer)
        own = request if self.is_durable else request | {"durable_id": f"here-{generation.number}"}
        durable_id = self._ids[generation.number] = own["durable_id"]
        kept = self.queue.requests.get(durable_id)
        given = kept.request if kept is not None else {}
        if own.get("attach") and given.get("tenant") != own["tenant"]:
            generation.take(RequestFailed("not_found", f"there is no request {durable_id}"))
        elif kept is not None and given["fingerprint"] != own["fingerprint"]:
            generation.take(RequestFailed("conflict", f"the request {durable_id} has another body"))
        else:
            generation.is_attached = kept is not None
            kept = kept or self.queue.begin(own)
            if self.is_durable:
                generation.created = kept.created
            self._tasks[generation.number] = self.deliver(kept, generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        self._end(generation, self.cancelled)

    def leave(self, generation: Generation) -> None:
        self._end(generation, self.left)

    def _end(self, generation: Generation, ids: list[str]) -> None:
        task = self._tasks.pop(generation.number, None)
        if task is not None:
            task.cancel()
        if generation.finished is None and generation.error is None and not generation.is_settled:
            ids.append(self._ids[generation.number])
            generation.settle()

    async def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append(method)
        answer = self.answers.get(method, RequestFailed("invalid", f"workers do not take {method}"))
        if isinstance(answer, Exception):
            raise answer
        return answer(**arguments) if callable(answer) else answer

    async def stop(self, drain_s: float = 0.0) -> None:
        self.is_alive = False
        self.ended.set()

    async def kill(self) -> None:
        await self.stop()


@dataclass
class Answer:
    """A response: its status and body."""

    status: int
    body: bytes
    events: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.events = [one + b"\n\n" for one in self.body.split(b"\n\n") if one]


class FrontEnd(LocalServer):
    """A server in front of `queue`."""

    def __init__(self, queue: KeptRequests, deliver: Deliver = one_by_one, keys: ApiKeys | None = None) -> None:
        self.engine = DurableEngine(queue, deliver)
        super().__init__(self._start, [ModelOptions("kept", "kept", response_format="hermes")], keys)
        self.client: httpx2.AsyncClient

    async def _start(self, reference: str, options: dict[str, Any], name: str) -> DurableEngine:
        return self.engine

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=FAR_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await super().__aexit__()

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        """The whole response. An underscore in a header's name stands for a dash."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.client.post(path, json=body, headers=named)
        return Answer(answer.status_code, answer.content)

    @property
    def last_request(self) -> dict[str, Any]:
        """The fields of the newest request that reached the engine."""
        return list(self.engine.queue.requests.values())[-1].request

    async def leave_after(self, path: str, body: dict[str, Any], num_events: int, **headers: str) -> list[bytes]:
        """Read so many events and close the connection."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        read = b""
        async with self.client.stream("POST", path, json=body, headers=named) as answer, aclosing(answer.aiter_raw()) as parts:
            while read.count(b"\n\n") < num_events:
                read += await anext(parts)
        return Answer(200, read).events


def scripted(*texts: str, reason: FinishReason = "stop", prompt_end: str = "", keys: ApiKeys | None = None) -> FrontEnd:
    """A server with a model in Hermes' format that says these texts, or `DIVING`. Its requests end with their clients."""
    server = FrontEnd(KeptRequests(texts or DIVING, reason, prompt_end), keys=keys)
    server.engine.is_durable = False
    return server

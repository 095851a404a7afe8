"""More models than fit on one card, simulated with the server's real router: requests in time, first tokens, loads.

    python -m benchmarks.models_on_demand [--json FILE] [--data DIR] [--cards h100,4090] [--counts 8,16]
                                          [--only router,lru,...] [--seeds 5] [--seed 0]

A request is in time if its first token comes within FIRST_S and the others BETWEEN_S apart on average. The arrangements serve
the same requests:

    router      the real `ModelRegistry`: its queue, victims, minimum residency, turns; a model that finds no memory waits for
                others, and busy ones make way: K and V of their requests are copied to the host, and back. A sleeper
                wakes by a copy from pinned memory over the link. Each model that is in has KV memory for the longest
                request, and all share the rest
    reload      the same, but waking reads the weights from the page cache: what pagetide does on CUDA today
    lru         as router, without a minimum residency and turns
    sleep       vLLM's sleep mode, level 1, driven by such a router: 0.3 s and the link, KV memory of FIXED_TOKENS a model
    ollama      loads from the page cache after 1 s, as many as fit (ollama3: three at most), keeps for 5 minutes, unloads the
                idle one that was used longest ago; FIXED_TOKENS of KV a model. Requests to models that are in go on while a
                model waits for room, as they do not in Ollama
    llama-swap  one model, 2 s and the page cache; a swap waits for the running requests, and later ones for the swap

Load: sessions begin at random (Poisson); a model's share is 1/rank (Zipf), ranks drawn by the seed. Turns are TURNS on average
(geometric), pauses around PAUSE_S (log-normal, sigma 0.8), each prompt holds the session so far, lengths are those of random
turns of Azure's conversations (with `--data none` log-normal ones), sessions end at LONGEST_TOKENS. Models are of four sizes in
turn. All files are in the page cache, and sleepers were started before. One card computes the steps of all models in turn, at
REACHED of its peaks; copies go over one link, one at a time. Of the card a sixteenth and 2 % are left free, and each model in
it has WORKSPACE_BYTES.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import selectors
import statistics
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

from benchmarks.arguments import add_data, names_of, parser_of, whole
from benchmarks.figures import Figure, percentile, report
from benchmarks.load import azure
from benchmarks.modelled_clock import H100, LLAMA_1B, LLAMA_8B, QWEN3_4B, QWEN3_14B, RTX_4090, Gpu, Model, Roofline
from pagetide.allocator.lease_policy import Rules
from pagetide.server.config import ModelOptions
from pagetide.server.engine_client import LoadFailed, RequestFailed
from pagetide.server.errors import ApiError
from pagetide.server.models import ModelRegistry
from pagetide.server.residency import Residency, RouterRules

REACHED = 0.6
WORKSPACE_BYTES = 500_000_000
STEP_TOKENS, MOST_RUNNING = 2_048, 64
FIRST_S, BETWEEN_S = 5.0, 0.1
SECONDS, TURNS, PAUSE_S = 900.0, 5, 25.0
LONGEST_TOKENS, MOST_OUTPUT, FIXED_TOKENS = 12_000, 1_000, 16_000
PAGE_CACHE = 5e9  # bytes a second of a file that is in memory
KEEP_S = 300.0
QWEN3_2B = Model(28, 2048, 6144, 16, 8, 128, 151936, tied=True)  # Qwen3-1.7B


@dataclass(frozen=True, slots=True)
class CardSpec:
    """A card, its link to the host, the sizes of its models in turn, and requests a second and model."""

    gpu: Gpu
    num_bytes: int
    link: float
    models: tuple[Model, ...]
    rate: float
    counts: tuple[int, ...]


_COUNTS = (7, 8, 9, 10, 12, 14, 16, 17, 18, 20, 22, 28)
CARDS = {
    "h100": CardSpec(H100, 80_000_000_000, 55e9, (QWEN3_2B, QWEN3_4B, LLAMA_8B, QWEN3_14B), 0.03, _COUNTS),
    "4090": CardSpec(RTX_4090, 24_000_000_000, 25e9, (LLAMA_1B, QWEN3_2B, QWEN3_4B, LLAMA_8B), 0.02, (3, 4, 5, 6, 7, 8, 10)),
}
GOALS = {
    "h100 16 router: in time": (0.95, "higher"), "h100 16 router: first token, p95": (4.0, "lower"),
    "4090 10 router: in time": (0.90, "higher"), "h100 28 router / lru: loads": (2.0, "lower"),
}  # fmt: skip


# ---- load ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class SessionRequest:
    """A turn of a session; `first` and `last` are the times of its tokens."""

    model: int
    session: int
    due: float
    prompt_tokens: int
    output_tokens: int
    first: float | None = None
    last: float | None = None
    computed: int = 0
    produced: int = 0
    is_kept: bool = False  # its K and V are on the host
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def context(self) -> int:
        """Tokens of which K and V are there."""
        return self.computed + self.produced

    @property
    def in_time(self) -> bool:
        if self.first is None or self.last is None:
            return False
        return self.first - self.due <= FIRST_S and self.last - self.first <= BETWEEN_S * max(1, self.output_tokens - 1)


@functools.cache
def lengths(folder: Path | None) -> list[tuple[int, int]]:
    """Prompt and output tokens of turns."""
    if folder is None:
        rng = random.Random("chats")
        return [(1 + int(rng.lognormvariate(6.7, 0.8)), 1 + int(rng.lognormvariate(5, 0.8))) for _ in range(2_000)]
    return [(turn.prompt_tokens, turn.output_tokens) for turn in azure(folder, "conv").turns]


def load_of(card: CardSpec, count: int, folder: Path | None, seed: int) -> list[SessionRequest]:
    """The requests of SECONDS, in order of time."""
    rng, turns = random.Random(seed), lengths(folder)
    ranks = rng.sample(range(1, count + 1), count)
    shares = [1 / rank for rank in ranks]
    found: list[SessionRequest] = []
    at, session = -20 * PAUSE_S, 0
    while (at := at + rng.expovariate(card.rate * count / TURNS)) < SECONDS:
        (model,) = rng.choices(range(count), shares)
        due, tokens, session = at, 0, session + 1
        while due < SECONDS:
            prompt, output = rng.choice(turns)
            tokens, output = tokens + prompt, min(output, MOST_OUTPUT)
            if tokens > LONGEST_TOKENS:
                break
            if due >= 0:
                found.append(SessionRequest(model, session, due, tokens, output))
            tokens += output
            due += rng.lognormvariate(math.log(PAUSE_S), 0.8)
            if rng.random() < 1 / TURNS:
                break
    return sorted(found, key=lambda one: one.due)


# ---- clock --------------------------------------------------------------------------------------


class ModelledLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class _Jumps(selectors.DefaultSelector):
    def __init__(self, loop: ModelledLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left that could go on")
        self._loop.jump(max(timeout, 0.0))
        return []


# ---- card ---------------------------------------------------------------------------------------


class CardModel:
    """A model on a card: its requests, its KV memory and its cached sessions.

    Args:
        fixed_tokens: The tokens of its KV memory; None: it has those of the longest request at least, and shares the rest.
    """

    def __init__(self, card: ModelledCard, shape: Model, fixed_tokens: int | None) -> None:
        self.card, self.shape = card, shape
        self.roofline = Roofline(card.spec.gpu, shape, REACHED)
        self.is_elastic = fixed_tokens is None
        self.kv_bytes = shape.kv_bytes * (LONGEST_TOKENS + MOST_OUTPUT if fixed_tokens is None else fixed_tokens)
        self.waiting: deque[SessionRequest] = deque()
        self.running: list[SessionRequest] = []
        self.cached: OrderedDict[int, tuple[int, float]] = OrderedDict()  # tokens and time, by session
        self.is_in = False
        self.leaving: asyncio.Event | None = None  # set when its requests are suspended
        self.num_loads = 0

    @property
    def base_bytes(self) -> int:
        """What it takes beside KV."""
        return self.shape.weights_bytes + WORKSPACE_BYTES

    def taken_bytes(self, more_bytes: int = 0, cached: bool = True) -> int:
        """What it takes while it is in, with or without what it has cached."""
        kv_bytes = self.live_bytes + more_bytes + (self.cached_bytes if cached else 0)
        return self.base_bytes + (max(self.kv_bytes, kv_bytes) if self.is_elastic else self.kv_bytes)

    @property
    def live_bytes(self) -> int:
        return sum(one.prompt_tokens + one.output_tokens for one in self.running) * self.shape.kv_bytes

    @property
    def cached_bytes(self) -> int:
        return sum(tokens for tokens, _ in self.cached.values()) * self.shape.kv_bytes

    async def serve(self, request: SessionRequest) -> None:
        """Wait for the end of a request."""
        self.waiting.append(request)
        self.card.changed.set()
        await request.done.wait()

    def admit(self) -> None:
        """Run waiting requests that there is memory for, in their order."""
        while self.waiting and len(self.running) < MOST_RUNNING:
            one = self.waiting[0]
            found, _ = self.cached.pop(one.session, (0, 0.0))
            if not self.card.find_kv(self, (one.prompt_tokens + one.output_tokens) * self.shape.kv_bytes):
                return
            if not one.is_kept:
                one.computed = min(found, one.prompt_tokens - 1)
            one.is_kept = False
            self.running.append(self.waiting.popleft())

    @property
    def kept_bytes(self) -> int:
        """K and V of suspended requests."""
        return sum(one.context for one in self.waiting if one.is_kept) * self.shape.kv_bytes

    def suspend(self) -> None:
        """Let the running requests wait, between two steps."""
        for one in self.running:
            one.is_kept = one.context > 0
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def end(self, request: SessionRequest, now: float) -> None:
        """A request has all its tokens; they stay cached."""
        request.last = now
        self.running.remove(request)
        self.cached[request.session] = (request.prompt_tokens + request.output_tokens, now)
        request.done.set()


class ModelledCard:
    """A card that computes the steps of its models in turn."""

    def __init__(self, spec: CardSpec, count: int, fixed_tokens: int | None) -> None:
        self.spec = spec
        rules = Rules.of(spec.num_bytes)
        self.num_bytes = spec.num_bytes - rules.headroom_bytes - rules.band_bytes
        self.models = [CardModel(self, spec.models[i % len(spec.models)], fixed_tokens) for i in range(count)]
        self.changed = asyncio.Event()
        self.link = asyncio.Lock()

    def can_enter(self, model: CardModel) -> bool:
        """Whether a model finds the memory that it needs, cached sessions aside."""
        return sum(one.taken_bytes(cached=False) for one in self._present(model)) <= self.num_bytes

    def _present(self, model: CardModel) -> list[CardModel]:
        """The models that are in, and this one."""
        return [one for one in self.models if one.is_in or one is model]

    async def enter(self, model: CardModel, seconds: float, bytes_per_s: float) -> None:
        """Copy the weights of a model that finds memory, and K and V of its suspended requests."""
        model.is_in = True
        model.num_loads += 1
        self._evict(model, 0)
        await asyncio.sleep(seconds)
        async with self.link:
            await asyncio.sleep(model.shape.weights_bytes / bytes_per_s + model.kept_bytes / self.spec.link)

    async def suspend(self, model: CardModel) -> None:
        """Copy K and V of a model's running requests to the host, once its step has ended."""
        model.leaving = asyncio.Event()
        self.changed.set()
        await model.leaving.wait()
        async with self.link:
            await asyncio.sleep(model.kept_bytes / self.spec.link)

    def leave(self, model: CardModel) -> None:
        """Give all memory of a model back."""
        assert not model.running
        model.is_in, model.leaving = False, None
        model.cached.clear()
        self.changed.set()

    def find_kv(self, model: CardModel, num_bytes: int) -> bool:
        """Whether there is KV memory for a request, without sessions that were used longest ago."""
        if not model.is_elastic and model.live_bytes + num_bytes > model.kv_bytes:
            return False
        needed = sum(one.taken_bytes(num_bytes if one is model else 0, cached=False) for one in self._present(model))
        if needed > self.num_bytes:
            return False
        self._evict(model, num_bytes)
        return True

    def _evict(self, model: CardModel, num_bytes: int) -> None:
        """Forget sessions until so much more KV of a model has its place."""
        while True:
            if model.is_elastic:
                present = self._present(model)
                excess = sum(one.taken_bytes(num_bytes if one is model else 0) for one in present) - self.num_bytes
                pool = [one for one in present if one is model or one.taken_bytes() > one.base_bytes + one.kv_bytes]
            else:
                excess, pool = model.live_bytes + model.cached_bytes + num_bytes - model.kv_bytes, [model]
            some = [one for one in pool if one.cached]
            if excess <= 0 or not some:
                return
            min(some, key=lambda one: next(iter(one.cached.values()))[1]).cached.popitem(last=False)

    async def compute(self) -> None:
        """Compute steps for ever."""
        while True:
            for model in self.models:
                if model.leaving is not None and not model.leaving.is_set():
                    model.suspend()
                    model.leaving.set()
                elif model.is_in and model.leaving is None:
                    model.admit()
            busy = [model for model in self.models if model.running]
            if not busy:
                self.changed.clear()
                await self.changed.wait()
            elif any(one.computed < one.prompt_tokens for model in busy for one in model.running):
                for model in busy:
                    await self._step(model)
            else:
                await self._decode(busy)

    async def _step(self, model: CardModel) -> None:
        """A step with a chunk of prompts."""
        decoding = [one for one in model.running if one.computed == one.prompt_tokens]
        left, chunks = STEP_TOKENS - len(decoding), list[tuple[SessionRequest, int]]()
        for one in model.running:
            if one.computed < one.prompt_tokens and left:
                chunks.append((one, min(left, one.prompt_tokens - one.computed)))
                left -= chunks[-1][1]
        before = sum(one.context for one in decoding) + sum(one.computed for one, _ in chunks)
        attended = sum(one.context for one in decoding) + sum(one.computed * n + n * n // 2 for one, n in chunks)
        samples = len(decoding) + len(chunks)
        await asyncio.sleep(model.roofline.step_s(STEP_TOKENS - left, samples, attended, before))
        for one, n in chunks:
            one.computed += n
        self._produced(model, decoding + [one for one, _ in chunks if one.computed == one.prompt_tokens], 1)

    async def _decode(self, busy: list[CardModel]) -> None:
        """Rounds of a token for each sequence, until one ends or something changes."""
        clock = asyncio.get_running_loop().time
        rounds = min(one.output_tokens - one.produced for model in busy for one in model.running)
        round_s = 0.0
        for model in busy:
            rows, context = len(model.running), sum(one.context for one in model.running)
            round_s += model.roofline.step_s(rows, rows, context + rows * rounds // 2, context + rows * rounds // 2)
        self.changed.clear()
        began = clock()
        try:
            async with asyncio.timeout(rounds * round_s):
                await self.changed.wait()
            done = min(rounds, math.ceil((clock() - began) / round_s - 1e-9))
            await asyncio.sleep(max(0.0, began + done * round_s - clock()))
        except TimeoutError:
            done = rounds
        for model in busy:
            self._produced(model, list(model.running), done)

    def _produced(self, model: CardModel, requests: list[SessionRequest], count: int) -> None:
        now = asyncio.get_running_loop().time()
        for one in requests if count else ():
            one.first = now if one.first is None else one.first
            one.produced += count
            if one.produced >= one.output_tokens:
                model.end(one, now)


# ---- arrangements -------------------------------------------------------------------------------


class Router(Protocol):
    """What decides which models are in."""

    def using(self, model: int) -> AbstractAsyncContextManager[None]:
        """Hold a model for a request."""

    async def prepare(self) -> None:
        """What was done before the first request."""


@dataclass(frozen=True, slots=True)
class Wakes:
    """How sleepers of a card wake up and fall asleep."""

    wake_s: float
    sleep_s: float
    from_page_cache: bool = False
    min_resident_s: float | None = None
    turns: bool = True  # whether busy models make way


class CardEngine:
    """What the registry takes for an engine process."""

    is_durable = False

    def __init__(self, model: CardModel, wakes: Wakes) -> None:
        self.model, self.wakes = model, wakes
        self.ended = asyncio.Event()
        self.info = SimpleNamespace(max_seqs=MOST_RUNNING, weights_bytes=model.shape.weights_bytes)

    @property
    def is_alive(self) -> bool:
        """Whether it was not stopped."""
        return not self.ended.is_set()

    async def call(self, method: str, suspends: bool = False, **_: Any) -> None:
        """Sleep or wake up. Raises RequestFailed."""
        card = self.model.card
        if method == "sleep":
            if suspends:
                await card.suspend(self.model)
            await asyncio.sleep(self.wakes.sleep_s)
            card.leave(self.model)
        elif not card.can_enter(self.model):
            raise RequestFailed("memory", "the card is full")
        else:
            await card.enter(self.model, self.wakes.wake_s, PAGE_CACHE if self.wakes.from_page_cache else card.spec.link)

    async def stop(self, drain_s: float = 0.0) -> None:
        """End."""
        self.ended.set()

    kill = stop


class RealRouter:
    """The server's registry."""

    def __init__(self, card: ModelledCard, wakes: Wakes) -> None:
        async def start(reference: str, options: Any, name: str) -> Any:
            model = card.models[int(name)]
            if not card.can_enter(model):
                raise LoadFailed("NotEnoughMemory", "the card is full")
            await card.enter(model, 2.0, PAGE_CACHE)
            return CardEngine(model, wakes)

        rules = RouterRules(min_resident_s=wakes.min_resident_s, **({} if wakes.turns else {"patience_s": math.inf}))
        self.models = ModelRegistry(cast(Any, start), rules, asyncio.get_running_loop().time)
        residency = Residency(keep_alive_s=-1, pinned=False, preload=False)
        self._served = [self.models.add(ModelOptions(str(i), "", residency=residency)) for i in range(len(card.models))]

    def using(self, model: int) -> AbstractAsyncContextManager[None]:
        """See `Router`."""
        return self.models.using(self._served[model])

    async def prepare(self) -> None:
        """Start each once."""
        for one in self._served:
            await self.models.until_serving(one)
            await self.models.sleep(one, 0.0)


class LoadingRouter:
    """Ollama's policy, and with one model llama-swap's.

    Args:
        most: Models at a time.
        start_s: Seconds of a start, beside reading.
        in_order: Requests to models that are in wait too while a model waits for room.
    """

    def __init__(self, card: ModelledCard, most: int, start_s: float, in_order: bool = False) -> None:
        self._card, self._most, self._start_s, self._in_order = card, most, start_s, in_order
        self._clock = asyncio.get_running_loop().time
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()
        self._running = [0] * len(card.models)
        self._used = [-math.inf] * len(card.models)
        self._loaded = [asyncio.Event() for _ in card.models]

    async def prepare(self) -> None:
        """Nothing: the files are in the page cache."""

    @asynccontextmanager
    async def using(self, model: int) -> AsyncIterator[None]:
        """See `Router`."""
        one, loads = self._card.models[model], False
        self._unload_idle()
        async with AsyncExitStack() as stack:
            if self._in_order or not one.is_in:
                await stack.enter_async_context(self._queue)
            if not one.is_in:
                await self._make_room(one)
                one.is_in = loads = True
            self._running[model] += 1
        if loads:
            await self._card.enter(one, self._start_s, PAGE_CACHE)
            self._loaded[model].set()
        await self._loaded[model].wait()
        try:
            yield
        finally:
            self._running[model] -= 1
            self._used[model] = self._clock()
            self._freed.set()

    async def _make_room(self, model: CardModel) -> None:
        while not self._card.can_enter(model) or sum(one.is_in for one in self._card.models) >= self._most:
            idle = [i for i, one in enumerate(self._card.models) if one.is_in and not self._running[i]]
            if idle:
                self._unload(min(idle, key=self._used.__getitem__))
            else:
                self._freed.clear()
                await self._freed.wait()

    def _unload_idle(self) -> None:
        for i, one in enumerate(self._card.models):
            if one.is_in and not self._running[i] and self._clock() - self._used[i] > KEEP_S:
                self._unload(i)

    def _unload(self, model: int) -> None:
        self._loaded[model].clear()
        self._card.leave(self._card.models[model])


ARRANGEMENTS: dict[str, tuple[int | None, Callable[[ModelledCard], Router]]] = {
    "router": (None, lambda card: RealRouter(card, Wakes(0.02, 0.02))),
    "reload": (None, lambda card: RealRouter(card, Wakes(0.5, 0.02, from_page_cache=True))),
    "lru": (None, lambda card: RealRouter(card, Wakes(0.02, 0.02, min_resident_s=0.0, turns=False))),
    "sleep": (FIXED_TOKENS, lambda card: RealRouter(card, Wakes(0.3, 0.3, min_resident_s=0.0, turns=False))),
    "ollama": (FIXED_TOKENS, lambda card: LoadingRouter(card, len(card.models), 1.0)),
    "ollama3": (FIXED_TOKENS, lambda card: LoadingRouter(card, 3, 1.0)),
    "llama-swap": (FIXED_TOKENS, lambda card: LoadingRouter(card, 1, 2.0, in_order=True)),
}


@dataclass(frozen=True, slots=True)
class DemandOutcome:
    """What an arrangement gave for one load."""

    in_time: float
    first_s: float  # p95; infinite if so many never came
    loads: int


def run(spec: CardSpec, count: int, arrangement: str, load: Sequence[SessionRequest]) -> DemandOutcome:
    """Serve `load`."""
    with asyncio.Runner(loop_factory=ModelledLoop) as runner:
        return runner.run(_serve(spec, count, arrangement, load))


async def _serve(spec: CardSpec, count: int, arrangement: str, load: Sequence[SessionRequest]) -> DemandOutcome:
    fixed_tokens, make = ARRANGEMENTS[arrangement]
    card = ModelledCard(spec, count, fixed_tokens)
    router = make(card)
    computing = asyncio.create_task(card.compute())
    await router.prepare()
    for model in card.models:
        model.num_loads = 0
    clock = asyncio.get_running_loop().time
    began = clock()

    async def ask(request: SessionRequest) -> None:
        request.due += began
        await asyncio.sleep(request.due - clock())
        try:
            async with router.using(request.model):
                await card.models[request.model].serve(request)
        except ApiError:
            pass  # it waited too long

    asking = [asyncio.create_task(ask(request)) for request in load]
    await asyncio.wait(asking, timeout=2 * SECONDS)
    for task in (computing, *asking):
        task.cancel()
    await asyncio.gather(computing, *asking, return_exceptions=True)
    waits = [math.inf if one.first is None else one.first - one.due for one in load]
    loads = sum(model.num_loads for model in card.models)
    return DemandOutcome(sum(one.in_time for one in load) / len(load), percentile(waits, 0.95), loads)


# ---- figures ------------------------------------------------------------------------------------


Outcomes = dict[tuple[str, int, str], list[DemandOutcome]]


def figures(outcomes: Outcomes) -> list[Figure]:
    """Of each card, number of models and arrangement the means; of each card and arrangement the most models at 90 %."""
    table: list[Figure] = []
    for (card, count, arrangement), some in outcomes.items():
        name = f"{card} {count} {arrangement}"
        in_time, first_s = [one.in_time for one in some], [one.first_s for one in some]
        table.append(_figure(f"{name}: in time", statistics.mean(in_time), "", in_time))
        table.append(_figure(f"{name}: first token, p95", statistics.mean(first_s), "s", first_s))
        table.append(_figure(f"{name}: loads", statistics.mean(one.loads for one in some), ""))
        if arrangement == "router" and (other := outcomes.get((card, count, "lru"))):
            ratio = sum(one.loads for one in some) / max(1, sum(one.loads for one in other))
            table.append(_figure(f"{name} / lru: loads", ratio, "x"))
    most: dict[tuple[str, str], int] = {}
    for (card, count, arrangement), some in outcomes.items():
        if statistics.mean(one.in_time for one in some) >= 0.9:
            most[card, arrangement] = max(count, most.get((card, arrangement), 0))
    for (card, arrangement), count in most.items():
        table.append(_figure(f"{card} {arrangement}: models at 90 % in time", count, ""))
    for card in dict.fromkeys(card for card, _ in most):
        if (card, "router") in most and (card, "ollama") in most:
            ratio = most[card, "router"] / most[card, "ollama"]
            table.append(Figure(f"{card} router / ollama: models at 90 %", ratio, "x", 2.0, "higher"))
    return table


def _figure(name: str, value: float, unit: str, samples: Sequence[float] = ()) -> Figure:
    goal, better = GOALS.get(name, (None, "lower"))
    return Figure(name, value, unit, goal, cast(Any, better), [round(one, 4) for one in samples])


def _counts(text: str) -> list[int]:
    return [whole(one) for one in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_data(parser, "the traces", "log-normal lengths")
    parser.add_argument("--cards", type=names_of(list(CARDS), "card"), default=list(CARDS), metavar="NAMES")
    parser.add_argument("--counts", type=_counts, metavar="N,N", help="of models (default: those that the tables have)")
    parser.add_argument("--only", type=names_of(list(ARRANGEMENTS), "arrangement"), default=list(ARRANGEMENTS), metavar="NAMES")
    parser.add_argument("--seeds", type=whole, default=5, help="default %(default)s")
    args = parser.parse_args(argv)
    outcomes: Outcomes = {}
    for card in args.cards:
        for count in args.counts or CARDS[card].counts:
            for arrangement in args.only:
                outcomes[card, count, arrangement] = [
                    run(CARDS[card], count, arrangement, load_of(CARDS[card], count, args.data, args.seed + number))
                    for number in range(args.seeds)
                ]
                print(f"  {card} {count} {arrangement}: {outcomes[card, count, arrangement]}", flush=True)
    report("models on demand: more than fit on one card, simulated", figures(outcomes), args.seed, args.json)


if __name__ == "__main__":
    main()

"""`pagetide demo`: serves many prompts from a KV pool too small for all of them, live.

On a CPU the pool is elastic, on a private device with its own broker: in the middle of the run half of it is recalled,
and later it may grow again. The same requests then run with room for all, and the tokens of both runs are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.units import MIB, format_bytes
from .block_map import holders_of
from .display import Show, open_display, print_result
from .engines import SAMPLE_S, DemoEngine, DemoOutput, DemoRequest, start_with_room, while_looking
from .page import Counts, DemoState, Pane
from .results import DemoResult, EngineRun, RecallResult, counted

if TYPE_CHECKING:
    from ..pressure import PrivateDevice

LEAST_PROMPTS = 16
MAX_STEP_TOKENS = 160  # small, so that long prompts are prefilled in chunks alongside other requests
HEADROOM_BYTES = 8 * MIB  # of the private device
SPARE_BYTES = 512 * MIB  # device memory for what the process holds besides weights and KV
NUM_PANES = 2
ENDED_S = 1.5  # that the pane of an ended request stays
MOST_HISTORY = 6000  # samples
TABLE_WIDTH = 100
FILLED = 0.7  # share of the pool's blocks in use when half of them is recalled
MOST_RECALLS = 5  # until a part of the memory is back
PARTS = 4  # in which the half is recalled, so that the map is seen to drain
PART_S = 0.4


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs. Raises ValueError for numbers out of range."""

    device: str = "auto"
    num_prompts: int = 24
    max_new_tokens: int = 96
    share: float = 0.5  # of the blocks that all prompts need: the pool
    seed: int = 0

    def __post_init__(self) -> None:
        from ..api.sampling_params import SamplingParams

        if self.num_prompts < LEAST_PROMPTS:
            raise ValueError(f"the demo needs at least {LEAST_PROMPTS} prompts, got {self.num_prompts}")
        if not 0 < self.share <= 1:
            raise ValueError(f"the pool's share of the need must be in (0, 1], got {self.share}")
        SamplingParams(max_new_tokens=self.max_new_tokens, seed=self.seed)

    def requests(self) -> list[DemoRequest]:
        """Pieces of the held-out text, of very different lengths."""
        texts, rng = passages(), random.Random(self.seed)
        requests = []
        for i in range(self.num_prompts):
            words = texts[i % len(texts)].split(" ")
            length = rng.choice([8, 20, 40, 80, 160, 240])
            first = rng.randrange(max(1, len(words) - length))
            params = {"max_new_tokens": self.max_new_tokens, "seed": self.seed + i}
            requests.append(DemoRequest(" ".join(words[first : first + length]), params))
        return requests

    def first_state(self) -> DemoState:
        """What is shown while everything loads."""
        return DemoState(
            title=f"{self.num_prompts} prompts, one KV pool",
            now="Loading PyTorch and the bundled model ...",
            intro=f"{self.num_prompts} prompts, up to {self.max_new_tokens} new tokens each, will run together out of a KV "
            f"pool with {self.share:.0%} of the blocks that they need. On a CPU, half of the pool is recalled in the middle "
            "of it, and comes back later. Then the same prompts run with room for all, and the tokens are compared.",
        )


def passages() -> list[str]:
    """The passages of the held-out text, on which the bundled model was not trained."""
    from ..engine import demo_model

    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    return [passage.strip() for passage in text.split("\n%%\n") if passage.strip()]


def run(options: DemoOptions, *, as_json: bool = False, with_table: bool = False) -> int:
    """Run the whole demo. Returns 0 if every request was served and both runs gave the same tokens, else 1."""
    with open_display(options.first_state(), silent=as_json) as show:
        result = asyncio.run(run_demo(options, show))
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False, indent=1))
    else:
        width = min(shutil.get_terminal_size().columns, TABLE_WIDTH)
        print_result([*(result.table_lines(width) if with_table else []), *result.lines()])
    return 0 if result.is_success else 1


async def run_demo(options: DemoOptions, show: Show) -> DemoResult:
    """Both runs, shown by `show`."""
    from ..pressure import PrivateDevice

    requests, state = options.requests(), options.first_state()
    async with contextlib.AsyncExitStack() as stack:
        roomy = await start_with_room(max(512, 8 * options.num_prompts) * MIB, options.device)
        stack.push_async_callback(roomy.close)
        each = await blocks_needed(roomy, requests)
        need, largest = sum(each), max(each)
        num_blocks = max(int(need * options.share), largest) + 1  # the 1 is the null block
        block_bytes = (await roomy.frame())["pool"]["block_bytes"]
        kv_bytes = num_blocks * block_bytes
        tight_options = {"device": roomy.device, "max_step_tokens": MAX_STEP_TOKENS}
        if roomy.device == "cpu":
            capacity = roomy.stats["memory"]["base_bytes"] + kv_bytes + SPARE_BYTES + HEADROOM_BYTES
            device = stack.enter_context(PrivateDevice(capacity, HEADROOM_BYTES))
            elastic = {"min": (largest + 1) * block_bytes, "max": kv_bytes}
            tight = await DemoEngine.start("the demo", {**tight_options, "kv_memory": elastic}, device.environ)
            recall = PoolRecall(tight, device, num_blocks)
        else:
            tight = await DemoEngine.start("the demo", {**tight_options, "kv_memory": kv_bytes, "share": False})
            recall = None
        stack.push_async_callback(tight.close)
        title = f"{state.title} of {num_blocks - 1} blocks for a need of {need}"
        watched = WatchedEngine(show, replace(state, title=title, now="The prompts run ..."), tight, len(requests), recall)
        pressed, seconds = await while_looking(serve(tight, requests, each, num_blocks - 1, recall), watched.look)
        await tight.look()
        state = replace(state, title=f"{state.title} with room for all", now="The same again, to compare the tokens ...")
        with_room = await while_looking(roomy.serve(requests), WatchedEngine(show, state, roomy, len(requests)).look)
        await roomy.look()
    return DemoResult(
        EngineRun(pressed, with_room, seconds, tight.stats), tight.device, num_blocks - 1, need,
        roomy.stats["preemptions"], None if recall is None else recall.result(),
    )  # fmt: skip


async def blocks_needed(engine: DemoEngine, requests: Sequence[DemoRequest]) -> list[int]:
    """Blocks that each request needs if it generates the maximum."""
    pool = (await engine.frame())["pool"]
    blocks = []
    for request in requests:
        tokens = (await engine.call("tokenize", prompt=request.prompt))["tokens"]
        length = min(len(tokens) + request.params["max_new_tokens"], pool["max_model_len"])
        blocks.append(-(-(length - 1) // pool["block_size"]))
    return blocks


async def serve(
    engine: DemoEngine, requests: Sequence[DemoRequest], blocks: Sequence[int], usable: int, recall: PoolRecall | None
) -> tuple[list[DemoOutput], float]:
    """The outputs of all requests, and the seconds that they took.

    With a recall those run first that fill the pool, until it is over: memory comes back only for requests that need it.
    """

    async def timed(some: Sequence[DemoRequest]) -> tuple[list[DemoOutput], float]:
        began = time.perf_counter()
        return await engine.serve(some), time.perf_counter() - began

    if recall is None:
        return await timed(requests)
    num_first = num_filling(blocks, usable)
    (first, first_s), _ = await asyncio.gather(timed(requests[:num_first]), recall.run())
    rest, rest_s = await timed(requests[num_first:])
    return first + rest, first_s + rest_s


def num_filling(blocks: Sequence[int], usable: int) -> int:
    """How many of the first requests fill a pool of `usable` blocks; `blocks` are what each needs."""
    return next((n for n, taken in enumerate(itertools.accumulate(blocks), 1) if taken >= usable), len(blocks))


class PoolRecall:
    """The recall of half of a well-filled pool, bit by bit, as `vram-monitor recall` does it, until the pool may grow again.

    `run` it beside the requests, while `engine.look` is called.
    """

    def __init__(self, engine: DemoEngine, device: PrivateDevice, most_blocks: int) -> None:
        self.now = "The pool fills: each request gets blocks as it grows."  # what happens, for the display
        self.is_taking = False  # whether the pool is being kept small
        self._engine, self._device, self._most_blocks = engine, device, most_blocks
        self._largest = self._smallest = self._grown_before = 0

    def result(self) -> RecallResult:
        """What happened, by the engine's newest statistics."""
        memory = self._memory
        grown = memory["grown_bytes"] - self._grown_before
        return RecallResult(memory["recalls"], self._largest, self._smallest, memory["given_back_bytes"], grown)

    async def run(self) -> None:
        """Wait until the pool is filled, take half of it, and wait until the broker lets it grow again."""
        from ..allocator.errors import LeaseRefused
        from ..allocator.lease_policy import Rules

        while not self._is_filled():
            await asyncio.sleep(SAMPLE_S)
        self._grown_before = self._memory["grown_bytes"]
        self.is_taking = True
        self.now = f"RECALL: half of the pool, {format_bytes(self._largest // 2)}, must go back to the system."
        try:
            for part in range(1, PARTS + 1):
                await self._take_down_to(self._largest - self._largest * part // (2 * PARTS))
        except LeaseRefused:  # the lease is at its minimum
            pass
        self.now = "Half of the pool is taken: some requests lose their blocks and wait."
        until = time.monotonic() + Rules.of(self._device.capacity_bytes).cooldown_s
        while time.monotonic() < until:
            await self._look()
        self.is_taking = False
        self.now = "The memory comes back: the pool grows as requests need it."

    async def _take_down_to(self, target_bytes: int) -> None:
        """Recall until the pool has `target_bytes`, for at least PART_S. Raises LeaseRefused at the lease's minimum."""
        until = time.monotonic() + PART_S
        for _ in range(MOST_RECALLS):  # the first recall is answered with memory that libraries cache
            if (over_bytes := self._memory["kv_bytes"] - target_bytes) <= 0:
                break
            self._device.client.recall(self._memory["lease"]["name"], over_bytes)
            await self._look()
            while any(lease.state != "ok" for lease in self._device.leases()):
                await self._look()
        while time.monotonic() < until:
            await self._look()

    async def _look(self) -> None:
        await asyncio.sleep(SAMPLE_S)
        self._smallest = min(self._smallest, self._memory["kv_bytes"])

    @property
    def _memory(self) -> dict[str, Any]:
        memory: dict[str, Any] = self._engine.stats["memory"]
        return memory

    def _is_filled(self) -> bool:
        """Whether more blocks are in use than will be left, or no request remains that could use more."""
        if not self._engine.stats:
            return False
        self._largest = self._smallest = max(self._largest, self._memory["kv_bytes"])
        live = self._engine.stats["blocks"]["live"]
        return bool(live > FILLED * self._most_blocks or all(one.finish_reason for one in self._engine.outputs))


@dataclass(eq=False)
class WatchedEngine:
    """An engine as the display shows it: its pool, its numbers, and the texts of two of its requests."""

    show: Show
    state: DemoState
    engine: DemoEngine
    total: int  # requests
    recall: PoolRecall | None = None
    _shown: list[int] = field(default_factory=list)
    _tokens_at: list[tuple[float, int]] = field(default_factory=list)  # tokens so far, in the last seconds

    async def look(self) -> None:
        """Sample the engine, and show it."""
        await self.engine.look()
        frame = await self.engine.frame()
        stats, pool, now = self.engine.stats, holders_of(frame), time.monotonic()
        waiting = {int(label) for _, label, *_ in frame["waiting"][1]}
        held = {int(label) for _, _, label, *_ in frame["rows"]}
        if self.recall is not None:
            self.state = replace(self.state, now=self.recall.now, alarm=self.recall.is_taking)
        done = sum(output.ended_at is not None for output in self.engine.outputs)
        counts = Counts(
            stats["running"], stats["waiting"], stats["preemptions"], done, self.total, steps=stats["steps"],
            tokens_per_s=self._speed(now),
        )  # fmt: skip
        self.state = replace(
            self.state, pool=pool, panes=self._panes(held, waiting, now), engines=(counts,),
            history=(*self.state.history, (pool.num_mapped, pool.num_held))[-MOST_HISTORY:],
        )  # fmt: skip
        self.show(self.state)

    def _speed(self, now: float) -> float:
        """Tokens per second of the last two seconds."""
        self._tokens_at.append((now, sum(len(output.token_ids) for output in self.engine.outputs)))
        while len(self._tokens_at) > 2 and self._tokens_at[1][0] < now - 2.0:
            self._tokens_at.pop(0)
        (first_at, first), (last_at, last) = self._tokens_at[0], self._tokens_at[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def _panes(self, held: set[int], waiting: set[int], now: float) -> tuple[Pane, ...]:
        """Two requests that have begun to stream; one that has ended is replaced after a moment."""
        outputs = self.engine.outputs
        candidates = [number for number in sorted(held) if outputs[number].token_ids and number not in self._shown]
        for place in range(NUM_PANES):
            if place == len(self._shown):
                if candidates:
                    self._shown.append(candidates.pop(0))
            elif candidates and now - (outputs[self._shown[place]].ended_at or now) > ENDED_S:
                self._shown[place] = candidates.pop(0)
        return tuple(_pane(number, outputs[number], number in waiting) for number in self._shown)


def _pane(number: int, output: DemoOutput, is_waiting: bool) -> Pane:
    word = "ended" if output.ended_at is not None else "preempted, waits" if is_waiting else "running"
    return Pane(number, f"{word}, {counted(len(output.token_ids), 'token')}", str(output.prompt), output.text)

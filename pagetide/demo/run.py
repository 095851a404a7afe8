"""`pagetide demo`: serves many prompts from a KV pool too small for all of them, live.

On a CPU the pool is elastic, on a private device with its own broker: in the middle of the run half of it is recalled,
and later it may grow again. The same requests then run with room for all, and the tokens of both runs are compared.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .block_map import sample_pool
from .display import Display, open_display, print_result
from .engines import blocks_needed, open_engines, plan_pool
from .prompts import demo_prompts, waves
from .recall import PoolRecall
from .results import DemoResult, DemoRun, counted
from .text_panes import Pane
from .view import DRAWINGS, Counts, DemoState

if TYPE_CHECKING:
    from ..api.sampling_params import SamplingParams
    from ..engine.llm import LLM
    from ..engine.requests.outputs import RequestOutput, StreamChunk

LEAST_PROMPTS = 16
SAMPLE_S = 0.1
NUM_PANES = 2
ENDED_S = 1.5  # that the pane of an ended request stays
MOST_HISTORY = 6000  # samples
TABLE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs. Raises ValueError for numbers out of range."""

    device: str = "auto"
    num_prompts: int = 24
    max_new_tokens: int = 96
    share: float = 0.5  # of the blocks that all prompts need: the pool
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < LEAST_PROMPTS:
            raise ValueError(f"the demo needs at least {LEAST_PROMPTS} prompts, got {self.num_prompts}")
        if not 0 < self.share <= 1:
            raise ValueError(f"the pool's share of the need must be in (0, 1], got {self.share}")
        self.sampling()

    def sampling(self) -> list[SamplingParams]:
        """The sampling parameters of each prompt."""
        from ..api.sampling_params import SamplingParams

        return [SamplingParams(max_new_tokens=self.max_new_tokens, seed=self.seed + i) for i in range(self.num_prompts)]

    def first_state(self) -> DemoState:
        """What is shown while everything loads."""
        return DemoState(
            title=f"{self.num_prompts} prompts, one KV pool",
            now="Loading PyTorch and the bundled model ...",
            intro=f"{self.num_prompts} prompts, up to {self.max_new_tokens} new tokens each, will run together out of a KV "
            f"pool with {self.share:.0%} of the blocks that they need. On a CPU, half of the pool is recalled in the middle "
            "of it, and comes back later. Then the same prompts run with room for all, and the tokens are compared.",
        )


def run(options: DemoOptions, *, as_json: bool = False, with_table: bool = False) -> int:
    """Run the whole demo. Returns 0 if every request was served and both runs gave the same tokens, else 1."""
    with open_display(options.first_state(), DRAWINGS, silent=as_json) as display:
        result = run_demo(options, display)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False, indent=1))
    else:
        width = min(shutil.get_terminal_size().columns, TABLE_WIDTH)
        print_result([*(result.table_lines(width) if with_table else []), *result.lines()])
    return 0 if result.is_success else 1


def run_demo(options: DemoOptions, display: Display[DemoState]) -> DemoResult:
    """Both runs, shown on `display`."""
    prompts, params, state = demo_prompts(options.num_prompts, options.seed), options.sampling(), options.first_state()
    each = blocks_needed(prompts, options.max_new_tokens)
    need, largest = sum(each), max(each)
    plan = plan_pool(options.device, max(int(need * options.share), largest) + 1)  # the 1 is the null block
    usable, everything = plan.num_blocks - 1, [range(len(prompts))]
    with open_engines(plan, least_blocks=largest + 1, roomy_blocks=need + 1) as (tight, roomy, private):
        recall = None if private is None else PoolRecall(private, plan.num_blocks)
        running = replace(state, title=f"{state.title} of {usable} blocks for a need of {need}", now="The prompts run ...")
        watched = Watched(display, running, prompts, params)
        pressed = serve(tight, watched, everything if recall is None else waves(each, usable), recall)
        comparing = replace(state, title=f"{state.title} with room for all", now="The same again, to compare the tokens ...")
        free = serve(roomy, Watched(display, comparing, prompts, params), everything, None)
    return DemoResult(pressed, free, usable, need)


def serve(llm: LLM, watched: Watched, at_once: Sequence[range], recall: PoolRecall | None) -> DemoRun:
    """Stream all prompts of `watched`. The first wave lasts until the recall is over."""
    outputs: dict[int, RequestOutput] = {}
    began = time.perf_counter()
    for wave in at_once:
        stream = llm.stream([watched.prompts[i] for i in wave], [watched.params[i] for i in wave])
        watched.numbers |= {one.request_id: wave[one.index] for one in stream.requests}
        for chunk in stream:
            watched.take(wave[chunk.index], chunk)
            if chunk.output is not None:
                outputs[wave[chunk.index]] = chunk.output
            watched.look(llm, len(outputs), recall)
        waits = time.perf_counter()
        while recall is not None and not recall.is_over:  # the memory may come back only after all is done
            watched.look(llm, len(outputs), recall)
            time.sleep(0.01)
        began += time.perf_counter() - waits
    seconds = time.perf_counter() - began
    stats = llm.stats()
    result = None if recall is None else recall.result(stats)
    return DemoRun([outputs[i] for i in range(len(watched.prompts))], seconds, stats, result)


@dataclass(eq=False)
class Watched:
    """A run as the display sees it. `look` samples the engine about ten times a second and shows the new state."""

    display: Display[DemoState]
    state: DemoState
    prompts: list[str]
    params: list[SamplingParams]
    numbers: dict[str, int] = field(default_factory=dict)  # of the requests, by id
    _texts: dict[int, str] = field(default_factory=dict)
    _num_tokens: dict[int, int] = field(default_factory=dict)
    _ended_at: dict[int, float] = field(default_factory=dict)
    _shown: list[int] = field(default_factory=list)
    _tokens_at: list[tuple[float, int]] = field(default_factory=list)  # tokens so far, in the last seconds
    _next: float = 0.0

    def take(self, number: int, chunk: StreamChunk) -> None:
        """Note what request `number` has generated."""
        self._texts[number] = self._texts.get(number, "") + chunk.text
        self._num_tokens[number] = self._num_tokens.get(number, 0) + len(chunk.token_ids)
        if chunk.output is not None:
            self._ended_at[number] = time.monotonic()

    def look(self, llm: LLM, done: int, recall: PoolRecall | None) -> None:
        """Sample the engine and let the recall advance, unless it is too early."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + SAMPLE_S
        stats = llm.stats()
        changes: dict[str, Any] = {}
        if recall is not None and not recall.is_over:
            recall.advance(stats)
            changes = {"now": recall.now or "The memory comes back: the pool grows as requests need it."}
            changes["alarm"] = recall.is_taking
        pool, waiting = sample_pool(llm, self.numbers)
        held = set(pool.holders.tolist())
        self.state = replace(
            self.state, pool=pool, panes=self._panes(held, waiting, now), **changes,
            history=(*self.state.history, (pool.num_mapped, pool.num_held))[-MOST_HISTORY:],
            counts=Counts(
                stats["steps"], stats["running"], stats["waiting"], stats["preemptions"], done, len(self.prompts),
                self._speed(now),
            ),
        )  # fmt: skip
        self.display.show(self.state)

    def _speed(self, now: float) -> float:
        """Tokens per second of the last two seconds."""
        self._tokens_at.append((now, sum(self._num_tokens.values())))
        while len(self._tokens_at) > 2 and self._tokens_at[1][0] < now - 2.0:
            self._tokens_at.pop(0)
        (first_at, first), (last_at, last) = self._tokens_at[0], self._tokens_at[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def _panes(self, held: set[int], waiting: set[int], now: float) -> tuple[Pane, ...]:
        """Two requests that have begun to stream; one that has ended is replaced after a moment."""
        candidates = [number for number in sorted(held) if number in self._texts and number not in self._shown]
        for place in range(NUM_PANES):
            if place == len(self._shown):
                if candidates:
                    self._shown.append(candidates.pop(0))
            elif candidates and now - self._ended_at.get(self._shown[place], now) > ENDED_S:
                self._shown[place] = candidates.pop(0)
        return tuple(
            Pane(number, self._word(number, waiting), self.prompts[number], self._texts[number]) for number in self._shown
        )

    def _word(self, number: int, waiting: set[int]) -> str:
        word = "ended" if number in self._ended_at else "preempted, waits" if number in waiting else "running"
        return f"{word}, {counted(self._num_tokens[number], 'token')}"

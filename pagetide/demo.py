"""`pagetide demo`: serves many prompts with the bundled model from a KV pool too small for all of them, live.

On a CPU the pool is elastic, on a private device with its own broker: in the middle of the run half of it is recalled,
and later it may grow again. The same requests then run with room for all, and the tokens of both runs are compared.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .monitor.units import MIB

if TYPE_CHECKING:
    from .engine.llm import LLM
    from .engine.memory.planning import MemoryPlan
    from .engine.requests.outputs import RequestOutput
    from .pressure import PrivateDevice
    from .scheduler.request import SamplingParams

LEAST_PROMPTS = 16
MAX_STEP_TOKENS = 160  # small, so that long prompts are prefilled in chunks alongside other requests
BLOCK_SIZE = 16
REFRESH_S = 0.1
FILLED = 0.7  # share of the pool's blocks in use when half of them is recalled
MOST_RECALLS = 5
HEADROOM_BYTES = 8 * MIB  # the headroom of the private device
_SPARE_BYTES = 512 * MIB  # device memory for what the process holds besides weights and KV
_COMPARED_BYTES = 128 * MIB  # extra memory of the pool with room for all


@dataclass
class _DemoRun:
    """One pass over all prompts."""

    outputs: list[RequestOutput]
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)
    pressure: dict[str, Any] = field(default_factory=dict)  # rows of the closing table

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def run(
    *, device: str = "auto", num_prompts: int = 24, max_new_tokens: int = 128, share: float = 0.5, seed: int = 0,
    as_json: bool = False,
) -> int:  # fmt: skip
    """Run the whole demo. Returns 0 if every request was served and both runs gave the same tokens, else 1.

    Raises ValueError for numbers out of range.
    """
    if num_prompts < LEAST_PROMPTS:
        raise ValueError(
            f"the demo needs at least {LEAST_PROMPTS} prompts, to have something to juggle; got {num_prompts}"
        )
    if not 0 < share <= 1:
        raise ValueError(f"the pool's share of the need must be in (0, 1], got {share}")
    from .scheduler.request import SamplingParams

    prompts = _prompts(num_prompts, seed)
    params = [SamplingParams(max_new_tokens=max_new_tokens, seed=seed + i) for i in range(num_prompts)]
    say = (lambda *_: None) if as_json else print
    say(f"{num_prompts} prompts, up to {max_new_tokens} new tokens each; loading the bundled model ...")
    each = _blocks(prompts, max_new_tokens)
    need, largest = sum(each), max(each)
    plan = _plan(device, max(int(need * share), largest) + 1)  # the 1 is the null block
    usable, at_once = plan.num_blocks - 1, [range(num_prompts)]
    with _engines(plan, least_blocks=largest + 1, roomy_blocks=need + 1) as (tight, roomy, pressure):
        say(f"together they need {need} blocks of {BLOCK_SIZE} tokens; the pool has {usable}")
        if pressure is not None:
            say("in the middle of it half of the pool is recalled: its memory goes back to the system, and comes again")
        say()
        pressed = _serve(
            tight, prompts, params, not as_json, at_once if pressure is None else _waves(each, usable), pressure
        )
        say("the same again, with room for all ...")
        free = _serve(roomy, prompts, params, not as_json, at_once)
    table = _table(pressed, free, usable, need)
    if as_json:
        texts = [{"prompt": o.prompt, "text": o.text, "finish_reason": o.finish_reason} for o in pressed.outputs]
        print(json.dumps({**table, "outputs": texts}, ensure_ascii=False, indent=1))
    else:
        _show(pressed, table)
    served = all(output.finish_reason in ("stop", "length") for output in [*pressed.outputs, *free.outputs])
    return 0 if served and table["tokens equal to an unpressured run"] else 1


def _prompts(count: int, seed: int) -> list[str]:
    """Pieces of the held-out text, of very different lengths; the model was not trained on it."""
    import random

    from .engine import demo_model

    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    passages = [passage.strip() for passage in text.split("\n%%\n") if passage.strip()]
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        words = passages[i % len(passages)].split(" ")
        length = rng.choice([8, 20, 40, 80, 160, 240])
        first = rng.randrange(max(1, len(words) - length))
        prompts.append(" ".join(words[first : first + length]))
    return prompts


def _blocks(prompts: list[str], max_new_tokens: int) -> list[int]:
    """Blocks that each prompt needs if it generates the maximum."""
    from .engine.build import plan_only
    from .engine.config import EngineConfig, resolve_model
    from .engine.loading.loader import load_tokenizer

    tokenizer: Any = load_tokenizer(resolve_model("demo"))
    most = plan_only(EngineConfig.resolve("demo", device="cpu")).max_model_len
    lengths = [min(len(tokenizer(prompt)["input_ids"]) + max_new_tokens, most) for prompt in prompts]
    return [-(-(length - 1) // BLOCK_SIZE) for length in lengths]


def _plan(device: str, num_blocks: int) -> MemoryPlan:
    """The memory plan on `device`, with a pool of at most `num_blocks` blocks."""
    from .engine.build import plan_only
    from .engine.config import EngineConfig

    def plan(kv_memory: int | None) -> MemoryPlan:
        options: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_step_tokens": MAX_STEP_TOKENS}
        return plan_only(EngineConfig.resolve("demo", device=device, kv_memory=kv_memory, **options))

    return plan(num_blocks * BLOCK_SIZE * plan(None).kv_bytes_per_token)


@contextlib.contextmanager
def _engines(plan: MemoryPlan, least_blocks: int, roomy_blocks: int) -> Iterator[tuple[LLM, LLM, _Pressure | None]]:
    """One engine with the small pool and one with room for all. On a CPU the small pool is elastic, under pressure.

    The large engine is made last: the small one's lease covers the whole process, so it then has no memory to spare for
    KV.
    """
    from .engine.llm import LLM
    from .pressure import PrivateDevice

    common: dict[str, Any] = {"device": plan.device, "dtype": "float32", "block_size": BLOCK_SIZE}
    block_bytes = plan.kv_bytes_per_token * BLOCK_SIZE
    roomy_bytes = roomy_blocks * block_bytes + _COMPARED_BYTES
    pressure = None
    with contextlib.ExitStack() as stack:
        if plan.device == "cpu":
            others = _process_bytes() + 2 * plan.weights_bytes + plan.reserve_bytes + roomy_bytes + _SPARE_BYTES
            capacity = others + plan.kv_bytes + HEADROOM_BYTES
            private = stack.enter_context(PrivateDevice(capacity, HEADROOM_BYTES))
            elastic = {"min": least_blocks * block_bytes, "max": plan.kv_bytes}
            with private.here():
                tight = stack.enter_context(LLM("demo", **common, kv_memory=elastic, max_step_tokens=MAX_STEP_TOKENS))
            pressure = _Pressure(tight, private, plan.num_blocks)
        else:
            tight = stack.enter_context(
                LLM("demo", **common, kv_memory=plan.kv_bytes, max_step_tokens=MAX_STEP_TOKENS, share=False)
            )
        roomy = stack.enter_context(LLM("demo", **common, kv_memory=roomy_bytes, share=False))
        yield tight, roomy, pressure


def _process_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


class _Pressure:
    """Recalls half of a well-filled pool, as `vram-monitor recall` does, and waits until it may grow again."""

    def __init__(self, llm: LLM, device: PrivateDevice, most_blocks: int) -> None:
        self._llm, self._device, self._most_blocks = llm, device, most_blocks
        self._largest = self._smallest = self._grown_before = 0
        self._course = self._run()
        self.word = ""  # for the live line
        self.over = False

    def advance(self) -> None:
        """Advance as far as possible without waiting."""
        self._smallest = min(self._smallest, self._memory()["kv_bytes"])
        self.word = next(self._course, "")
        self.over = not self.word

    def rows(self) -> dict[str, Any]:
        """The rows for the closing table."""
        memory = self._memory()
        return {
            "recalls of the pool's memory": memory["recalls"],
            "pool, KiB before the recall": self._largest // 1024,
            "pool, KiB after it": self._smallest // 1024,
            "given back, KiB": memory["given_back_bytes"] // 1024,
            "grown again, KiB": (memory["grown_bytes"] - self._grown_before) // 1024,
        }

    def _run(self) -> Iterator[str]:
        from .allocator.errors import LeaseRefused
        from .allocator.lease_policy import Rules

        while not self._filled():
            yield "the tide rises"
        self._grown_before = self._memory()["grown_bytes"]
        for _ in range(MOST_RECALLS):  # the first recall is answered with memory that libraries cache
            over_bytes = self._memory()["kv_bytes"] - self._largest // 2
            if over_bytes <= 0:
                break
            try:
                self._device.client.recall(self._memory()["lease"]["name"], over_bytes)
            except LeaseRefused:  # the lease is at its minimum
                break
            while any(lease.state != "ok" for lease in self._device.leases()):
                yield "half is recalled"
        until = time.monotonic() + Rules.of(self._device.capacity_bytes).cooldown_s
        while time.monotonic() < until:
            yield "half is recalled"

    def _filled(self) -> bool:
        """Whether more blocks are in use than will be left, or no request remains that could use more."""
        stats = self._llm.stats()
        self._largest = self._smallest = max(self._largest, stats["memory"]["kv_bytes"])
        live = stats["blocks"]["live"]
        return bool(live > FILLED * self._most_blocks or not (stats["running"] or stats["waiting"]))

    def _memory(self) -> dict[str, Any]:
        memory: dict[str, Any] = self._llm.stats()["memory"]
        return memory


def _serve(
    llm: LLM, prompts: list[str], params: list[SamplingParams], live: bool, waves: list[range],
    pressure: _Pressure | None = None,
) -> _DemoRun:  # fmt: skip
    """Stream all prompts, with a live status line. The first wave lasts until the pressure is over."""
    view = _Line(live, pressure)
    outputs: dict[int, RequestOutput] = {}
    began, tokens = time.perf_counter(), 0

    def look() -> None:
        if pressure is not None:
            pressure.advance()
        view.update(llm, len(outputs), len(prompts), tokens / (time.perf_counter() - began))

    for wave in waves:
        for chunk in llm.stream([prompts[i] for i in wave], [params[i] for i in wave]):
            tokens += len(chunk.token_ids)
            if chunk.output is not None:
                outputs[wave[chunk.index]] = chunk.output
            look()
        waits = time.perf_counter()
        while pressure is not None and not pressure.over:  # the memory may come back only after all is done
            look()
            time.sleep(0.01)
        began += time.perf_counter() - waits
    seconds = time.perf_counter() - began
    view.end(llm, len(outputs), len(prompts), tokens / seconds)
    rows = {} if pressure is None else pressure.rows()
    return _DemoRun([outputs[i] for i in range(len(prompts))], seconds, llm.stats(), rows)


def _waves(each: list[int], usable: int) -> list[range]:
    """The prompts that run together under pressure: first those that fill the pool of `usable` blocks, then the rest."""
    first, blocks = 0, 0
    while first < len(each) and blocks < usable:
        blocks += each[first]
        first += 1
    return [wave for wave in (range(first), range(first, len(each))) if wave]


class _Line:
    """The live line: rewritten in place on a terminal, printed every second elsewhere."""

    def __init__(self, live: bool, pressure: _Pressure | None = None) -> None:
        self._live = live
        self._pressure = pressure
        self._most = 1  # the largest number of usable blocks so far
        self._tty = sys.stdout.isatty()
        self._next = 0.0

    def update(self, llm: LLM, done: int, total: int, speed: float) -> None:
        now = time.monotonic()
        if self._live and now >= self._next:
            self._next = now + (REFRESH_S if self._tty else 1.0)
            self._write(llm, done, total, speed)

    def end(self, llm: LLM, done: int, total: int, speed: float) -> None:
        if self._live:
            self._write(llm, done, total, speed)
            print("\n" if self._tty else "")

    def _write(self, llm: LLM, done: int, total: int, speed: float) -> None:
        stats = llm.stats()
        used, usable = stats["blocks"]["live"], stats["blocks"]["usable"]
        self._most = max(self._most, usable)
        filled, mapped = round(20 * used / self._most), round(20 * usable / self._most)
        pool = f"{'#' * filled}{'.' * (mapped - filled)}{' ' * (20 - mapped)}"
        text = (
            f"step {stats['steps']:>4}  done {done:>2}/{total}  running {stats['running']:>2}  waiting {stats['waiting']:>2}"
            f"  pool [{pool}] {used:>4}/{usable:<4} preempted {stats['preemptions']:>2}  {speed:>5,.0f} tokens/s"
        )
        if self._pressure is not None:
            text += f"  {self._pressure.word}"
        if self._tty:
            print("\r\x1b[2K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        else:
            print(text, flush=True)


def _table(pressed: _DemoRun, free: _DemoRun, usable: int, need: int) -> dict[str, Any]:
    stats = pressed.stats
    same = [a.token_ids == b.token_ids for a, b in zip(pressed.outputs, free.outputs, strict=True)]
    return {
        "device": stats["device"],
        "prompts": len(pressed.outputs),
        "tokens generated": pressed.num_tokens,
        "tokens per second": round(pressed.num_tokens / pressed.seconds, 1),
        "steps": stats["steps"],
        "preemptions": stats["preemptions"],
        "tokens computed again": stats["recomputed_tokens"],
        "peak blocks used": stats["peak_used_blocks"],
        "blocks of the pool": usable,
        "blocks that all need together": need,
        **pressed.pressure,
        "preemptions with room for all": free.stats["preemptions"],
        "tokens equal to an unpressured run": all(same),
    }


def _show(pressed: _DemoRun, table: dict[str, Any]) -> None:
    width = min(shutil.get_terminal_size().columns, 110)
    for output in pressed.outputs:
        prompt, text = " ".join((output.prompt or "").split()), " ".join((output.text or "").split())
        head = textwrap.shorten(prompt[-70:], 70, placeholder="") if len(prompt) > 70 else prompt
        note = f", preempted {output.num_preemptions} x" if output.num_preemptions else ""
        print(f"\n… {head}  [{len(output.token_ids)} tokens, {output.finish_reason}{note}]")
        print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
    print()
    for name, value in table.items():
        shown = (
            {True: "yes", False: "no"}[value]
            if isinstance(value, bool)
            else f"{value:,}"
            if value != str(value)
            else value
        )
        print(f"  {name:<36}{shown:>12}")

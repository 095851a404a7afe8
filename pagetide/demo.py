"""`pagetide demo`: many prompts through the bundled model, out of a KV pool too small for all of them, live.

The same requests then run again with room for all, and the tokens of both runs are compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.llm import LLM
    from .engine.outputs import RequestOutput
    from .scheduler.request import SamplingParams

LEAST_PROMPTS = 16
MAX_STEP_TOKENS = 160  # small, so that long prompts are computed in chunks beside the others' tokens
BLOCK_SIZE = 16
REFRESH_S = 0.1


@dataclass
class _Run:
    """One pass over all prompts."""

    outputs: list[RequestOutput]
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def run(
    *, device: str = "auto", num_prompts: int = 24, max_new_tokens: int = 128, share: float = 0.5, seed: int = 0,
    as_json: bool = False,
) -> int:  # fmt: skip
    """The whole demo. Returns 0 when every request was served and both runs gave the same tokens, else 1.

    Raises ValueError for a number that makes no demo.
    """
    if num_prompts < LEAST_PROMPTS:
        raise ValueError(
            f"the demo needs at least {LEAST_PROMPTS} prompts, to have something to juggle; got {num_prompts}"
        )
    if not 0 < share <= 1:
        raise ValueError(f"the pool's share of the need must be in (0, 1], got {share}")
    from .engine.llm import LLM
    from .scheduler.request import SamplingParams

    prompts = _prompts(num_prompts, seed)
    params = [SamplingParams(max_new_tokens=max_new_tokens, seed=seed + i) for i in range(num_prompts)]
    common: dict[str, Any] = {"device": device, "dtype": "float32", "block_size": BLOCK_SIZE}
    say = (lambda *_: None) if as_json else print
    say(f"{num_prompts} prompts, up to {max_new_tokens} new tokens each; loading the bundled model ...")
    with LLM("demo", **common) as roomy:
        need = sum(_blocks(prompt, max_new_tokens, roomy) for prompt in prompts)
        block_bytes = roomy.stats()["kv_bytes_per_token"] * BLOCK_SIZE
        largest = max(_blocks(prompt, max_new_tokens, roomy) for prompt in prompts)
        blocks = max(int(need * share), largest) + 1  # and the null block
        with LLM("demo", **common, kv_memory=blocks * block_bytes, max_step_tokens=MAX_STEP_TOKENS) as tight:
            usable = tight.stats()["blocks"]["usable"]
            say(f"together they need {need} blocks of {BLOCK_SIZE} tokens; the pool has {usable}\n")
            pressed = _serve(tight, prompts, params, live=not as_json)
        say("the same again, with room for all ...")
        free = _serve(roomy, prompts, params, live=not as_json)
    table = _table(pressed, free, need)
    if as_json:
        texts = [{"prompt": o.prompt, "text": o.text, "finish_reason": o.finish_reason} for o in pressed.outputs]
        print(json.dumps({**table, "outputs": texts}, ensure_ascii=False, indent=1))
    else:
        _show(pressed, table)
    served = all(output.finish_reason in ("stop", "length") for output in [*pressed.outputs, *free.outputs])
    return 0 if served and table["tokens equal to an unpressured run"] else 1


def _prompts(count: int, seed: int) -> list[str]:
    """Pieces of the held-out text, of very different lengths: the model has not seen them."""
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


def _blocks(prompt: str, max_new_tokens: int, llm: LLM) -> int:
    """Blocks that a prompt comes to hold, if it generates all it may."""
    longest: int = min(len(llm.tokenize(prompt)) + max_new_tokens, llm.stats()["max_model_len"])
    return -(-(longest - 1) // BLOCK_SIZE)


def _serve(llm: LLM, prompts: list[str], params: list[SamplingParams], live: bool) -> _Run:
    """Stream all prompts at once, with a line that tells how it goes."""
    view = _Line(live)
    outputs: dict[int, RequestOutput] = {}
    began, tokens = time.perf_counter(), 0
    for chunk in llm.stream(prompts, params):
        tokens += len(chunk.token_ids)
        if chunk.output is not None:
            outputs[chunk.index] = chunk.output
        view.update(llm, len(outputs), len(prompts), tokens / (time.perf_counter() - began))
    view.end(llm, len(outputs), len(prompts), tokens / (time.perf_counter() - began))
    return _Run([outputs[i] for i in range(len(prompts))], time.perf_counter() - began, llm.stats())


class _Line:
    """The live line: rewritten in place on a terminal, a line every second elsewhere."""

    def __init__(self, live: bool) -> None:
        self._live = live
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
        filled = round(20 * used / usable)
        text = (
            f"step {stats['steps']:>4}  done {done:>2}/{total}  running {stats['running']:>2}  waiting {stats['waiting']:>2}"
            f"  pool [{'#' * filled}{'.' * (20 - filled)}] {used:>4}/{usable}"
            f"  preempted {stats['preemptions']:>2}  {speed:>5,.0f} tokens/s"
        )
        if self._tty:
            print("\r\x1b[2K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        else:
            print(text, flush=True)


def _table(pressed: _Run, free: _Run, need: int) -> dict[str, Any]:
    stats, usable = pressed.stats, pressed.stats["blocks"]["usable"]
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
        "preemptions with room for all": free.stats["preemptions"],
        "tokens equal to an unpressured run": all(same),
    }


def _show(pressed: _Run, table: dict[str, Any]) -> None:
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

"""Prompts that an engine computes while it starts: each line of a file is one, in JSON.

"You are a helpful assistant. ..."                    a text, or a list of token ids
{"prompt": "...", "cache_salt": "ann", "pin": true}   or "prompt_token_ids"; `pin`: keep it in memory, see `LLM.pin_prefix`
{"messages": [...], "template": {"tools": [...]}}     a chat, with options of the template
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.on_error import OnError
from ...scheduler.request import RequestRejected
from .inputs import Prompt
from .intake import RequestIntake

if TYPE_CHECKING:
    from .engine_thread import EngineThread
    from .manager import RequestManager

log = logging.getLogger(__name__)

MEMORY_WAIT_S = 10.0  # that a prompt waits for the pool to grow

_OF_CHAT = ("messages", "template")


def warm_up(path: str | None, thread: EngineThread, manager: RequestManager) -> None:
    """Compute the prompts of the file `path`, or read them from the disk tier, and pin those that say so; None: no file.

    A prompt that fails is a warning. Waits for `thread`, which an interrupt ends.
    """
    with OnError(thread.end):
        compute_prompts(path, manager, lambda compute: bool(thread.ask(thread.run_with_engine, lambda _: compute())))


def compute_prompts(path: str | None, manager: RequestManager, run: Callable[[Callable[[], bool]], bool] | None = None) -> None:
    """As `warm_up`; `run` calls what computes a prompt, in the engine's thread, which is this one if there is no `run`."""
    if path is None:
        return
    began, num_computed, num_pinned = time.perf_counter(), 0, 0
    lines = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    for number, line in lines:
        try:
            compute = partial(_compute, line, manager)
            is_pinned = compute() if run is None else run(compute)
        except (RequestRejected, ValueError, RecursionError) as error:
            log.warning("warm_prompts: line %d of %s is not computed: %s", number, path, error)
        else:
            num_computed += 1
            num_pinned += is_pinned
    took = time.perf_counter() - began
    log.info("warm_prompts: %d of %d prompts, %d of them pinned, in %.1f s", num_computed, len(lines), num_pinned, took)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        log.warning("warm_prompts: %s cannot be read: %s", path, error)
        return []


def _compute(line: str, manager: RequestManager) -> bool:
    """Compute the prompt of `line`, and pin it if it says so, which is returned. Raises RequestRejected, and as json."""
    entry = json.loads(line)
    pins = entry.pop("pin", False) if isinstance(entry, dict) else False
    if not isinstance(pins, bool):
        raise RequestRejected(f"`pin` is true or false, got {pins!r:.80}")
    intake = manager.intake
    (one,) = intake.encode_pin(_prompt_of(entry, intake))
    if not pins:
        one = one._replace(pin="")
    with OnError(lambda: intake.unpin(one)):
        one.prepared.compile()
        (group,) = manager.submit([one], 0, None)
        starves_since = math.inf
        while not group.is_finished:
            manager.step()
            now = time.monotonic()
            starves_since = min(starves_since, now) if manager.open().core.scheduler.starving else math.inf
            if now - starves_since >= MEMORY_WAIT_S:
                manager.abort([group])
        if group.output.finish_reason == "aborted":
            raise RequestRejected(f"its blocks have found no memory for {MEMORY_WAIT_S:g} s")
        if group.output.error is not None:
            raise RequestRejected(group.output.error)
        if pins:
            intake.pinned(one, group.output)
    return pins


def _prompt_of(entry: Any, intake: RequestIntake) -> Prompt:
    """The prompt of a line. Raises RequestRejected."""
    if not isinstance(entry, dict) or "messages" not in entry:
        prompt: Prompt = entry
        return prompt
    if not isinstance(template := entry.get("template") or {}, dict):
        raise RequestRejected(f"`template` is an object of the chat template's options, got {template!r:.80}")
    (ids,) = intake.render([entry["messages"]], template)
    return {"prompt_token_ids": ids, **{key: value for key, value in entry.items() if key not in _OF_CHAT}}

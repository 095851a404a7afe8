"""Follows a request from `LLM.generate` to its output: which of pagetide's types hold the prompt or what comes of it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pagetide import LLM, SamplingParams

# What computes a step has arrays of all requests together.
OF_STEPS = ("pagetide.engine.execution.", "pagetide.engine.attention.")


def types_of_a_prompt(llm: LLM, prompt: str) -> list[type]:
    """Of the objects that are made for a request of one token, the types that hold the prompt, in the order of making.

    They have its text, its token ids, its request's id, the output's text or token ids, or an object that does.
    """
    made: list[Any] = []

    def note(frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in ("__init__", "__post_init__"):
            value = next(iter(frame.f_locals.values()))
        elif event != "return" or not code.co_filename.startswith("<"):  # the constructor of a named tuple
            return
        if type(value).__module__.startswith("pagetide."):
            made.append(value)

    thread = llm._engine_thread
    thread.ask(thread.run_with_engine, lambda _: sys.setprofile(note))
    sys.setprofile(note)
    (output,) = llm.generate(prompt, SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
    sys.setprofile(None)
    thread.ask(thread.run_with_engine, lambda _: sys.setprofile(None))

    (completion,) = output.completions
    texts, ids = {output.request_id, prompt, completion.text}, (output.prompt_token_ids, completion.token_ids)
    holders: set[int] = set()

    def holds(value: Any) -> bool:
        if id(value) in holders or (isinstance(value, str) and value in texts):
            return True
        if isinstance(value, np.ndarray):
            return value.ndim == 1 and value.tolist() in ids
        if isinstance(value, list) and value in ids:
            return True
        return type(value) in (tuple, list, dict, deque) and any(map(holds, _parts(value)))

    while new := {id(one) for one in made if id(one) not in holders and any(map(holds, _parts(one)))}:
        holders |= new
    types = dict.fromkeys(type(one) for one in made if id(one) in holders)
    return [one for one in types if not one.__module__.startswith(OF_STEPS)]


def _parts(value: Any) -> Iterator[Any] | Sequence[Any]:
    """What an object or a container holds."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, tuple | list | deque):
        return value
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(value, name, None) for name in [*slots, *getattr(value, "__dict__", ())]]

"""Calls of a `Fleet` and of an engine that have to give the same results: parameters, and checks of both tiers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from nearly import nearly

from pagetide import AsyncLLM, Fleet, RequestOutput, SamplingParams, StreamChunk
from pagetide.engine.loading.models import BUILT_IN_FILE
from tests.fleet_rig import FleetRig
from tests.fleet_stand_ins import until

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if polite %}Sir, {% endif %}"
PROMPTS: list[Any] = ["Call me Ishmael. Some years ago", [5, 6, 7, 8], {"prompt": "Natásha went", "label": "the third"}]
LONG = SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True)

PARAMETERS = {
    "greedy": SamplingParams(max_new_tokens=12, temperature=0),
    "the model's defaults": SamplingParams(max_new_tokens=12, seed=1),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.9, top_k=40, top_p=0.9, seed=7, repetition_penalty=1.1),
    "n": SamplingParams(max_new_tokens=16, temperature=1.0, n=3, seed=2),
    "best_of": SamplingParams(max_new_tokens=12, temperature=1.0, n=2, best_of=5, seed=3),
    "best_of with logprobs": SamplingParams(max_new_tokens=8, temperature=1.0, best_of=3, seed=3, logprobs=1),
    "beams": SamplingParams(max_new_tokens=8, num_beams=4, n=3, temperature=0),
    "logprobs": SamplingParams(max_new_tokens=6, temperature=0.8, seed=4, n=2, logprobs=2, prompt_logprobs=1),
    "stop strings": SamplingParams(max_new_tokens=60, temperature=0, stop=["the", "\n"]),
    "stop ids, bias": SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=[260], logit_bias={263: -5.0}),
    "bad words": SamplingParams(max_new_tokens=12, temperature=0, bad_words=["whale", "I"], min_new_tokens=5),
}


@contextmanager
def talking_engines(folder: Path, count: int) -> Iterator[list[AsyncLLM]]:
    """Engines with the demo model and a chat template, named by a models file in `folder`."""
    models = folder / "models.yaml"
    path = str(BUILT_IN_FILE.parent.parent / "engine" / "demo_model")
    models.write_text(json.dumps({"talk": {"path": path, "tokenizer": {"chat_template": TEMPLATE}}}), "utf-8")
    options: dict[str, Any] = {"device": "cpu", "kv_memory": "32MiB", "max_seqs": 8, "kv_events": True, "share": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGETIDE_CONFIG", str(models))
        each = [AsyncLLM("talk", **options) for _ in range(count)]
        yield each
        for llm in each:
            asyncio.run(llm.stop())


def plain(output: RequestOutput) -> dict[str, Any]:
    """What two engines have in common of an output."""
    data = output.to_dict()
    data["request_id"] = data["request_id"] != ""
    del data["num_cached_tokens"]
    for completion in data["completions"]:
        del completion["timings"], completion["num_preemptions"]
    return data


def joined(chunks: list[StreamChunk]) -> dict[tuple[int, int], tuple[str, list[int], list[Any]]]:
    """Text, tokens and log-probabilities of each continuation."""
    found: dict[tuple[int, int], tuple[str, list[int], list[Any]]] = {}
    for chunk in chunks:
        text, ids, scores = found.get((chunk.index, chunk.number), ("", [], []))
        found[chunk.index, chunk.number] = (
            text + chunk.text,
            ids + chunk.token_ids,
            [*scores, *map(astuple, chunk.logprobs or ())],
        )
    return found


def check_times(output: RequestOutput) -> None:
    for completion in output.completions:
        times = completion.timings
        assert times.first_token_s is not None and times.queued_s is not None
        assert 0 <= times.queued_s <= times.first_token_s <= times.total_s


async def check_outputs(fleet: Fleet, oracle: AsyncLLM, params: SamplingParams) -> None:
    """A fleet's outputs are those of an engine."""
    expected = await oracle.generate(PROMPTS, params)
    outputs = await fleet.generate(PROMPTS, params)
    assert list(map(plain, outputs)) == nearly(list(map(plain, expected)))
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    for output in outputs:
        check_times(output)


async def check_chunks(fleet: Fleet, oracle: AsyncLLM, params: SamplingParams, interval: int) -> None:
    """The chunks of a stream add up to an engine's outputs."""
    expected = await oracle.generate(PROMPTS, params)
    stream = fleet.stream(PROMPTS, params, stream_interval=interval)
    chunks = [chunk async for chunk in stream]
    assert {chunk.index: plain(chunk.output) for chunk in chunks if chunk.output is not None} == nearly(
        dict(enumerate(map(plain, expected)))
    )
    wanted = {
        (index, number): (completion.text, completion.token_ids, list(map(astuple, completion.logprobs or ())))
        for index, output in enumerate(expected)
        for number, completion in enumerate(output.completions)
    }
    assert joined(chunks) == nearly(wanted)
    for chunk in chunks:
        assert chunk.completion is not None or len(chunk.token_ids) >= interval
        assert (chunk.output is None) or chunk.completion is not None
    assert stream.num_generated == sum(len(c.token_ids) for output in expected for c in output.completions)
    assert stream.requests == ()
    assert [chunk async for chunk in stream] == []


async def check_a_death(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM, name: str, num_tokens: int) -> None:
    """Requests go on with an engine's outputs when one of two workers dies amid them."""
    params = dataclasses.replace(PARAMETERS[name], max_new_tokens=num_tokens, ignore_eos=True, stop=None)
    prompts = [*PROMPTS, "To be", "The tide"]
    expected = await oracle.generate(prompts, params)
    rig.engines["first"].most_chunks = 3
    task = asyncio.create_task(fleet.generate(prompts, params))
    counters, first = rig.server.queue.counters, rig.workers["first"]
    await until(lambda: bool(first._tasks) and (name == "beams" or counters.recorded_tokens > 0))
    await rig.kill("first")
    assert counters.requeued > 0
    assert list(map(plain, await task)) == nearly(list(map(plain, expected)))

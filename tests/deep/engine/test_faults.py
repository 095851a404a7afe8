"""One request never ends another: a fault at any call of a step ends the requests it concerns, and no other.

A mixed load (greedy and drawn, penalties, a processor, log-probabilities, forks, beams, a regular expression, stop strings; a
pool so small that requests are preempted and swapped) is served while one function raises: once, or at every call. Without
the fault the outputs are the oracle: in float32 the requests that a fault does not concern have the same tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from faults import CAUSE, EVERYBODY, POINTS, Fault, Point, planted
from transformers.generation.streamers import BaseStreamer

from pagetide import LLM, RequestOutput, SamplingParams
from pagetide.engine.execution import runner as runner_module
from pagetide.engine.streamers import generate_into
from pagetide.engine.text.detokenizer import Detokenizer
from pagetide.scheduler.cost import SwapCost

ENGINE: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "share": False, "kv_memory": {"min": "512KiB", "max": "1MiB"},
    "block_size": 4, "host_kv_memory": "4MiB", "max_seqs": 12, "max_step_tokens": 64, "max_model_len": 96, "idle_s": 0.02,
}  # fmt: skip
NEW = 16


def shift(input_ids: Any, scores: Any) -> Any:
    """A logits processor."""
    return scores.roll(1, -1)


@dataclass(frozen=True)
class Ask:
    """One request of the load, and what of the engine it needs that not all need."""

    prompt: str
    sampling: dict[str, Any]
    needs: frozenset[str]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)


def ask(prompt: str, *needs: str, **sampling: Any) -> Ask:
    settings = {"max_new_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "seed": 3}
    return Ask(prompt, settings | sampling, frozenset({EVERYBODY, *needs}))


LOAD = [
    ask("The tide comes in and the tide goes out, and what it leaves behind is read again", "draws"),
    ask("The tide comes in and the tide goes out, and nobody", "draws", temperature=0.9),
    ask("A page", "draws", repetition_penalty=1.3, frequency_penalty=0.4, temperature=0.7),
    ask("Call me", "draws", "processor", logits_processors=[shift]),
    ask("It was the best", "draws", "scores", logprobs=2, prompt_logprobs=1),
    ask("She said", "draws", n=3, temperature=1.1),
    ask("He went", "beams", num_beams=3, n=2),
    ask("Answer:", "draws", "constraint", regex="[a-d]{3,8}x", ignore_eos=False),
    ask("The whale", "draws", stop=["zzzz"], temperature=0.5),
    ask("Down by the sea there was a house with many rooms, and in each of them", "draws"),
]


def served(llm: LLM, load: list[Ask]) -> list[RequestOutput]:
    return llm.generate([one.prompt for one in load], [one.params for one in load], progress=False)


def served_until_raised(llm: LLM, fault: Fault, name: str) -> list[RequestOutput]:
    """Serve the load, for faults of the pool's resizing again until one came: it follows the load some time later."""
    outputs, deadline = served(llm, LOAD), time.monotonic() + 60
    while name in ("map", "unmap") and not fault.num_raised and time.monotonic() < deadline:
        time.sleep(2 * ENGINE["idle_s"])
        outputs = served(llm, LOAD)
    return outputs


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Swaps are always worth it: on a busy machine a measured copy may look too expensive.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapCost, "observe", lambda cost, plan, result: None)
        patch.setattr(SwapCost, "swap_s", lambda cost, num_blocks: 0.0)
        with LLM("demo", **ENGINE) as engine:
            yield engine


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, RequestOutput]:
    outputs = served(llm, LOAD)
    stats = llm.stats()
    assert stats["preemptions"] and stats["host_tier"]["swapped_in_bytes"], "the load is too light"
    return {one.prompt: output for one, output in zip(LOAD, outputs, strict=True)}


def check(outputs: list[RequestOutput], load: list[Ask], expected: dict[str, RequestOutput], concerns: str | None) -> int:
    """Only requests that need what the fault `concerns` may end with it. Returns how many did."""
    num_ended = 0
    for one, output in zip(load, outputs, strict=True):
        right = expected[one.prompt]
        for mine, own in zip(output.completions, right.completions, strict=True):
            if mine.finish_reason == "error":
                assert concerns in one.needs, f"{one.prompt!r} ended: {mine.error}"
                assert CAUSE in (mine.error or ""), mine.error
                num_ended += 1
            else:
                assert (mine.token_ids, mine.text) == (own.token_ids, own.text), one.prompt
                assert [entry.logprob for entry in mine.logprobs or ()] == pytest.approx(
                    [entry.logprob for entry in own.logprobs or ()], abs=1e-4
                )
    return num_ended


def check_clean(llm: LLM, expected: dict[str, RequestOutput]) -> None:
    """All blocks are back, and the engine goes on."""
    with llm.locked_engine() as engine:
        scheduler = engine.core.scheduler
        scheduler.check_invariants()
        counts = scheduler.cache.pool.counts()
        assert (counts.live, counts.in_flight, scheduler.num_running, scheduler.num_waiting) == (0, 0, 0, 0)
        assert not llm._manager.delivery.groups
    assert check(served(llm, LOAD[1:3]), LOAD[1:3], expected, None) == 0


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.stress) for n in range(9, 60, 8))])
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_a_fault_that_comes_once(llm: LLM, expected, point: Point, first: int, caplog) -> None:
    llm.reset_prefix_cache()
    with planted(point.owner(llm._manager.open()), point.name, first, always=False) as fault:
        outputs = served_until_raised(llm, fault, point.name) if first == 1 else served(llm, LOAD)
    assert fault.num_raised or point.name == "release_buffers" or first > 1, "the load does not come by"
    # A fault concerns one request: one output, or the two of a beam search.
    assert check(outputs, LOAD, expected, point.once) <= 2
    check_clean(llm, expected)


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_a_fault_that_stays(llm: LLM, expected, point: Point, caplog) -> None:
    llm.reset_prefix_cache()
    with planted(point.owner(llm._manager.open()), point.name, 1, always=True) as fault:
        outputs = served_until_raised(llm, fault, point.name)
    assert fault.num_raised or point.name == "release_buffers"
    assert bool(check(outputs, LOAD, expected, point.always)) == (point.always is not None)
    check_clean(llm, expected)


@pytest.mark.parametrize("free", ["release_buffers", "trim"])
def test_a_fault_while_a_step_is_made_ready_for_its_repetition(llm: LLM, expected, free: str, caplog) -> None:
    llm.reset_prefix_cache()
    owner = type(llm._manager.open().core.runner.kernel) if free == "release_buffers" else runner_module
    with planted(llm._manager.open().core.runner, "model", 3, always=False), planted(owner, free, 1, always=True) as fault:
        assert check(served(llm, LOAD), LOAD, expected, None) == 0
    assert fault.num_raised
    check_clean(llm, expected)


def load_with(processor: Any) -> list[Ask]:
    """The load, with this logits processor."""
    own = {"logits_processors": [processor]}
    return [replace(one, sampling=one.sampling | own) if "processor" in one.needs else one for one in LOAD]


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("kind", [Panic, asyncio.CancelledError, GeneratorExit])
def test_what_is_no_exception_ends_its_own_request_too(llm: LLM, expected, kind: type[BaseException], caplog) -> None:
    load = load_with(Fault(shift, 3, False, kind))
    assert check(served(llm, load), load, expected, "processor") == 1
    with planted(Detokenizer, "push", 5, always=False) as text:
        text._kind = kind
        assert check(served(llm, LOAD), LOAD, expected, EVERYBODY) <= 1 and text.num_raised
    with planted(llm._manager.open().core.runner, "model", 3, always=False) as model:
        model._kind = kind
        assert check(served(llm, LOAD), LOAD, expected, None) == 0 and model.num_raised
    check_clean(llm, expected)


@pytest.mark.parametrize("most", [16, 3, 1])
def test_a_step_that_is_too_large_for_the_memory_is_computed_in_parts(llm: LLM, expected, most: int, caplog) -> None:
    """As beside another job that leaves the activations of so many tokens."""
    llm.reset_prefix_cache()
    with llm.locked_engine() as engine:
        model = engine.core.runner.model

    def too_large(**step: Any) -> Any:
        if step["input_ids"].shape[1] > most:
            raise torch.OutOfMemoryError(CAUSE)
        return model(**step)

    too_large.forward = model.forward  # type: ignore[attr-defined]
    with planted(llm._manager.open().core.runner, "model", 0, always=False) as fault:
        fault._inner = too_large
        assert check(served(llm, LOAD), LOAD, expected, None) == 0
    check_clean(llm, expected)


def test_a_streamer_that_raises_ends_its_own_request(llm: LLM, expected, caplog) -> None:
    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.num_put = self.num_ended = 0

        def put(self, value: Any) -> None:
            self.num_put += 1
            if self.num_put == 4:
                raise RuntimeError(CAUSE)

        def end(self) -> None:
            self.num_ended += 1

    streamer, others = Streamer(), llm.stream(LOAD[1].prompt, LOAD[1].params)
    ids = next(others).token_ids
    with pytest.raises(RuntimeError, match=CAUSE):
        generate_into(streamer, llm, llm.tokenize(LOAD[0].prompt), LOAD[0].params)
    ids += [token for chunk in others for token in chunk.token_ids]
    assert (streamer.num_put, streamer.num_ended) == (4, 1)
    assert ids == expected[LOAD[1].prompt].token_ids
    check_clean(llm, expected)

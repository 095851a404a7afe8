"""Steps that are begun before the last one's tokens are on the host: nobody can tell by the tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from dense_kernel import DenseKernel
from engines import TinyEngine, prompts
from families import VOCAB, tiny
from state_families import tiny_with_states
from tape import recorder

from pagetide import LLM, AsyncLLM, SamplingParams
from pagetide.engine.execution.batch import ON_ITS_WAY
from pagetide.engine.execution.graphs import CaptureCheck
from pagetide.engine.execution.transfers import Download, Upload
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.plan import Plan
from pagetide.scheduler.request import Sampling

INPUTS = prompts([3, 17, 9, 30, 5, 12, 1], VOCAB)
STOPS = (5, 9, 11, 40)
PLAIN = [
    Sampling(20), Sampling(14, temperature=1.0, seed=1), Sampling(30, temperature=0.8, top_k=7, top_p=0.9, seed=2),
    Sampling(25, temperature=1.2, min_p=0.02, seed=3, stop_token_ids=STOPS), Sampling(1), Sampling(40, stop_token_ids=STOPS),
    Sampling(18, temperature=1.0, seed=4, min_new_tokens=6, stop_token_ids=STOPS),
]  # fmt: skip
MIXED = [
    *PLAIN[:4],
    Sampling(9, repetition_penalty=1.3),
    Sampling(12, temperature=1.0, seed=5, logprobs=2),
    Sampling(15, frequency_penalty=0.5),
]
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"usable": 100},
    "preempting": {"usable": 15, "max_step_tokens": 16},
    "cached": {"usable": 20, "caching": True, "max_chunk_tokens": 7},
    "swapping": {"usable": 14, "caching": True, "host_slots": 30},
}


class Watched(TinyEngine):
    """Counts the plans that were made ahead, and sequences that ended while one of them was out."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, block_size=4, max_model_len=80, **options)
        self.ahead: list[Plan] = []
        schedule_ahead = self.core.scheduler.schedule_ahead

        def watched() -> Plan | None:
            plan = schedule_ahead()
            if plan is not None:
                self.ahead.append(plan)
            return plan

        self.core.scheduler.schedule_ahead = watched  # type: ignore[method-assign]


def alone(count: int, sampling: Sampling | list[Sampling], model: Any = None) -> list[list[int]]:
    """The tokens of the first prompts from an engine that begins no step ahead, in a pool with room for all."""
    engine = Watched(model or tiny("llama"), usable=100)
    tokens = engine.generate(INPUTS[:count], sampling)
    assert not engine.ahead
    return tokens


def begun(count: int, new: int, **options: Any) -> Watched:
    """An engine that begins steps ahead, with requests r0, r1 and so on."""
    engine = Watched(tiny("llama"), usable=100, overlaps=True, **options)
    engine.add_all(INPUTS[:count], Sampling(new))
    return engine


@pytest.mark.parametrize(
    ("family", "pool"),
    [("llama", "roomy"), ("llama", "preempting"), ("llama", "swapping"), ("gemma2", "cached"), ("gemma2", "swapping")],
)
def test_the_same_tokens(family: str, pool: str) -> None:
    model = tiny(family)
    for each in (PLAIN, MIXED):
        right = alone(len(INPUTS), each, model)
        engine = Watched(model, overlaps=True, **POOLS[pool])
        assert engine.generate(INPUTS, each) == right
        assert len(engine.ahead) > 5, "few steps were planned ahead"
        assert engine.preemptions or pool == "roomy"
        assert not engine.core.is_ahead, "something is under way for nobody"


@pytest.mark.parametrize("pool", ["roomy", "preempting", "swapping"])
def test_the_same_tokens_of_states(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ahead is behind the last one's states. Where tokens cannot be read, both are computed again from the start."""
    monkeypatch.setitem(POOLS, "preempting", {"usable": 30, "max_step_tokens": 16})
    monkeypatch.setitem(POOLS, "swapping", {"usable": 30, "caching": True, "host_slots": 100})
    model, each = tiny_with_states("qwen3_5_text"), PLAIN[:5]
    right = alone(5, each, tiny_with_states("qwen3_5_text"))
    engine, wait, calls = Watched(model, overlaps=True, **POOLS[pool]), Download.wait, itertools.count(1)

    def failing(download: Download) -> Any:
        if pool == "roomy" and next(calls) in (6, 7, 15):
            raise RuntimeError("planted")
        return wait(download)

    monkeypatch.setattr(Download, "wait", failing)
    for module in (model.model.layers[2], model.model.layers[1].linear_attn.norm):
        module.register_forward_hook(failing_at({9, 14, 19}))
    assert engine.generate(INPUTS[:5], each) == right
    assert len(engine.ahead) > 5 and not engine.core.is_ahead
    assert (engine.core.scheduler.stats.recomputed_tokens if pool == "roomy" else engine.preemptions) > 0


def failing_at(turns: set[int]) -> Callable[..., None]:
    """A hook that raises at some of its calls."""
    calls = itertools.count(1)

    def failing(*_: Any) -> None:
        if next(calls) in turns:
            raise RuntimeError("planted")

    return failing


def test_recorded_steps_go_ahead_too() -> None:
    model = tiny("llama")
    right = alone(len(INPUTS), PLAIN)
    engine = Watched(model, usable=15, overlaps=True)
    engine.core.runner.kernel = DenseKernel()
    tapes: list[Any] = []
    engine.core.runner.record([1, 2, 4, 8], recorder(tapes))
    assert engine.generate(INPUTS, PLAIN) == right
    assert len(engine.ahead) > 10 and sum(tape.num_replays for tape in tapes) > 20


def test_a_step_is_one_upload_and_one_download_and_asks_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain rows; on a CPU, that acts as if it could not be asked."""
    model = tiny("llama")
    right = alone(len(INPUTS), PLAIN)
    engine = Watched(model, usable=100, overlaps=True)
    runner = engine.core.runner
    runner.kernel = DenseKernel()
    runner._row_states.sampler = Sampler(16, VOCAB, at_hand=False)
    begin, counts, ups, downs = runner.begin, [], [], []

    def watched(plan: Plan) -> Any:
        ups.clear(), downs.clear()
        decodes = len(plan.rows) and (plan.lengths == 1).all() and not plan.admitted
        if not decodes or plan.given is not None:
            return begin(plan)
        with CaptureCheck():
            step = begin(plan)
        if not (runner._row_states.tokens[plan.rows] == ON_ITS_WAY).any():
            return step  # of a row below its minimum length
        counts.append((len(ups), len(downs)))
        return step

    put, made = Upload.put, Download.__init__
    monkeypatch.setattr(Upload, "put", lambda self, arrays: ups.append(1) or put(self, arrays))
    monkeypatch.setattr(Download, "__init__", lambda self, tensor: downs.append(1) or made(self, tensor))
    monkeypatch.setattr(runner, "begin", watched)
    plain = [Sampling(s.max_new_tokens, 0, s.temperature, s.top_k, s.top_p, s.min_p, seed=s.seed) for s in PLAIN]
    got = engine.generate(INPUTS, plain)
    assert len(counts) > 20 and set(counts) == {(1, 1)}
    for ours, theirs, one in zip(got, right, PLAIN, strict=True):
        if not one.stop_token_ids:
            assert ours == theirs


def test_an_abort_between_two_steps_gives_no_token_more() -> None:
    engine = begun(3, 20)
    got: list[str] = []
    for _ in range(5):
        got += engine.core.step().request_ids
    assert engine.core.is_ahead and engine.core.abort("r1")
    before = got.count("r1")
    ends = engine.run()
    assert ends["r1"].reason == "aborted" and len(ends["r1"].token_ids) == before
    right = alone(3, Sampling(20))
    assert [ends["r0"].token_ids.tolist(), ends["r2"].token_ids.tolist()] == [right[0], right[2]]


@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit()], ids=["fault", "exit"])
@pytest.mark.parametrize("when", ["as it is begun", "as it is waited for"])
def test_what_breaks_a_step_ends_its_requests_and_no_others(when: str, error: BaseException) -> None:
    """Also of the step that was begun behind the one before it, whose tokens are still given."""
    engine = begun(6, 12, max_seqs=3)
    runner = engine.core.runner
    begin, numbers = runner.begin, iter(range(10**6))

    def broken(plan: Plan) -> Any:
        breaks = next(numbers) == 4
        if breaks and when == "as it is begun":
            raise error
        step = begin(plan)
        return Breaks(step, error) if breaks else step

    runner.begin = broken  # type: ignore[method-assign]
    ends: dict[str, Any] = {}
    while engine.core.has_work:
        ends |= {end.request_id: end for end in engine.core.step().finished}
        engine.core.scheduler.check_invariants()
    right = alone(6, Sampling(12))
    for i in range(6):
        tokens = ends[f"r{i}"].token_ids.tolist()
        assert ends[f"r{i}"].reason == ("error" if i < 3 else "length")
        assert tokens == right[i][: len(tokens)] and (len(tokens) == 4 if i < 3 else tokens == right[i])
    assert engine.core.scheduler.cache.pool.counts().live == 0


class Breaks:
    """A step whose result is lost once it is there."""

    def __init__(self, step: Any, error: BaseException) -> None:
        self._step = step
        self._error = error

    def wait(self) -> Any:
        self._step.wait()
        raise self._error


def test_bookkeeping_that_breaks_with_a_step_under_way_ends_all_once() -> None:
    engine = begun(3, 30)
    for _ in range(4):
        engine.core.step()
    assert engine.core.is_ahead
    apply = engine.core.scheduler.apply
    engine.core.scheduler.apply = lambda plan, result: (apply(plan, result), 1 / 0)[0]  # type: ignore[method-assign]
    ends = engine.core.step().finished
    assert sorted(end.request_id for end in ends) == ["r0", "r1", "r2"] and not engine.core.is_ahead
    assert {end.reason for end in ends} == {"error"}
    right = alone(2, Sampling(9))
    assert engine.generate(INPUTS[:2], Sampling(9)) == right


def test_a_step_is_repeated_in_parts_behind_one_that_is_under_way() -> None:
    engine = begun(3, 20)
    compute = engine.core.runner._compute

    def broken(work: Any, there: Any) -> Any:
        ids = engine.core.scheduler.rows.request_ids[work.part.rows]
        if "r1" in ids and work.at.max(initial=0) > 25:
            raise RuntimeError("no")
        return compute(work, there)

    engine.core.runner._compute = broken  # type: ignore[method-assign]
    ends = engine.run()
    right = alone(3, Sampling(20))
    assert ends["r1"].reason == "error" and engine.ahead
    assert [ends["r0"].token_ids.tolist(), ends["r2"].token_ids.tolist()] == [right[0], right[2]]


@pytest.mark.parametrize("loses_a_part", [False, True])
def test_what_fails_with_its_tokens_drawn_is_tried_again_with_the_same_inputs(
    loses_a_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pinned memory is to be had for a moment, with a step's inputs on their way; a part of its repetition is lost too."""
    right = alone(3, Sampling(12))
    made, wait = Download.__init__, Download.wait
    for failing in range(1, 7):
        numbers, lost = iter(range(10**6)), []

        def broken(self: Download, tensor: Any, numbers: Any = numbers, lost: Any = lost, failing: Any = failing) -> None:
            number = next(numbers)
            if number == failing:
                raise RuntimeError("no memory")
            made(self, tensor)
            if loses_a_part and number == failing + 2:  # the second half, of two rows
                lost.append(self)

        def waits(self: Download, lost: Any = lost) -> Any:
            if self in lost:
                raise RuntimeError("lost")
            return wait(self)

        monkeypatch.setattr(Download, "__init__", broken)
        monkeypatch.setattr(Download, "wait", waits)
        engine = Watched(tiny("llama"), usable=100, overlaps=True)
        assert engine.generate(INPUTS[:3], Sampling(12)) == right and engine.ahead and bool(lost) == loses_a_part


@pytest.fixture(scope="module")
def both() -> Any:
    with (
        LLM("demo", kv_memory="4MiB", device="cpu", overlap=True) as ahead,
        LLM("demo", kv_memory="4MiB", device="cpu") as plain,
    ):
        yield ahead, plain


def test_generate_stream_and_stop_strings(both: tuple[LLM, LLM]) -> None:
    prompts = ["It was", "The sea", "Once upon a time"]
    each = [
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=1, stop=[" the", "."]),
        SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9, top_k=40, seed=2, n=3),
        SamplingParams(max_new_tokens=40, num_beams=3, temperature=0),
    ]
    ahead, plain = (
        [(c.text, c.token_ids, c.finish_reason) for o in llm.generate(prompts, each) for c in o.completions] for llm in both
    )
    assert ahead == plain
    streamed = ["".join(chunk.text for chunk in llm.stream(prompts[0], each[0])) for llm in both]
    assert streamed[0] == streamed[1] == ahead[0][0]
    assert both[0].stats()["overlap"] is True and both[1].stats()["overlap"] is False
    assert both[0].stats()["cuda_graphs"] == []
    for llm in both:
        stats = llm.stats()
        assert (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (0, 0, 0)


def test_many_tasks_a_pause_and_a_task_that_leaves(both: tuple[LLM, LLM]) -> None:
    """In a pause nothing is under way; whoever leaves changes no token of the others."""
    each = [SamplingParams(max_new_tokens=80 + i, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    right = [both[1].generate("The sea", params)[0].token_ids for params in each]

    async def tokens(llm: AsyncLLM, params: SamplingParams, most: int | None = None) -> list[int]:
        told: list[int] = []
        async for chunk in llm.stream("The sea", params):
            told += chunk.token_ids
            if most is not None and len(told) >= most:
                break
        return told

    async def main() -> list[list[int]]:
        async with AsyncLLM("demo", kv_memory="4MiB", device="cpu", overlap=True) as llm:
            core = llm._manager.open().core
            asked = [tokens(llm, params, 3 if i == 2 else None) for i, params in enumerate(each)]
            tasks = [asyncio.create_task(one) for one in asked]
            for _ in range(3):
                await tokens(llm, each[0], 2)
                await llm.pause()
                assert not core.is_ahead and core.scheduler.num_running
                llm.resume()
            return await asyncio.gather(*tasks)

    got = asyncio.run(main())
    assert got[2][:3] == right[2][:3]
    assert [*got[:2], *got[3:]] == [*right[:2], *right[3:]]

"""Requests that go on in another engine: the tokens, the text and all that is told of them are those of an undisturbed one."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engines import step, swap_whatever_it_costs
from families import tiny

from pagetide import LLM, AsyncLLM, EngineClosed, RequestOutput, SamplingParams
from pagetide.engine.llm import Stream
from pagetide.scheduler.request import PromptTooLong, RequestRejected, SequenceStatus

PROMPT = "Once upon a time there was a sea"
open_demo = functools.partial(LLM, "demo", device="cpu", dtype="float32", share=False)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    """The same model over blocks, pools and chunks of other sizes; the second begins steps ahead."""
    with (
        open_demo(kv_memory="8MiB", block_size=4) as first,
        open_demo(kv_memory="4MiB", block_size=16, max_chunk_tokens=3, prefix_caching=False, overlap=True) as second,
        open_demo(kv_memory="6MiB", block_size=7, max_seqs=2, max_step_tokens=9) as third,
    ):
        yield [first, second, third]


def live_blocks(llm: LLM) -> int:
    return int(llm.stats()["blocks"]["live"])


class Journey:
    """The chunks of some requests that are handed over from engine to engine, by answer and continuation."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.names = [(handle.index, handle.number) for handle in stream.requests]
        self.tokens: dict[Any, list[int]] = {name: [] for name in self.names}
        self.texts: dict[Any, list[str]] = {name: [] for name in self.names}
        self.logprobs: dict[Any, list[Any]] = {name: [] for name in self.names}
        self._at_first = True

    def _name(self, one: Any) -> Any:
        """Of a chunk or a handle: what it is called where it began."""
        return (one.index, one.number) if self._at_first else self.names[one.index]

    def _take(self, chunk: Any) -> None:
        name = self._name(chunk)
        self.tokens[name] += chunk.token_ids
        self.texts[name].append(chunk.text)
        self.logprobs[name] += chunk.logprobs or ()

    def read(self, most: int = 10**6) -> Journey:
        for _, chunk in zip(range(most), self.stream, strict=False):
            self._take(chunk)
        return self

    def export(self) -> list[dict[str, Any]]:
        """All that has not ended, through JSON. What is left to read here has nothing in it."""
        handles = self.stream.requests
        names = [self._name(handle) for handle in handles]
        data = [json.loads(json.dumps(handle.export())) for handle in handles]
        for chunk in self.stream:
            name = self._name(chunk)
            if name not in names:
                self._take(chunk)
                continue
            assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ([], "", "aborted")
            assert chunk.completion is not None
            assert chunk.completion.token_ids == self.tokens[name]
            assert chunk.completion.decoded in (None, "".join(self.texts[name]))
        self.names = names
        return data

    def go_on(self, llm: LLM, interval: int = 1) -> Journey:
        data = self.export()
        if data:
            self.stream, self._at_first = llm.import_request(data, stream_interval=interval), False
        return self

    def outputs(self) -> dict[Any, RequestOutput]:
        """Read to the end. The chunks of all engines together are what the outputs say."""
        outputs = dict(zip(self.names, self.read().stream.outputs(), strict=False))
        for name, output in outputs.items():
            assert output.token_ids == self.tokens[name]
            assert output.completions[0].decoded is None or output.text == "".join(self.texts[name])
            assert list(output.completions[0].logprobs or ()) == self.logprobs[name]
        return outputs


def check_alike(output: RequestOutput, undisturbed: RequestOutput, number: int = 0) -> None:
    """But for when it was, and for the last bits of log-probabilities, which depend on the batch."""
    own, other = output.completions[0], undisturbed.completions[number]
    assert (own.token_ids, own.decoded, own.finish_reason) == (other.token_ids, other.decoded, other.finish_reason)
    assert (output.prompt, output.prompt_token_ids) == (undisturbed.prompt, undisturbed.prompt_token_ids)
    told, expected = list(own.logprobs or ()), list(other.logprobs or ())
    told += [entry for entry in output.prompt_logprobs or () if entry]
    expected += [entry for entry in undisturbed.prompt_logprobs or () if entry]
    assert [(e.token_id, e.rank, len(e.top)) for e in told] == [(e.token_id, e.rank, len(e.top)) for e in expected]
    np.testing.assert_allclose([e.logprob for e in told], [e.logprob for e in expected], atol=1e-4)
    np.testing.assert_allclose(own.cumulative_logprob or 0, other.cumulative_logprob or 0, atol=1e-3)


SAMPLED = SamplingParams(temperature=1.0, seed=7, max_new_tokens=30)
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40),
    "drawn, n of them": SamplingParams(
        temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=2**64 - 1, n=3, max_new_tokens=16
    ),
    "penalties, bans, a bias, a least length": SamplingParams(
        temperature=1.1, seed=3, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3, bad_words=["the", "sea"],
        bad_words_ids=[[282, 13]], logit_bias={1: 6.0, 260: -2.0}, min_new_tokens=12, max_new_tokens=24, stop_token_ids=[300],
    ),
    "log-probabilities": SamplingParams(temperature=1.0, seed=5, logprobs=2, prompt_logprobs=3, n=2, max_new_tokens=16),
    "a form": SamplingParams(
        temperature=1.0, seed=1, max_new_tokens=60, regex=r"\{\"a\": [0-9]{3,9}, \"b\": \"[a-z ]{5,20}\"\}"
    ),
}  # fmt: skip


def test_handed_over_three_times_they_give_the_same(engines: list[LLM]) -> None:
    pytest.importorskip("llguidance")
    undisturbed = engines[0].generate([PROMPT] * len(KINDS), list(KINDS.values()))
    journey = Journey(engines[1].stream([PROMPT] * len(KINDS), list(KINDS.values()), stream_interval=2)).read(16)
    outputs = journey.go_on(engines[2], interval=3).read(9).go_on(engines[0]).read(30).go_on(engines[1]).outputs()
    assert {index for index, _ in outputs} == set(range(len(KINDS))), "one of each kind came all the way"
    for (index, number), output in outputs.items():
        check_alike(output, undisturbed[index], number)
    assert [live_blocks(llm) for llm in engines] == [0, 0, 0]


def test_a_stop_string_across_every_border(engines: list[LLM]) -> None:
    """What might be the beginning of a stop string is held back there, and shown here, or not."""
    whole = engines[0].generate(PROMPT, SAMPLED)[0].text
    assert whole is not None
    params = replace(SAMPLED, stop=[whole[22:32], whole[12:15] + "#"])
    (undisturbed,) = engines[0].generate(PROMPT, params)
    assert (undisturbed.text, undisturbed.finish_reason) == (whole[:22], "stop")
    for border in range(len(undisturbed.token_ids) - 5, len(undisturbed.token_ids), 2):
        journey = Journey(engines[0].stream(PROMPT, params)).read(border).go_on(engines[2])
        check_alike(journey.outputs()[0, 0], undisturbed)


def test_what_no_chunk_gave_is_given_there(engines: list[LLM]) -> None:
    """A waiting interval holds tokens back: none of them is lost, none comes twice."""
    (undisturbed,) = engines[0].generate(PROMPT, SAMPLED)
    stream = engines[0].stream(PROMPT, SAMPLED, stream_interval=20)
    (handle,) = stream.requests
    for _ in range(9):
        step(engines[0])
    data = handle.export()
    assert (len(data["token_ids"]), data["num_told_tokens"], data["num_told_characters"]) == (9, 0, 0)
    first = next(there := engines[1].import_request(data))
    assert first.token_ids == undisturbed.token_ids[:9]
    check_alike(*there.outputs(), undisturbed)
    (chunk,) = stream
    assert (chunk.token_ids, chunk.text, chunk.output) == ([], "", stream.outputs()[0])
    assert (chunk.output.token_ids, chunk.output.text, chunk.finish_reason) == ([], "", "aborted")


def test_beams_begin_anew_and_are_the_same(engines: list[LLM]) -> None:
    params = SamplingParams(num_beams=4, n=2, max_new_tokens=12, seed=4, length_penalty=0.7, early_stopping=True)
    (undisturbed,) = engines[0].generate(PROMPT, params)
    stream = engines[0].stream(PROMPT, params)
    for _ in range(6):
        step(engines[0])
    (handle,) = stream.requests
    data = handle.export()
    assert data["token_ids"] == []
    assert (live_blocks(engines[0]), [c.finish_reason for c in stream.outputs()[0].completions]) == (0, ["aborted"] * 2)
    (output,) = engines[1].import_request(json.loads(json.dumps(data))).outputs()
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in undisturbed.completions]


VOCAB = 160
BLOCK_BYTES = 2048  # of the model below, for four tokens, with padding


@functools.cache
def model() -> Any:
    return tiny("llama", vocab_size=VOCAB)


def small(blocks: int, **more: Any) -> LLM:
    """Token ids only, over a pool of few blocks that takes in whoever fits now."""
    llm = LLM(model(), share=False, kv_memory=(blocks + 1) * BLOCK_BYTES, block_size=4, **more)
    assert llm.stats()["blocks"]["usable"] == blocks or blocks > 63
    scheduler = llm._manager.open().core.scheduler
    scheduler.state.limits = replace(scheduler.state.limits, forecast=False)
    swap_whatever_it_costs(scheduler)
    return llm


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., RequestOutput]]:
    """What gives the output of a prompt that nothing disturbs."""
    with small(199) as llm:
        yield lambda ids, params: llm.generate([ids], params)[0]


def prompt(length: int, number: int) -> list[int]:
    return np.random.default_rng(number).integers(2, VOCAB, length).tolist()


def drawn(number: int, new: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=0.9, seed=number, ignore_eos=True, **more)


def test_under_pressure_on_both_sides(alone: Callable[..., RequestOutput]) -> None:
    with small(15, max_seqs=6) as here, small(23, host_kv_memory="1MiB", max_chunk_tokens=5) as there:
        sizes = [(6 + i, i) for i in range(6)]
        stream = here.stream([prompt(*size) for size in sizes], [drawn(i) for _, i in sizes])
        outputs = Journey(stream).read(30).go_on(there).read(20).outputs()
        assert len(outputs) == len(sizes)
        for (index, _), output in outputs.items():
            check_alike(output, alone(prompt(*sizes[index]), drawn(index)))
        assert min(here.stats()["preemptions"], there.stats()["preemptions"]) > 0
        assert (live_blocks(here), live_blocks(there)) == (0, 0)
        assert sum(o.num_preemptions for o in outputs.values()) > there.stats()["preemptions"], "those of both"


def test_in_every_state(alone: Callable[..., RequestOutput]) -> None:
    """Each goes on elsewhere, whatever it was doing; those that stay are not disturbed, and have its blocks at once."""
    with small(23, max_seqs=3, max_step_tokens=8, host_kv_memory="1MiB") as here, small(63) as there:
        asked = [(prompt(n, i), drawn(i, logprobs=0, prompt_logprobs=1)) for i, n in enumerate((9, 6, 30, 5))]
        asked.append((prompt(6, 9), drawn(9, n=3)))
        stream = here.stream([ids for ids, _ in asked], [params for _, params in asked])
        numbered = {(handle.index, handle.number): handle for handle in stream.requests}
        exported: dict[str, tuple[Any, dict[str, Any]]] = {}
        scheduler = here._manager.open().core.scheduler
        by_id = scheduler.state.by_id

        def take(state: str, name: tuple[int, int]) -> None:
            held, own = live_blocks(here), numbered[name].request_id
            had_row = by_id[own].row is not None
            exported[state] = name, json.loads(json.dumps(numbered[name].export()))
            assert own not in by_id
            assert (live_blocks(here) < held) == had_row

        step(here)
        fork = by_id[numbered[4, 1].request_id]
        assert fork.status is SequenceStatus.WAITING_FOR_PROMPT
        assert fork.leader is by_id[numbered[4, 0].request_id]
        take("behind its leader", (4, 1))
        take("waiting", (3, 0))
        while (middle := by_id[numbered[2, 0].request_id]).row is None:
            step(here)
        step(here)
        assert 0 < scheduler.rows.computed[middle.row] < 30, "in the middle of its prompt"
        take("in its prompt", (2, 0))
        assert 0 < len(exported["in its prompt"][1]["prompt_logprobs"]["ranks"]) < 29
        take("decoding", (0, 0))
        assert len(exported["decoding"][1]["token_ids"]) > 0
        preempted = by_id[numbered[1, 0].request_id]
        scheduler.pool.make_idle(10**6)
        step(here)
        assert preempted.preemptions == 1
        assert preempted.request.request_id in scheduler.cache.host.tails
        take("preempted", (1, 0))
        outputs = there.import_request([data for _, data in exported.values()]).outputs()
        for output, (state, (name, _)) in zip(outputs, exported.items(), strict=True):
            check_alike(output, alone(*asked[name[0]]), name[1])
            assert output.num_preemptions == (state == "preempted")
        left = {(c.index, c.number): c.completion for c in stream if c.completion is not None}
        whole = alone(*asked[4]).completions
        assert left[4, 0].token_ids == whole[0].token_ids
        assert left[4, 2].token_ids == whole[2].token_ids


def test_what_has_ended_or_is_code_is_not_exported(engines: list[LLM]) -> None:
    llm = engines[0]
    stream = llm.stream([PROMPT, PROMPT], [SAMPLED, replace(SAMPLED, logits_processors=[lambda ids, scores: scores])])
    first, code = stream.requests
    with pytest.raises(RequestRejected, match="logits_processors, which are code"):
        code.export()
    first.export()
    with pytest.raises(RequestRejected, match=r"has ended \('aborted'\)"):
        first.export()
    assert stream.requests == (code,)
    assert stream.outputs()[1].token_ids == llm.generate(PROMPT, SAMPLED)[0].token_ids, "it went on"
    assert stream.requests == ()
    ending = llm.stream(PROMPT, SAMPLED)
    (handle,) = ending.requests
    llm._manager.open().core.abort(handle.request_id)
    with pytest.raises(RequestRejected, match="is at its end, which the next step tells"):
        handle.export()
    assert ending.outputs()[0].finish_reason == "aborted"
    ending.close()
    with LLM(model(), share=False, kv_memory="1MiB") as closed:
        (handle,) = closed.stream([1, 2, 3]).requests
    with pytest.raises(EngineClosed):
        handle.export()


@pytest.fixture(scope="module")
def exported(engines: list[LLM]) -> dict[str, Any]:
    params = SamplingParams(temperature=1.0, seed=5, logprobs=2, prompt_logprobs=1, max_new_tokens=20, stop="\n\n\n")
    return Journey(engines[0].stream(PROMPT, params, cache_salt="tenant")).read(4).export()[0]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no mapping": (lambda d: "text", "give what export gave"),
    "none at all": (lambda d: [], "give what export gave"),
    "a list of others": (lambda d: [7], "must be a mapping, as export gives it, got int"),
    "no version": (lambda d: d.pop("version"), "has the version None"),
    "another version": (lambda d: d.update(version=3), "has the version 3, and this process reads version 2"),
    "an earlier version": (lambda d: d.update(version=1), "has the version 1, and"),
    "more tokens found than there are": (lambda d: d.update(num_cached_tokens=10**6), "num_cached_tokens must be from 0 to"),
    "tokens found that are none": (lambda d: d.update(num_cached_tokens=-1), "num_cached_tokens must be from 0 to"),
    "a key is missing": (lambda d: d.pop("token_ids"), "lacks token_ids"),
    "an unknown key": (lambda d: d.update(more=1), "has the unknown 'more'"),
    "another vocabulary": (lambda d: d.update(vocab_size=4095), "'demo' with 4,095 tokens in its vocabulary; 'demo' has 4,096"),
    "a token beyond it": (lambda d: d["token_ids"].append(4096), r"token_ids \[4096\] are outside the vocabulary"),
    "a prompt's token": (lambda d: d.update(prompt_token_ids=[-1]), r"prompt_token_ids \[-1\] are outside"),
    "no ids": (lambda d: d.update(token_ids="abc"), "token_ids must be a list of token ids"),
    "ids that are none": (lambda d: d.update(prompt_token_ids=[1.0]), "prompt_token_ids must be a list of token ids"),
    "an empty prompt": (
        lambda d: d.update(prompt_token_ids=[], prompt_logprobs={"token_ids": [], "logprobs": [], "ranks": []}),
        "is empty",
    ),
    "a prompt of another type": (lambda d: d.update(prompt=7), "prompt must be a text or None, got 7"),
    "a salt of another type": (lambda d: d.update(cache_salt=7), "cache_salt must be a text or None"),
    "a priority beyond": (lambda d: d.update(priority=10**6), "priority must be an integer from -1000 to 1000"),
    "told more than there is": (lambda d: d.update(num_told_tokens=5), "num_told_tokens must be from 0 to 4"),
    "text of other tokens": (lambda d: d.update(num_told_characters=10**4), "have another text here: it is shorter"),
    "seconds that are none": (lambda d: d.update(total_s=float("nan")), "total_s must be a number of seconds"),
    "an index below 0": (lambda d: d.update(index=-1), "index must be from 0 to 4,095"),
    "an unknown setting": (lambda d: d["sampling"].update(best_of=2), "sampling has the unknown 'best_of'"),
    "no seed": (lambda d: d["sampling"].pop("seed"), "sampling has no seed"),
    "a setting beyond": (lambda d: d["sampling"].update(top_p=2.0), "top_p must be in"),
    "a stop id beyond": (lambda d: d["sampling"].update(stop_token_ids=[5000]), "outside the vocabulary"),
    "a bias that is none": (lambda d: d["sampling"].update(logit_bias=[7]), "sampling cannot be used"),
    "several continuations": (lambda d: d["sampling"].update(n=2), "each continuation is handed over by itself"),
    "log-probabilities are gone": (lambda d: d.update(logprobs=None), "logprobs must be there"),
    "too few of them": (lambda d: d["logprobs"]["ranks"].pop(), "logprobs must be of 4 tokens and 2 more each"),
    "ragged ones": (lambda d: d["logprobs"]["logprobs"][0].pop(), "logprobs must be of lists of the same length"),
    "of other tokens": (lambda d: d["token_ids"].reverse(), "logprobs are of other tokens"),
    "it is at its end": (lambda d: d["sampling"].update(max_new_tokens=4), "4 tokens were generated, of at most 4"),
    "by a stop id": (lambda d: d["sampling"].update(stop_token_ids=d["token_ids"][3:]), "is one of its stop ids"),
    "by a stop string": (lambda d: d["sampling"].update(stop=[" "]), "has a stop string: it is at its end"),
}


def test_wrong_data_is_refused_and_nothing_starts(exported: dict[str, Any], engines: list[LLM]) -> None:
    for case, (change, message) in WRONG.items():
        data = copy.deepcopy(exported)
        changed = change(data)
        given = changed if case in ("no mapping", "none at all", "a list of others") else [exported, data]
        with pytest.raises(RequestRejected, match=message):
            engines[1].import_request(given)
        assert not engines[1]._manager.has_work, case
    long = Journey(engines[0].stream([5] * 40, replace(SAMPLED, ignore_eos=True))).read(25).export()
    too_long = pytest.raises(PromptTooLong, match=r"has 65 tokens \(25 of them generated\); .* 63 at most")
    with open_demo(kv_memory="4MiB", max_model_len=64) as short, too_long:
        short.import_request(long)
    with pytest.raises(RequestRejected, match="stream_interval must be"):
        engines[1].import_request(long, stream_interval=0)


def test_counters_are_added_up_and_the_rest_goes_along(exported: dict[str, Any], engines: list[LLM]) -> None:
    data = copy.deepcopy(exported) | {"num_preemptions": 3, "first_token_s": 1.5, "total_s": 100.0}
    (urgent,) = engines[1].import_request(data, priority=-5).requests
    (usual,) = engines[1].import_request(data).requests
    urgent, again = urgent.export(), usual.export()
    assert urgent == data | {"priority": -5, "total_s": urgent["total_s"], "first_token_s": pytest.approx(1.5)}
    assert (again["cache_salt"], again["priority"]) == ("tenant", 0)
    output = engines[0].import_request(again).outputs()[0].completions[0]
    assert output.num_preemptions == 3
    assert output.timings.first_token_s == pytest.approx(1.5)
    assert 100 < output.timings.total_s < 1000


def test_the_tokens_found_cached_are_those_of_where_it_began(engines: list[LLM]) -> None:
    first, second, _ = engines
    prompt = list(range(5, 35))
    first.generate([prompt], replace(SAMPLED, max_new_tokens=1))
    journey = Journey(first.stream(prompt, SAMPLED)).read(3)
    (data,) = journey.export()
    assert data["num_cached_tokens"] == 28, "seven blocks of 4"
    assert journey.stream.outputs()[0].num_cached_tokens == 28, "the end of it here says so too"
    assert journey.stream.outputs()[0].timings.queued_s is not None
    imported = second.import_request(data).outputs()[0]
    assert imported.num_cached_tokens == 28, "though nothing was found there"
    assert imported.timings.queued_s is None, "it was admitted elsewhere"
    (waiting,) = Journey(second.stream(prompt, SAMPLED)).export()
    assert waiting["num_cached_tokens"] is None, "it was not admitted yet"
    assert first.import_request(waiting).outputs()[0].num_cached_tokens == 28


def test_tasks_import_request_and_export(exported: dict[str, Any], engines: list[LLM]) -> None:
    (output,) = engines[1].import_request(exported).outputs()
    told, endless = len(exported["token_ids"]), copy.deepcopy(exported)
    endless["sampling"]["max_new_tokens"] = 2000  # so that it does not end before it is exported

    async def go_on() -> dict[str, Any]:
        async with AsyncLLM("demo", device="cpu", dtype="float32", share=False, kv_memory="4MiB") as llm:
            stream = llm.import_request([endless, exported], priority=1)
            assert stream.requests == ()
            chunks = [await anext(stream)]
            data = await stream.requests[0].export()
            chunks += [chunk async for chunk in stream]
            tokens = [[token for c in chunks if c.index == index for token in c.token_ids] for index in (0, 1)]
            assert tokens[0] == data["token_ids"][told : data["num_told_tokens"]]
            assert tokens[1] == output.token_ids[told:]
            ends = {chunk.index: chunk.output for chunk in chunks if chunk.output is not None}
            reported = data["token_ids"][: data["num_told_tokens"]]
            assert (ends[0].token_ids, ends[0].finish_reason) == (reported, "aborted")
            check_alike(ends[1], output)
            assert stream.requests == ()
            with pytest.raises(RequestRejected, match="version"):
                await anext(llm.import_request({}))
            return data

    data = asyncio.run(go_on())
    data["sampling"]["max_new_tokens"] = len(data["token_ids"]) + 20
    assert engines[1].import_request(data).outputs()[0].token_ids[:20] == output.token_ids

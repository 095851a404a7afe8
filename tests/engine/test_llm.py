"""`LLM` as a program uses it: a tiny Llama with a tokenizer, saved to files, against transformers' own `generate`."""

from __future__ import annotations

import contextvars
import functools
import gc
import io
import json
import logging
import re
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from async_rig import run_threads
from byte_level import byte_level
from checkout import ROOT
from engines import prompts as prompts_of
from families import tiny
from monitors import wait_until
from prompt_types import types_of_a_prompt
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import pagetide
import pagetide.engine.executor as executor_module
import pagetide.engine.llm as llm_module
from pagetide import LLM, SamplingParams
from pagetide.allocator.host_arena import HostArena
from pagetide.engine.build import plan_only
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError, EngineClosed, NotEnoughMemory
from pagetide.scheduler.request import PromptTooLong, RequestRejected

VOCAB = 320  # more than the tokenizer has, as in many real models
BOS, EOS = 0, 1
TEXT = "the tide comes in and the tide goes out; pages follow it"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MIB = 1 << 20


def byte_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE; puts BOS before a text unless told not to."""
    tokenizer = byte_level([TEXT], 300, ["<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZER = byte_tokenizer()


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no token ends, with a tokenizer and no chat template; tests that change it take a copy."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    reference().save_pretrained(path)
    edit_json(path / "config.json", bos_token_id=BOS)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@functools.cache
def reference() -> Any:
    return tiny("llama", vocab_size=VOCAB)


@functools.cache
def plain(ids: tuple[int, ...], new: int = 12, **settings: Any) -> list[int]:
    """Greedy tokens behind `ids`, by transformers."""
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    prompt = torch.tensor([ids])
    everything = torch.ones_like(prompt)  # transformers would guess from the ids which are padding
    out = reference().generate(
        prompt, attention_mask=everything, max_new_tokens=new, do_sample=False, pad_token_id=0, **settings
    )
    return out[0, len(ids) :].tolist()


def ids_of(prompt: Any) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(prompt)) if isinstance(prompt, str) else tuple(int(i) for i in prompt)


def decoded(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def byte_ids(text: str) -> list[int]:
    """The text's bytes, a token each."""
    return [i for character in text for i in TOKENIZER.encode(character, add_special_tokens=False)]


def up_to(new: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, **more)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (0, 0, 0)


@pytest.fixture
def load() -> Iterator[Callable[..., LLM]]:
    """Makes LLMs of a folder with a pool of 1 MiB, and closes them."""
    made: list[LLM] = []

    def make(path: Path, **options: Any) -> LLM:
        made.append(LLM(path, **{"device": "cpu", "kv_memory": MIB, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def shared(saved: Path) -> Iterator[LLM]:
    with LLM(saved, device="cpu", kv_memory=MIB) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The engine that most tests share; each has to leave it idle."""
    yield shared
    assert is_idle(shared), shared.stats()
    assert not shared._manager.delivery.groups


def test_a_prompt_passes_the_types_of_the_documented_walk(llm: LLM) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.partition("### The types of a prompt")[2].partition("###")[0]
    documented = re.findall(r"^\| `(\w+)` \| `([\w/]+)\.py` \|", section, re.MULTILINE)
    types = types_of_a_prompt(llm, "the tide comes in")
    assert [(one.__name__, one.__module__.removeprefix("pagetide.").replace(".", "/")) for one in types] == documented
    assert len(types) <= 14


@contextmanager
def scripted(llm: LLM, *scripts: tuple[Any, list[int]]) -> Iterator[None]:
    """Within, what follows each of the given prompts is the given tokens, and then BOS for ever."""
    after = {ids_of(prompt): tokens for prompt, tokens in scripts}
    core = llm._manager.engine.core
    sampler, rows = core.runner.sampler, core.scheduler.rows
    sample = sampler.sample

    def scripted_sample(at: Any, positions: Any, logits: Any) -> Any:
        tokens, bad = sample(at, positions, logits)
        for i, row in enumerate(at):
            num_prompt = int(rows.prompt[row])
            script = after[tuple(rows.tokens[row, :num_prompt].tolist())]
            n = int(positions[i]) - num_prompt
            tokens[i] = script[n] if n < len(script) else BOS
        return tokens, bad

    sampler.sample = scripted_sample
    try:
        yield
    finally:
        del sampler.sample


def test_every_form_of_prompt(llm):
    for form, (given, expected) in {
        "a string": ("the tide", ["the tide"]),
        "strings": (["the tide", "goes", "潮汐 🌊"], ["the tide", "goes", "潮汐 🌊"]),
        "a tuple of strings": (("the", "tide"), ["the", "tide"]),
        "ids": ([5, 6, 7], [[5, 6, 7]]),
        "a tuple of ids": ((5, 6, 7), [[5, 6, 7]]),
        "an array": (np.array([5, 6, 7], np.int64), [[5, 6, 7]]),
        "a tensor": (torch.tensor([5, 6, 7]), [[5, 6, 7]]),
        "numpy's integers": ([np.int32(5), np.uint8(6)], [[5, 6]]),
        "one list of ids": ([[5, 6, 7]], [[5, 6, 7]]),
        "an array of rows": (np.array([[5, 6], [7, 8]], np.int16), [[5, 6], [7, 8]]),
        "all mixed": (["out", [9], (8, 8), np.array([319], np.uint16), "out"], ["out", [9], [8, 8], [319], "out"]),
        "a generator": ((text for text in ("a", "b")), ["a", "b"]),
    }.items():
        outputs = llm.generate(given, up_to(5))
        assert [o.prompt for o in outputs] == [p if isinstance(p, str) else None for p in expected], form
        assert [tuple(o.prompt_token_ids) for o in outputs] == [ids_of(p) for p in expected], form
        assert tokens_of(outputs) == [plain(ids_of(p), 5) for p in expected], form
        assert [o.text for o in outputs] == [decoded(o.token_ids) for o in outputs]
        assert {(o.finish_reason, o.error, o.num_preemptions) for o in outputs} == {("length", None, 0)}
        assert len({o.request_id for o in outputs}) == len(outputs)
        assert all(0 <= o.timings.queued_s <= o.timings.first_token_s <= o.timings.total_s for o in outputs)


def test_one_set_of_parameters_for_all_or_one_each(llm):
    prompts = ["the", "tide", "out"]
    whole = [plain(ids_of(p)) for p in prompts]
    assert tokens_of(llm.generate(prompts, up_to(4))) == [w[:4] for w in whole]
    assert tokens_of(llm.generate(prompts, (up_to(3), up_to(1), up_to(12)))) == [whole[0][:3], whole[1][:1], whole[2]]
    for wrong in ([], [up_to(3)], [up_to(3)] * 4):
        with pytest.raises(RequestRejected, match=f"3 prompts, but {len(wrong)} sampling_params"):
            llm.generate(prompts, wrong)
    for wrong in ([None] * 3, [up_to(3), up_to(3), 5], {"max_new_tokens": 3}, 5, "greedy"):
        with pytest.raises(RequestRejected, match="sampling_params must be SamplingParams, got"):
            llm.generate(prompts, wrong)


def test_without_parameters_it_is_greedy_and_256_tokens_or_the_context(saved, load, llm):
    (output,) = llm.generate([5])
    assert (output.token_ids[:12], len(output.token_ids)) == (plain((5,)), 256)
    (output,) = load(saved, max_model_len=20).generate([5, 6])
    assert (output.token_ids, output.finish_reason) == (plain((5, 6), 18), "length")


def test_an_empty_string_starts_from_bos(llm, folder, load):
    for params in (up_to(5), up_to(5, add_special_tokens=False)):
        (output,) = llm.generate("", params)
        assert (output.prompt, output.prompt_token_ids, output.token_ids) == ("", [BOS], plain((BOS,), 5))
    byte_tokenizer(bos=False).save_pretrained(folder)
    assert tokens_of(load(folder).generate(["", "a"], up_to(5)))[0] == plain((BOS,), 5)  # by config.json alone
    edit_json(folder / "config.json", bos_token_id=None)
    nowhere = load(folder)
    with pytest.raises(RequestRejected, match="no BOS to start from"):
        nowhere.generate(["a", ""])
    assert is_idle(nowhere)


NO_PROMPT: dict[str, tuple[Any, str]] = {
    "no ids": ([], "the prompt is empty"),
    "no ids, of an array": (np.array([], np.int64), "the prompt is empty"),
    "beyond the vocabulary": ([5, VOCAB], r"token ids \[320\] are outside the vocabulary, which has 0 .. 319"),
    "far beyond": ([2**70], "flat list of integers"),
    "negative": ([5, -1, -7], r"token ids \[-1, -7\] are outside"),
    "floats": ([5.0, 6.5], "flat list of integers"),
    "not a number": ([float("nan")], "flat list of integers"),
    "truths": ([True, False], "flat list of integers"),
    "nested": ([[5, 6]], "flat list of integers"),
    "ragged": ([5, [6, 7]], "flat list of token ids"),
    "ids, then a string": ([5, "the"], "flat list of integers"),
    "None": (None, "flat list of integers"),
    "a number": (5, "flat list of integers"),
    "bytes": (b"the tide", "flat list of integers"),
    "half a character": ("the \ud83c", "surrogates not allowed"),
}
NO_PROMPTS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "no prompt was given"),
    "an empty array": (np.array([], np.int64), "no prompt was given"),
    "None": (None, "got NoneType"),
    "a number": (5, "got int"),
    "an array of no dimension": (np.array(5), "single number 5"),
    "bytes": (b"the tide", "got bytes"),
    "the whole context": ([5] * 512, "the prompt has 512 tokens; with a context of 512 .* 511 at most"),
    "a long text": ("the tide " * 400, "with a context of 512 tokens"),
    "a long text behind others": (["the tide", [5], "the tide " * 400], "with a context of 512 tokens"),
}


def test_bad_prompts_are_refused_and_change_nothing(llm):
    """Also in the middle of a batch of good ones, of which none is started; a running stream does not notice."""
    chunks = llm.stream([[5, 6], "the tide"], up_to(12))
    seen = [next(chunks), next(chunks)]
    before = llm.stats()
    batches = {name: (["good", one, [5]], message) for name, (one, message) in NO_PROMPT.items()}
    for name, (prompts, message) in (batches | NO_PROMPTS).items():
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestRejected, match=message):
                call(prompts)
            assert llm.stats() == before, name
    for one, message in NO_PROMPT.values():
        with pytest.raises(RequestRejected, match=message):
            llm.tokenize(one)
    seen += chunks
    for index, ids in enumerate([(5, 6), ids_of("the tide")]):
        assert [t for c in seen if c.index == index for t in c.token_ids] == plain(ids)


def test_what_can_never_fit_the_pool_is_refused_with_numbers(saved, load):
    llm = load(saved, kv_memory=11 * 8192)  # a block of 16 tokens has 6 KiB, and so small a pool whole pages
    assert llm.stats()["blocks"]["usable"] == 10
    with pytest.raises(PromptTooLong, match=r"161 tokens need 11 blocks of 16 tokens, the whole pool has 10"):
        llm.generate([[5], [5] * 161], up_to(2))
    assert llm.stats()["steps"] == 0 and is_idle(llm)
    outputs = llm.generate([[5] * 160, [5] * 155], [up_to(1), up_to(100)])
    assert [(len(o.token_ids), o.finish_reason) for o in outputs] == [(1, "length"), (6, "length")]


def test_bad_parameters():
    for options, message in [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0"),
        ({"min_new_tokens": 4, "max_new_tokens": 3}, "min_new_tokens 4 is above max_new_tokens 3"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"min_p": 1.01}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"stop": ""}, "stop must be non-empty strings"),
        ({"stop": ["a", ""]}, "stop must be non-empty strings"),
        ({"stop": [5]}, "stop must be non-empty strings"),
        ({"stop": 5}, "stop must be"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0"),
        ({"stop_token_ids": 5}, "stop_token_ids must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**options)


def test_bad_arguments_of_calls(llm, saved):
    before = llm.stats()
    for interval in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="stream_interval must be"):
            llm.stream("a", up_to(2), stream_interval=interval)
    for n in (0, -1, 4097, 1.0, True, "2"):
        with pytest.raises(ValueError, match="n must be"):
            SamplingParams(n=n)
    for priority in ("high", None, float("nan"), 1.5, 1001, -1001, 1.0, True, 10**400):
        with pytest.raises(RequestRejected, match="priority must be an integer from -1000 to 1000"):
            llm.generate(["a", "b"], up_to(2), priority=priority)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(saved, max_model_len=513)
    assert llm.stats() == before


def test_numbers_of_numpy_are_numbers(llm):
    """In parameters as in prompts."""
    given = SamplingParams(
        max_new_tokens=np.int64(9), temperature=np.float32(0.5), top_k=np.int32(7), seed=np.int64(5),
        stop_token_ids=np.array([300, 301]),
    )  # fmt: skip
    same = SamplingParams(max_new_tokens=9, temperature=0.5, top_k=7, seed=5, stop_token_ids=[300, 301])
    assert tokens_of(llm.generate("the tide", given)) == tokens_of(llm.generate("the tide", same))


def test_a_folder_without_a_tokenizer_serves_ids(folder, load):
    for file in folder.glob("token*"):
        file.unlink()
    llm = load(folder)
    outputs = llm.generate([[5, 6], np.array([7])], up_to(12))
    assert tokens_of(outputs) == [plain((5, 6)), plain((7,))]
    assert [o.completions[0].decoded for o in outputs] == [None, None]
    (stopped,) = llm.generate([5, 6], up_to(12, stop_token_ids=[plain((5, 6))[3]]))
    assert stopped.finish_reason == "stop"
    chunks = list(llm.stream([5, 6], up_to(12)))
    assert [c.text for c in chunks] == [""] * 12
    assert [t for c in chunks for t in c.token_ids] == plain((5, 6))
    before = llm.stats()
    for refused in (
        lambda: llm.generate([[5], "the tide"]), lambda: llm.generate([5], SamplingParams(stop="x")),
        lambda: llm.stream(""), lambda: llm.tokenize("x"), lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):  # fmt: skip
        with pytest.raises(RequestRejected, match="tokenizer"):
            refused()
    assert llm.stats() == before


def test_chat_by_the_tokenizers_template(folder, load, llm):
    with pytest.raises(RequestRejected, match=r"no chat template: use generate\(\).*chat_template"):
        llm.chat([{"role": "user", "content": "the tide"}])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    llm = load(folder)
    ask = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the tide"}]
    other = [{"role": "user", "content": "潮汐?"}]
    rendered = ["<system>be brief<user>the tide<assistant>", "<user>潮汐?<assistant>"]
    ids = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in rendered]  # the template is all there is
    for given, expected in ((ask, ids[:1]), ([ask, other], ids), ((tuple(ask), other), ids)):
        outputs = llm.chat(given, up_to(12))
        assert [tuple(o.prompt_token_ids) for o in outputs] == expected
        assert tokens_of(outputs) == [plain(one) for one in expected]
        assert [o.text for o in outputs] == [decoded(o.token_ids) for o in outputs]
    assert tokens_of(llm.chat([ask, other], [up_to(3), up_to(5)])) == [plain(ids[0])[:3], plain(ids[1])[:5]]
    (output,) = llm.chat(other, up_to(2), add_generation_prompt=False)
    assert decoded(output.prompt_token_ids) == "<user>潮汐?"
    before = llm.stats()
    for bad in ("hi", None, 5, ask[0], [], [[]], ["hi"], [5], [None], [ask, "hi"], [ask, [5]]):
        with pytest.raises(RequestRejected):
            llm.chat(bad)
    with pytest.raises(RequestRejected, match="2 prompts, but 1 sampling_params"):
        llm.chat([ask, other], [up_to(2)])
    assert llm.stats() == before


PROMPTS: list[tuple[int, ...]] = [(5, 6), (7,), (300, 11, 12), (40, 41, 42, 43)]


def ends() -> tuple[int, int]:
    """Two ids, of which one ends what follows the first prompt and the other what follows the second."""
    first, second = plain(PROMPTS[0]), plain(PROMPTS[1])
    return first[4], next(t for t in second[2:] if t not in first)


def test_all_end_ids_of_the_generation_config(folder, load):
    edit_json(folder / "generation_config.json", eos_token_id=list(ends()))
    llm = load(folder)
    outputs = llm.generate(PROMPTS, up_to(12))
    assert tokens_of(outputs) == [plain(p, 12, eos_token_id=ends()) for p in PROMPTS]
    assert {o.token_ids[-1] for o in outputs if o.finish_reason == "stop"} == set(ends())
    assert all((o.finish_reason == "stop") == (o.token_ids[-1] in ends()) for o in outputs)
    assert tokens_of(llm.generate(PROMPTS, up_to(12, ignore_eos=True))) == [plain(p) for p in PROMPTS]
    for least in (1, 6, 12):
        held = llm.generate(PROMPTS, up_to(12, min_new_tokens=least))
        assert tokens_of(held) == [plain(p, 12, eos_token_id=ends(), min_new_tokens=least) for p in PROMPTS]
        assert all(len(o.token_ids) >= least for o in held)


def test_stop_token_ids_end_besides_the_models_own(folder, load):
    edit_json(folder / "generation_config.json", eos_token_id=ends()[0])
    llm = load(folder)
    both = llm.generate(PROMPTS, up_to(12, stop_token_ids=[ends()[1], 299]))
    assert tokens_of(both) == [plain(p, 12, eos_token_id=ends()) for p in PROMPTS]
    own = llm.generate(PROMPTS, up_to(12, stop_token_ids=ends()[1:], ignore_eos=True))
    assert tokens_of(own) == [plain(p, 12, eos_token_id=ends()[1]) for p in PROMPTS]
    assert own[1].finish_reason == "stop"
    assert own[1].text == decoded(own[1].token_ids)


def test_sampling_defaults_of_the_generation_config_and_explicit_ones_over_them(folder, load, llm):
    """Held against another engine, without defaults, that is told the same explicitly."""
    defaults = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2, "max_new_tokens": 9}
    edit_json(folder / "generation_config.json", do_sample=True, **defaults)
    own = load(folder)

    def same(over: dict[str, Any], told: dict[str, Any]) -> bool:
        return tokens_of(own.generate(PROMPTS, SamplingParams(seed=3, **over))) == tokens_of(
            llm.generate(PROMPTS, SamplingParams(seed=3, **told))
        )

    assert same({}, defaults)
    assert same({"top_k": 5}, defaults | {"top_k": 5})
    assert same({"temperature": 1.5, "max_new_tokens": 20}, defaults | {"temperature": 1.5, "max_new_tokens": 20})
    assert same({"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}, {"temperature": 0.8, "max_new_tokens": 9})
    assert not same({}, defaults | {"temperature": 1.0})
    assert not same({}, defaults | {"top_k": 5})
    greedy = own.generate(PROMPTS, SamplingParams(temperature=0))
    assert tokens_of(greedy) == [plain(p, 9, repetition_penalty=1.2) for p in PROMPTS]
    drawn = own.generate(PROMPTS)  # by a seed of its own: some may end sooner
    assert all(len(o.token_ids) == 9 or (len(o.token_ids) < 9 and o.finish_reason == "stop") for o in drawn)
    edit_json(folder / "generation_config.json", do_sample=False)
    assert tokens_of(load(folder).generate(PROMPTS)) == tokens_of(greedy)
    edit_json(folder / "generation_config.json", min_new_tokens=5)
    least = load(folder).generate(PROMPTS, up_to(3, repetition_penalty=1.0))
    assert tokens_of(least) == [plain(p)[:3] for p in PROMPTS], "an explicit maximum wins over the model's minimum"


TIDE = "the tide turns; 潮汐 and so on"


STOPS = [  # a stop string, the text that is shown, and the text up to the last token
    (";", "the tide turns", "the tide turns;"),
    ("turns; ", "the tide ", "the tide turns; "),
    (["turn", "tide t"], "the ", "the tide t"),  # the one that is complete first
    ("汐", "the tide turns; 潮", "the tide turns; 潮汐"),
    ("the", "", "the"),
    ("on", "the tide turns; 潮汐 and so ", TIDE),  # with the last token
    ("only", TIDE, None),  # begins to come, and does not
]


def test_stop_strings(llm):
    script, prompts = byte_ids(TIDE), [[5 + i] for i in range(len(STOPS))]
    expected = [(text, script, "length") if upto is None else (text, byte_ids(upto), "stop") for _, text, upto in STOPS]
    with scripted(llm, *((prompt, script) for prompt in prompts)):
        params = [up_to(len(script), stop=stop) for stop, _, _ in STOPS]
        assert [(o.text, o.token_ids, o.finish_reason) for o in llm.generate(prompts, params)] == expected
        for interval in (1, 4, 100):
            chunks = list(llm.stream(prompts, params, stream_interval=interval))
            for index, case in enumerate(expected):
                own = [c for c in chunks if c.index == index]
                tokens = [t for c in own for t in c.token_ids]
                assert ("".join(c.text for c in own), tokens, own[-1].finish_reason) == case, (interval, index)
                assert all(len(c.token_ids) == interval for c in own[:-1])
                assert [c.output is not None for c in own] == [False] * (len(own) - 1) + [True]
            if interval == 1:
                assert [c.index for c in chunks[:9]] == [*range(7), 0, 1], "they do not come side by side"


def test_an_end_id_shows_no_text_and_a_stop_string_may_come_before_it(folder, load):
    edit_json(folder / "generation_config.json", eos_token_id=EOS)
    llm = load(folder)
    script = [*byte_ids("out; "), EOS, *byte_ids("more")]
    with scripted(llm, ([5], script), ([6], script), ([7], script)):
        outputs = llm.generate([[5], [6], [7]], [up_to(10), up_to(10, stop=";"), up_to(10, ignore_eos=True)])
    assert [(o.text, o.finish_reason) for o in outputs] == [("out; ", "stop"), ("out", "stop"), ("out; more", "length")]
    assert tokens_of(outputs) == [script[:6], script[:4], script]


def drawn(seed: int, n: int | None = None, new: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=1.5, seed=seed, n=n, **more)


def test_n_continuations_of_each_prompt(saved, load):
    llm = load(saved)
    prompts = [[5, 6, 7] * 9, "the tide"]
    one = llm.generate(prompts, drawn(3))
    many = llm.generate(prompts, [drawn(3, n=4), drawn(3, n=2)])
    assert [len(output.completions) for output in many] == [4, 2]
    for first, output in zip(one, many, strict=True):
        assert output.token_ids == output.completions[0].token_ids == first.token_ids, "the first is as without n"
        assert len({tuple(c.token_ids) for c in output.completions}) == len(output.completions)
        assert [c.text for c in output.completions] == [decoded(c.token_ids) for c in output.completions]
    again = llm.generate(prompts[0], drawn(3, n=4))[0]
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in many[0].completions]
    other = llm.generate(prompts[0], drawn(4, n=4))[0]
    assert not {tuple(c.token_ids) for c in other.completions} & {tuple(c.token_ids) for c in again.completions}
    assert llm.stats()["forks"] == 3 + 1 + 3 + 3
    alone = [tokens_of(llm.generate([5], up_to(15, temperature=5.0)))[0] for _ in range(2)]
    assert alone[0] != alone[1], "no seed is a new one every time"


def test_closing_a_stream_gives_its_blocks_back(llm):
    """Whether it was read or not, when it is left or forgotten; the others go on, as calls of `generate` between them do."""
    aborts = llm.stream([[5, 6], [7, 8]], up_to(200))
    stays = llm.stream([9], up_to(12))
    for _ in range(7):
        next(aborts)
    assert llm.stats()["running"] == 3
    assert tokens_of(llm.generate([[7], "the tide"], up_to(3))) == [plain((7,))[:3], plain(ids_of("the tide"))[:3]]
    aborts.close()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (1, 0, 1)
    assert list(aborts) == []
    assert [t for c in stays for t in c.token_ids] == plain((9,))
    for steps in (0, 1, 5):
        chunks = llm.stream([[5] * 40], drawn(3, n=5, new=200))
        for _ in range(steps):
            next(chunks)
        chunks.close()
        assert is_idle(llm) and not llm._manager.delivery.groups
    unread = llm.stream([[5, 6], [7]], up_to(200))
    assert llm.stats()["waiting"] == 2
    del unread
    gc.collect()
    assert llm.generate([9], up_to(12))[0].token_ids == plain((9,)) and is_idle(llm)

    def fails() -> None:
        for _ in llm.stream([[5, 6], [7]], up_to(200)):
            raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        fails()
    gc.collect()
    assert is_idle(llm)


def test_a_forgotten_stream_may_be_collected_in_the_middle_of_a_step(saved):
    """The collector runs anywhere, also where the engine's own lock is held."""
    llm = LLM(saved, device="cpu", kv_memory=MIB)
    cycle: dict[str, Any] = {"stream": llm.stream([5], up_to(200))}
    next(cycle["stream"])
    cycle["self"] = cycle
    begin = llm._manager.engine.core.runner.begin
    done: list[Any] = []

    def collecting(plan: Any) -> Any:
        gc.collect()
        return begin(plan)

    def work() -> None:
        done.extend(llm.generate([9], up_to(12)))
        llm.generate([9], up_to(1))
        done.append(is_idle(llm))
        llm.close()

    llm._manager.engine.core.runner.begin = collecting
    del cycle
    run_threads(work)  # which hangs where the finaliser waits for a lock that its own thread holds
    assert done[0].token_ids == plain((9,)) and done[1]


def test_stats_are_plain_data_and_count(saved, load):
    llm = load(saved)
    empty = llm.stats()
    assert json.loads(json.dumps(empty)) == empty
    assert (empty["device"], empty["dtype"], empty["max_model_len"], empty["block_size"]) == ("cpu", "float32", 512, 16)
    assert (empty["steps"], empty["computed_tokens"], empty["peak_used_blocks"]) == (0, 0, 0)
    chunks = llm.stream([5] * 20, up_to(5))
    assert llm.stats() == empty | {"waiting": 1}
    next(chunks)
    during = llm.stats()
    assert (during["running"], during["waiting"], during["blocks"]["live"], during["steps"]) == (1, 0, 2, 1)
    output = list(chunks)[-1].output
    after = llm.stats()
    cached = {"cached": 1, "free": empty["blocks"]["free"] - 1}
    resumed = {"lookups": 0, "lookup_tokens": 0, "hit_tokens": 0}
    found = {"lookups": 1, "lookup_tokens": 20, "hit_tokens": 0, "resumed": resumed}
    prefixes = found | {"findable_blocks": 1, "retained_blocks": 0, "pins": 0, "pinned_blocks": 0, "lost_pins": 0}
    prefixes["max_cached_blocks"] = None
    assert after == empty | {
        "steps": 5, "computed_tokens": 24, "prompt_tokens": 20, "generated_tokens": 5, "peak_used_blocks": 2,
        "step_tokens": empty["step_tokens"] | {"steps": [4, 0, 0, 1, *[0] * 10]},
        "blocks": empty["blocks"] | cached, "prefix_cache": prefixes,
    }  # fmt: skip
    told = json.loads(json.dumps(output.to_dict()))
    assert told["completions"][0]["token_ids"] == plain((5,) * 20)[:5]


def test_outputs_say_how_much_of_their_prompt_was_cached(saved, load):
    llm = load(saved)
    prompt = list(range(5, 70))
    one, several, beams = up_to(3), SamplingParams(n=2, max_new_tokens=3), SamplingParams(num_beams=2, max_new_tokens=3)
    asked = [(65, one), (65, several), (40, beams), (9, one)]
    outputs = [llm.generate([prompt[:length]], params)[0] for length, params in asked]
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 32, 0]
    assert outputs[1].to_dict()["num_cached_tokens"] == 64
    assert list(llm.stream([prompt], one))[-1].output.num_cached_tokens == 64
    stats = llm.stats()["prefix_cache"]
    assert (stats["lookups"], stats["lookup_tokens"], stats["hit_tokens"]) == (5, 65 * 3 + 49, 64 * 2 + 32)
    refused, ran = llm.generate_each([[5] * 10_000, prompt], one)
    assert (refused.num_cached_tokens, ran.num_cached_tokens) == (0, 64)


def test_what_stays_cached_is_bounded(saved, load):
    """With 0 nothing stays, and requests that run together share all the same; without caching nothing is found."""
    prompts = [list(range(5 + i, 70 + i)) for i in range(3)]
    block_bytes = load(saved, share=False)._manager.engine.plan.geometry.block_stride
    elastic = {"min": 256 << 10, "max": MIB}
    for bound, blocks, memory in ((f"{2 * block_bytes}", 2, elastic), (5 * block_bytes - 1, 4, MIB), ("0", 0, elastic)):
        llm = load(saved, prefix_cache_memory=bound, kv_memory=memory, share=False)
        for prompt in prompts:
            assert llm.generate([prompt], up_to(3))[0].token_ids == plain(tuple(prompt))[:3]
            stats = llm.stats()
            assert (stats["blocks"]["cached"], stats["blocks"]["live"]) == (blocks, 0)
        assert stats["prefix_cache"]["max_cached_blocks"] == stats["prefix_cache"]["findable_blocks"] == blocks
        assert llm.generate([prompts[2]], up_to(3))[0].num_cached_tokens == 16 * blocks
        chunks = llm.stream([prompts[0]], up_to(30))
        next(chunks)
        assert llm.generate([prompts[0]], up_to(3))[0].num_cached_tokens == 64, "held by another one"
        chunks.close()
        llm.close()
    llm = load(saved, prefix_caching=False)
    assert [llm.generate([prompts[0]], up_to(3))[0].num_cached_tokens for _ in range(2)] == [0, 0]
    stats = llm.stats()
    assert (stats["prefix_cache"], stats["blocks"]["cached"], stats["computed_tokens"]) == (None, 0, 2 * 67)


SECRET = b"a key that several workers share"


def test_engines_with_one_secret_hash_prefixes_alike(saved, load, caplog):
    """Whatever else they are set to; and nothing shows the secret."""
    caplog.set_level(logging.DEBUG)

    def digests(**options):
        hasher = load(saved, **options)._manager.engine.core.scheduler.cache.index.hasher
        return [hasher.chain(range(64), salt).digests(4).tolist() for salt in (None, b"tenant")]

    shared = digests(prefix_hash_secret=SECRET)
    assert digests(prefix_hash_secret=SECRET, max_seqs=3, prefix_cache_memory=0) == shared
    assert digests(prefix_hash_secret=SECRET[:-1]) != shared
    assert digests() != digests() != shared, "random without one"
    llm = load(saved, prefix_hash_secret=SECRET)
    assert llm.generate([list(range(5, 70))], up_to(3))[0].token_ids == plain(tuple(range(5, 70)))[:3]
    told = f"{llm.config!r}{llm.config}{llm!r}{json.dumps(llm.stats())}{llm._manager.engine!r}{caplog.text}"
    assert not any(text in told for text in (SECRET.decode(), SECRET.hex(), str(list(SECRET))))
    assert "prefix_hash_secret" not in repr(llm.config)


WRONG_CACHES = [
    ({"prefix_hash_secret": SECRET.decode()}, "prefix_hash_secret must be bytes, got str; encode a text"),
    ({"prefix_hash_secret": b"short secret"}, "prefix_hash_secret has 12 bytes, and can be guessed: .* at least 16"),
    ({"prefix_hash_secret": SECRET, "prefix_caching": False}, "leave prefix_caching on, or prefix_hash_secret out"),
    ({"prefix_cache_memory": -1}, "at least 1 byte, got -1; or 0, or None for no bound"),
    ({"prefix_cache_memory": "many"}, "prefix_cache_memory: cannot read 'many'"),
    ({"prefix_cache_memory": False}, "prefix_cache_memory: cannot read False"),
    ({"prefix_cache_memory": 0, "prefix_caching": False}, "leave prefix_caching on, or prefix_cache_memory out"),
    ({"prefix_caching": "yes"}, "prefix_caching must be true or false"),
]


def test_wrong_settings_of_the_prefix_cache_are_refused_and_secrets_not_repeated(saved):
    for options, message in WRONG_CACHES:
        with pytest.raises(ConfigError, match=message) as caught:
            LLM(saved, device="cpu", **options)
        assert "several workers" not in str(caught.value) and "short secret" not in str(caught.value)


def test_threads_share_an_engine(saved, load):
    llm = load(saved, kv_memory=40 * 8192, max_seqs=6)
    before = set(threading.enumerate())
    params = [[up_to(8 + j, temperature=float(i % 2), seed=j, stop="qq") for j in range(5)] for i in range(4)]
    work = [(prompts_of([7, 40, 23, 3, 51], VOCAB, seed=i), own) for i, own in enumerate(params)]
    alone = [tokens_of(llm.generate(*one)) for one in work]
    got: dict[int, list[list[int]]] = {}

    def generate(i: int) -> None:
        got[i] = tokens_of(llm.generate(*work[i]))

    def stream(i: int) -> None:
        chunks = list(llm.stream(*work[i]))
        got[i] = [[t for c in chunks if c.index == j for t in c.token_ids] for j in range(5)]

    run_threads(*(functools.partial(stream if i == 3 else generate, i) for i in range(4)))
    assert [got[i] for i in range(4)] == alone
    assert is_idle(llm)
    llm.close()
    assert set(threading.enumerate()) <= before


@contextmanager
def raising(owner: Any, name: str, call: int, error: BaseException, ran: bool = False) -> Iterator[None]:
    """Within, the method raises in its call number `call`, before it does its work or after."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def broken(*arguments: Any) -> Any:
        now = next(calls) == call
        result = None if now and not ran else method(*arguments)
        if now:
            raise error
        return result

    setattr(owner, name, broken)
    try:
        yield
    finally:
        delattr(owner, name)


# Where a step breaks, before the work of a method is done or after.


def test_a_step_that_breaks_ends_its_requests_and_leaves_a_usable_engine(saved, load, caplog):
    llm, params = load(saved, max_step_tokens=512), up_to(12, repetition_penalty=1.5, min_new_tokens=3)
    inputs = [*PROMPTS, *PROMPTS]
    whole = tokens_of(llm.generate(inputs, params))
    for owner, name, ran in [
        (lambda core: core.runner, "begin", False),
        (lambda core: core.runner, "begin", True),
        (lambda core: core.scheduler.cache.swapping, "allocate", False),
        (lambda core: core.scheduler.cache.swapping, "allocate", True),
        (lambda core: core.scheduler.rows, "append", False),
        (lambda core: core.scheduler.rows, "append", True),
    ]:
        llm.reset_prefix_cache()
        with raising(owner(llm._manager.engine.core), name, 6, RuntimeError("planted"), ran):
            outputs = llm.generate(inputs, params)
            ends = {(o.finish_reason, o.error) for o in outputs}
            assert ends == {("error", "RuntimeError: planted")}, (name, ran)
            assert all(o.token_ids == w[: len(o.token_ids)] for o, w in zip(outputs, whole, strict=True))
        assert is_idle(llm) and not llm._manager.delivery.groups, (name, ran, llm.stats())
        llm._manager.engine.core.scheduler.check_invariants()
        assert tokens_of(llm.generate(inputs, params)) == whole
    assert any(record.levelname == "ERROR" for record in caplog.records)


def interrupting(steps: int, done: threading.Event | None = None) -> Callable[[Any, Any], Any]:
    """A logits processor that sends Ctrl-C to the main thread in a step, and another one as it then waits for `done`."""
    calls = iter(range(10**6))

    def process(ids: Any, scores: Any) -> Any:
        if next(calls) == steps:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if done is not None:
                wait_until(lambda: interrupted, "the first interrupt")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                assert done.wait(60)
        return scores

    interrupted: list[int] = []
    process.interrupted = interrupted
    return process


def test_an_interrupt_is_raised_in_the_wait_and_ends_its_requests_alone(saved, load):
    """The engine's thread finishes its step; what others wait for goes on."""
    llm, others = load(saved), list[Any]()
    expected = llm.generate([[9]], up_to(60))[0].token_ids
    for steps in (0, 3):
        params = up_to(300, logits_processors=[interrupting(steps)])
        thread = threading.Thread(target=lambda: others.extend(llm.generate([[9]], up_to(60))))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], params) if steps else list(llm.stream([[5], [6]], params))
        thread.join()
        assert others.pop().token_ids == expected
        assert is_idle(llm) and not llm._manager.delivery.groups
        llm._manager.engine.core.scheduler.check_invariants()
    assert llm.generate([[9]], up_to(60))[0].token_ids == expected


def test_a_second_interrupt_leaves_a_step_that_hangs(saved, load, caplog):
    llm, goes_on = load(saved), threading.Event()
    process = interrupting(2, goes_on)
    stream = llm.stream([[5]], up_to(300, logits_processors=[process]))
    cancel = llm._engine_thread.cancel
    llm._engine_thread.cancel = lambda call: (cancel(call), process.interrupted.append(1))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert "the requests end when it is over; if it hangs, end the process" in caplog.text
    goes_on.set()
    assert llm.generate([[9]], up_to(5))[0].finish_reason == "length"
    assert is_idle(llm)


def test_a_stream_that_is_not_read_stands_still(llm):
    stream = llm.stream([[5]], up_to(300))
    next(stream)
    steps = llm.stats()["steps"]
    assert llm.explain() == [] and llm.stats()["steps"] == steps, "the engine's thread has had turns"
    assert len(next(stream).token_ids) == 1 and llm.stats()["steps"] == steps + 1
    stream.close()


def test_a_processor_sees_the_context_variables_of_its_caller(llm):
    variable, seen = contextvars.ContextVar("variable", default="none"), list[str]()

    def process(ids: Any, scores: Any) -> Any:
        seen.append(variable.get())
        return scores

    for value in ("one", "other"):
        contextvars.copy_context().run(
            lambda value=value: (variable.set(value), llm.generate([[5]], up_to(2, logits_processors=[process])))
        )
    assert seen == ["one", "one", "other", "other"]


@pytest.mark.parametrize("stop", [None, "never"], ids=["text at the end", "text as it comes"])
def test_a_tokenizer_that_fails_ends_its_request_with_the_reason(saved, load, stop, caplog):
    """As slow tokenizers do for ids that the model has and they have not."""
    llm = load(saved)
    core, steps = llm._manager.engine.core, iter(range(300))
    step, core.step = core.step, lambda ahead: (next(steps), step(ahead))[1]  # raises where it would step for ever
    fourth = next(p for p in PROMPTS if plain(p)[3] not in plain(p)[:3])
    bad = plain(fourth)[3]
    others = [p for p in PROMPTS if bad not in plain(p)]
    tokenizer = llm._manager.engine.encoder.tokenizer
    decode = tokenizer.decode

    def broken(ids: Any, **how: Any) -> str:
        if bad in ids:
            raise IndexError("piece id is out of range")
        return decode(ids, **how)

    tokenizer.decode = broken
    outputs = llm.generate([fourth, *others], up_to(12, stop=stop))
    assert outputs[0].finish_reason == "error"
    assert "piece id is out of range" in outputs[0].error
    assert outputs[0].token_ids == plain(fourth)[: 4 if stop else 12]
    assert outputs[0].text == (decoded(plain(fourth)[:3]) if stop else "")
    assert tokens_of(outputs[1:]) == [plain(p) for p in others] != []
    assert [o.text for o in outputs[1:]] == [decoded(o.token_ids) for o in outputs[1:]]
    assert is_idle(llm) and not llm._manager.delivery.groups


def test_closing(saved):
    llm = LLM(saved, device="cpu", kv_memory=MIB, max_seqs=2)
    arena, model = llm._manager.engine.arena, weakref.ref(llm._manager.engine.core.runner.model)
    assert arena.mapped_bytes == llm.stats()["kv_bytes"] > 0.9 * MIB
    started, queued = llm.stream([[5, 6], [7]], up_to(200)), llm.stream([8], up_to(200))
    tokens = [next(started), next(started), next(started)]
    llm.close()
    assert arena.mapped_bytes == 0
    llm.close()
    rest = list(started)
    outputs = {c.index: c.output for c in rest if c.output}
    assert [outputs[i].finish_reason for i in (0, 1)] == ["aborted", "aborted"]
    whole = [t for c in [*tokens, *rest] if c.index == 0 for t in c.token_ids]
    assert whole == outputs[0].token_ids == plain((5, 6))[: len(whole)]
    assert outputs[0].text == decoded(whole)
    (last,) = queued
    assert (last.finish_reason, last.token_ids, last.output.timings.first_token_s) == ("aborted", [], None)
    for call in (
        lambda: llm.generate([5]), lambda: llm.stream([5]), lambda: llm.stats(), lambda: llm.tokenize("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
    ):  # fmt: skip
        with pytest.raises(EngineClosed, match="create a new one"):
            call()
    started.close()
    llm.close()
    assert model() is None, "the weights are still held"
    with pytest.raises(RequestRejected), LLM(saved, device="cpu", kv_memory=MIB) as llm:
        llm.generate([])
    with pytest.raises(EngineClosed):
        llm.generate([5])


def test_closing_ends_what_another_thread_waits_for(saved):
    llm = LLM(saved, device="cpu", kv_memory=MIB)
    begin, running = llm._manager.engine.core.runner.begin, threading.Event()
    got: list[Any] = []

    def told(plan: Any) -> Any:
        if plan.step_id == 5:
            running.set()
            wait_until(lambda: llm._engine_thread._inbox.qsize(), "the close to wait")
        return begin(plan)

    llm._manager.engine.core.runner.begin = told

    def close() -> None:
        assert running.wait(60)
        llm.close()

    run_threads(lambda: got.extend(llm.generate([[5, 6], [7]], up_to(40))), close)
    assert [o.finish_reason for o in got] == ["aborted", "aborted"]
    assert 5 <= len(got[0].token_ids) < 40
    assert got[0].token_ids == plain((5, 6), 40)[: len(got[0].token_ids)]


def test_impossible_starts_say_the_numbers_and_hold_nothing(saved, monkeypatch):
    made: list[weakref.ref[HostArena]] = []

    class Watched(HostArena):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, budget=lambda: 12_345, **options)
            made.append(weakref.ref(self))

    process = psutil.Process()
    LLM(saved, device="cpu", kv_memory=MIB).close()
    before = process.memory_info().rss
    no_pool = r"1\.00 KiB is no pool: the least is 2 blocks.* 8\.00 KiB; ask for 16,384 bytes"
    with pytest.raises(ConfigError, match=no_pool):
        LLM(saved, device="cpu", kv_memory="1KiB")
    total = psutil.virtual_memory().total
    with pytest.raises(NotEnoughMemory, match=r"KV pool .* on cpu.*asked for .* are free; .*at most") as caught:
        LLM(saved, device="cpu", kv_memory=2 * total)
    assert 1.9 * total < caught.value.asked_bytes <= 2 * total
    assert 0 < caught.value.free_bytes < total
    monkeypatch.setattr(executor_module, "HostArena", Watched)  # memory is taken after the plan was made
    with pytest.raises(NotEnoughMemory, match=r"12,345 bytes\) are free; another process took memory") as caught:
        LLM(saved, device="cpu", kv_memory="64MiB")
    assert caught.value.asked_bytes == pytest.approx(64 * MIB, rel=0.05)
    del caught
    gc.collect()
    assert len(made) == 1 and made[0]() is None
    assert process.memory_info().rss - before < 8 * MIB
    monkeypatch.undo()
    with LLM(saved, device="cpu", kv_memory=MIB) as llm:
        assert tokens_of(llm.generate([5], up_to(3))) == [plain((5,))[:3]]


def test_the_plan_is_what_the_start_takes(saved, load):
    """`pagetide plan` against a real engine: bytes counted from its tensors, and sequences that really run together."""
    small = {"block_size": 4, "dtype": "bfloat16"}
    for options in ({"kv_memory": "2MiB"}, {"kv_memory": MIB, **small}, {"kv_memory": "auto"}):
        plan = plan_only(EngineConfig.resolve(saved, device="cpu", **options), context=480)
        llm = load(saved, max_step_tokens=20_000, **options)
        stats, engine = llm.stats(), llm._manager.engine
        weights = sum(p.numel() * p.element_size() for p in engine.core.runner.model.parameters())
        assert plan.weights_bytes == pytest.approx(weights, rel=0.05)
        assert plan.kv_bytes == pytest.approx(engine.arena.num_extents * engine.arena.extent_bytes, rel=0.05)
        assert engine.arena.mapped_bytes == plan.min_kv_bytes
        assert plan.kv_bytes_per_token == stats["kv_bytes_per_token"]
        pool = engine.core.scheduler.cache.pool
        assert plan.tokens_that_fit == pytest.approx(pool.capacity * plan.block_size, rel=0.05)
        assert plan.tokens_that_fit * plan.kv_bytes_per_token == pytest.approx(plan.kv_bytes, rel=0.05)
        if options["kv_memory"] == "auto":
            continue
        fit = plan.sequences_that_fit
        chunks = llm.stream([[5 + i % 99] * 470 for i in range(fit + 2)], up_to(10))
        next(chunks)
        assert llm.stats()["running"] == pytest.approx(fit, rel=0.05)
        assert {c.finish_reason for c in chunks} == {None, "length"}
        assert llm.stats()["preemptions"] == 0


def test_progress_bar(llm, monkeypatch, capfd):
    """On a terminal when the work is long; elsewhere only when asked for."""
    llm.generate([[5], [6]], up_to(3))
    assert capfd.readouterr() == ("", "")
    llm.generate([[5], [6]], up_to(3), progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "generating" in err and "0/2" in err

    def shown(is_terminal: bool, delay_s: float, progress: bool | None) -> bool:
        file = io.StringIO()
        file.isatty = lambda: is_terminal
        monkeypatch.setattr(llm_module, "_UNSET_PROGRESS_DELAY_S", delay_s)
        monkeypatch.setattr(sys, "stderr", file)
        llm.generate([[5], [6]], up_to(3), progress=progress)
        return "generating" in file.getvalue()

    assert shown(True, 0, None)
    assert not shown(True, 1000, None)
    assert not shown(True, 0, False)
    assert not shown(False, 0, None)
    assert shown(False, 1000, True)
    monkeypatch.undo()
    assert capfd.readouterr() == ("", "")


def test_a_script_asks_once_by_a_function(folder: Path) -> None:
    one, several = pagetide.generate(folder, TEXT, 5, "cpu"), pagetide.generate(folder, [TEXT, "x"], 5, "cpu", seed=1)
    assert (one, several) == (decoded(plain(ids_of(TEXT), 5)), [decoded(plain(ids_of(text), 5)) for text in (TEXT, "x")])

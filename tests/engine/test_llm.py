"""`LLM` as a program uses it: a tiny Llama with a tokenizer, saved to files, against transformers' own `generate`."""

from __future__ import annotations

import functools
import gc
import io
import json
import logging
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from families import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import is_progress_bar_enabled

import pagetide.engine.executor as executor_module
import pagetide.engine.llm as llm_module
from pagetide import LLM, SamplingParams
from pagetide.allocator.host_arena import HostArena
from pagetide.engine.build import plan_only
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError, EngineClosed, NotEnoughMemory
from pagetide.engine.requests.states import RequestState
from pagetide.scheduler.errors import PromptTooLong, RequestRejected

VOCAB = 320  # more than the tokenizer has, as in many real models
BOS, EOS = 0, 1
TEXT = "the tide comes in and the tide goes out; pages follow it"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MIB = 1 << 20


# -- models, and what they should say ----------------------------------------------------------------------------------


def byte_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE; puts BOS before a text unless told not to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
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


def random_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, int(n)).tolist() for n in rng.integers(1, longest, count)]


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


# -- prompts -----------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Any, list[Any]]] = {
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
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_prompt(llm, form):
    given, expected = FORMS[form]
    outputs = llm.generate(given, up_to(12))
    assert [o.prompt for o in outputs] == [p if isinstance(p, str) else None for p in expected]
    assert [tuple(o.prompt_token_ids) for o in outputs] == [ids_of(p) for p in expected]
    assert tokens_of(outputs) == [plain(ids_of(p)) for p in expected]
    assert [o.text for o in outputs] == [decoded(o.token_ids) for o in outputs]
    assert {(o.finish_reason, o.error, o.num_preemptions) for o in outputs} == {("length", None, 0)}
    assert len({o.request_id for o in outputs}) == len(outputs)
    assert all(0 <= o.timings.queued_s <= o.timings.first_token_s <= o.timings.total_s for o in outputs)


def test_many_prompts_in_order_out_of_a_pool_too_small(saved, load):
    """Ragged prompts, seats and blocks for a few of them, chunks: each gets what transformers gives it alone."""
    llm = load(saved, kv_memory=21 * 4 * 512, block_size=4, max_seqs=9, max_step_tokens=40, max_model_len=78)
    first = plain((5,), 1)
    short = llm.generate([[5]] * 400, up_to(77, stop_token_ids=first))  # so that it expects outputs to be short
    assert tokens_of(short) == [first] * 400
    assert {o.finish_reason for o in short} == {"stop"}
    prompts = random_prompts(24, longest=40)
    outputs = llm.generate(prompts, [up_to(5 + i % 20) for i in range(24)])
    assert tokens_of(outputs) == [plain(tuple(p), 5 + i % 20) for i, p in enumerate(prompts)]
    assert [o.prompt_token_ids for o in outputs] == prompts
    stats = llm.stats()
    assert stats["preemptions"] == sum(o.num_preemptions for o in outputs) > 0
    assert stats["recomputed_tokens"] > 0
    assert stats["blocks"]["usable"] * 0.8 < stats["peak_used_blocks"] <= stats["blocks"]["usable"]
    assert is_idle(llm)


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
    assert tokens_of(llm.generate([5])) == [plain((5,), 256)]
    (output,) = load(saved, max_model_len=20).generate([5, 6])
    assert (output.token_ids, output.finish_reason) == (plain((5, 6), 18), "length")


def test_special_tokens_only_where_wanted(llm):
    bare = TOKENIZER.encode("tide", add_special_tokens=False)
    assert llm.tokenize("tide") == [BOS, *bare]
    assert llm.tokenize("tide", SamplingParams(add_special_tokens=False)) == bare
    outputs = llm.generate(["tide", "tide"], [up_to(5), up_to(5, add_special_tokens=False)])
    assert [o.prompt_token_ids for o in outputs] == [[BOS, *bare], bare]
    assert tokens_of(outputs) == [plain((BOS, *bare), 5), plain(tuple(bare), 5)]


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


# -- refused at the door -----------------------------------------------------------------------------------------------

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
    "a mapping without a prompt": ({"text": "the tide"}, "a prompt cannot have the key 'text'"),
    "half a character": ("the \ud83c", "surrogates not allowed"),
}
NO_PROMPTS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "no prompt was given"),
    "an empty array": (np.array([], np.int64), "no prompt was given"),
    "None": (None, "got NoneType"),
    "a number": (5, "got int"),
    "an array of no dimension": (np.array(5), "single number 5"),
    "bytes": (b"the tide", "got bytes"),
    "a mapping without a prompt": ({"text": "the tide"}, "a prompt cannot have the key 'text'"),
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
        for door in (llm.generate, llm.stream):
            with pytest.raises(RequestRejected, match=message):
                door(prompts)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": -5}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0"),
        ({"min_new_tokens": 4, "max_new_tokens": 3}, "min_new_tokens 4 is above max_new_tokens 3"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_p": float("nan")}, "top_p must be in"),
        ({"top_k": -2}, "top_k must be at least 0"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"min_p": 1.01}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be above 0"),
        ({"seed": 2**64}, "seed must be at most 18446744073709551615, got 18446744073709551616"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"stop": ""}, "stop must be non-empty strings"),
        ({"stop": ["a", ""]}, "stop must be non-empty strings"),
        ({"stop": [5]}, "stop must be non-empty strings"),
        ({"stop": 5}, "stop must be"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids must be an integer"),
        ({"stop_token_ids": 5}, "stop_token_ids must be"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_unknown_options_and_other_bad_arguments(llm, saved):
    before = llm.stats()
    for call in (
        lambda: SamplingParams(max_words=5),
        lambda: llm.generate("a", up_to(2), max_tokens=5),
        lambda: llm.stream("a", up_to(2), best_of=2),
        lambda: LLM(saved, gpu_memory_utilization=0.9),
    ):
        with pytest.raises(TypeError, match="has no argument"):
            call()
    for interval in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="stream_interval must be"):
            llm.stream("a", up_to(2), stream_interval=interval)
    for priority in ("high", None, float("nan"), 1.5):
        with pytest.raises(RequestRejected, match="priority must be an integer"):
            llm.generate(["a", "b"], up_to(2), priority=priority)
    with pytest.raises(RequestRejected, match=r"stop_token_ids \[320, 400\] are outside the vocabulary of 320"):
        llm.generate(["a", "b"], [up_to(2), up_to(2, stop_token_ids=[5, VOCAB, 400])])
    for options in ({"max_seqs": 0}, {"max_step_tokens": 0}, {"max_model_len": 513}, {"block_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            LLM(saved, **options)
    assert llm.stats() == before


def test_numbers_of_numpy_are_numbers(llm):
    """In parameters as in prompts."""
    given = SamplingParams(
        max_new_tokens=np.int64(9), temperature=np.float32(0.5), top_k=np.int32(7), seed=np.int64(5),
        stop_token_ids=np.array([300, 301]),
    )  # fmt: skip
    same = SamplingParams(max_new_tokens=9, temperature=0.5, top_k=7, seed=5, stop_token_ids=[300, 301])
    assert tokens_of(llm.generate("the tide", given)) == tokens_of(llm.generate("the tide", same))


# -- without a tokenizer, and conversations ----------------------------------------------------------------------------


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
        lambda: llm.generate("the tide"),
        lambda: llm.generate([[5], "the tide"]),
        lambda: llm.generate([5], SamplingParams(stop="x")),
        lambda: llm.stream(""),
        lambda: llm.tokenize("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RequestRejected, match="tokenizer"):
            refused()
    assert llm.stats() == before


def test_chat_by_the_tokenizers_template(folder, load):
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
    for bad in (
        "hi",
        None,
        5,
        {"role": "user", "content": "x"},
        [],
        [[]],
        ["hi"],
        [5],
        [None],
        [ask, "hi"],
        [ask, [5]],
    ):
        with pytest.raises(RequestRejected):
            llm.chat(bad)
    with pytest.raises(RequestRejected, match="2 prompts, but 1 sampling_params"):
        llm.chat([ask, other], [up_to(2)])
    assert llm.stats() == before


def test_chat_without_a_template_says_what_to_do(llm):
    with pytest.raises(RequestRejected, match=r"no chat template: use generate\(\).*chat_template"):
        llm.chat([{"role": "user", "content": "the tide"}])


# -- ends --------------------------------------------------------------------------------------------------------------

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
    assert [len(o.token_ids) for o in own.generate(PROMPTS)] == [9] * 4
    edit_json(folder / "generation_config.json", do_sample=False)
    assert tokens_of(load(folder).generate(PROMPTS)) == tokens_of(greedy)


def test_an_explicit_maximum_wins_over_the_models_minimum(folder, load):
    edit_json(folder / "generation_config.json", min_new_tokens=5)
    assert tokens_of(load(folder).generate(PROMPTS, up_to(3))) == [plain(p)[:3] for p in PROMPTS]


TIDE = "the tide turns; 潮汐 and so on"


@pytest.mark.parametrize(
    ("stop", "shown", "until"),
    [
        (";", "the tide turns", "the tide turns;"),
        ("turns; ", "the tide ", "the tide turns; "),
        (["turn", "tide t"], "the ", "the tide t"),  # the one that is complete first
        (["nothing", "so"], "the tide turns; 潮汐 and ", "the tide turns; 潮汐 and so"),
        ("汐", "the tide turns; 潮", "the tide turns; 潮汐"),
        ("the", "", "the"),
        ("on", "the tide turns; 潮汐 and so ", TIDE),  # with the last token
        ("only", TIDE, None),  # begins to come, and does not
        ("tides", TIDE, None),
    ],
)  # fmt: skip
def test_stop_strings(llm, stop, shown, until):
    script = byte_ids(TIDE)
    expected = (shown, script if until is None else byte_ids(until), "length" if until is None else "stop")
    same = [stop] if isinstance(stop, str) else tuple(stop)
    with scripted(llm, ([5], script), ([6], script), ([7], script)):
        params = [up_to(len(script), stop=stop), up_to(len(script)), up_to(len(script), stop=same)]
        got = [(o.text, o.token_ids, o.finish_reason) for o in llm.generate([[5], [6], [7]], params)]
        assert got == [expected, (TIDE, script, "length"), expected]
        for interval in (1, 4, 100):
            chunks = list(llm.stream([[5]], params[0], stream_interval=interval))
            assert "".join(c.text for c in chunks) == shown
            assert [t for c in chunks for t in c.token_ids] == expected[1]
            assert chunks[-1].finish_reason == expected[2]


def test_an_end_id_shows_no_text_and_a_stop_string_may_come_before_it(folder, load):
    edit_json(folder / "generation_config.json", eos_token_id=EOS)
    llm = load(folder)
    script = [*byte_ids("out; "), EOS, *byte_ids("more")]
    with scripted(llm, ([5], script), ([6], script), ([7], script)):
        outputs = llm.generate([[5], [6], [7]], [up_to(10), up_to(10, stop=";"), up_to(10, ignore_eos=True)])
    assert [(o.text, o.finish_reason) for o in outputs] == [("out; ", "stop"), ("out", "stop"), ("out; more", "length")]
    assert tokens_of(outputs) == [script[:6], script[:4], script]


# -- several continuations of a prompt ---------------------------------------------------------------------------------


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


def test_continuations_are_the_same_with_few_seats_and_blocks(saved, load):
    prompt = [(7 * i) % 300 + 5 for i in range(70)]
    roomy = load(saved).generate(prompt, drawn(1, n=6, new=40))[0]
    small = load(saved, max_seqs=4, kv_memory=15 * 8192)  # blocks of 16 tokens
    tight = small.generate(prompt, drawn(1, n=6, new=40))[0]
    assert [c.token_ids for c in tight.completions] == [c.token_ids for c in roomy.completions]
    assert small.stats()["forks"] == 5 < small.stats()["steps"]


def test_the_prompt_of_continuations_is_computed_once(saved, load):
    llm = load(saved, prefix_caching=False)
    llm.generate([[9] * 50], drawn(2, n=8, new=5))
    assert llm.stats()["computed_tokens"] == 50 + 4 + 7 * 5
    assert llm.stats()["blocks"]["live"] == 0


def test_each_continuation_has_its_own_end(llm):
    free = llm.generate("the tide", drawn(3, n=4, new=30))[0]
    stop = decoded(free.completions[2].token_ids)[8:11]
    output = llm.generate("the tide", drawn(3, n=4, new=30, stop=stop))[0]
    for before, after in zip(free.completions, output.completions, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
    assert is_idle(llm)


def test_continuations_stream_side_by_side(llm):
    prompts, params = ["the tide", [5, 6]], [drawn(3, n=3), drawn(3)]
    expected = llm.generate(prompts, params)
    chunks = list(llm.stream(prompts, params))
    for index, output in enumerate(expected):
        for number, completion in enumerate(output.completions):
            own = [c for c in chunks if (c.index, c.number) == (index, number)]
            assert [t for c in own for t in c.token_ids] == completion.token_ids
            assert "".join(c.text for c in own) == completion.text
            assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
            assert replace(own[-1].completion, timings=completion.timings) == completion
        last = [c for c in chunks if c.index == index and c.output]
        assert [len(c.output.completions) for c in last] == [len(output.completions)], "once, when all have ended"


def test_closing_a_stream_of_continuations_ends_all_of_them(llm):
    for steps in (0, 1, 5):
        chunks = llm.stream([[5] * 40], drawn(3, n=5, new=200))
        for _ in range(steps):
            next(chunks)
        chunks.close()
        assert is_idle(llm) and not llm._manager.delivery.groups


@pytest.mark.parametrize("n", [0, -1, 4097, 1.0, True, "2"])
def test_n_is_checked(n):
    with pytest.raises(ValueError, match="n must be"):
        SamplingParams(n=n)


@pytest.mark.parametrize("priority", [1001, -1001, 1.0, True, 10**400])
def test_priorities_are_checked(llm, priority):
    with pytest.raises(RequestRejected, match="priority must be an integer from -1000 to 1000"):
        llm.generate("the tide", priority=priority)


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 3, 50])
def test_chunks_say_what_the_output_says(llm, interval):
    prompts = ["the tide", [5, 6], "", [319]]
    params = [up_to(20), up_to(7), up_to(1), up_to(16, stop=decoded(plain((319,), 16))[-9:-5])]
    whole = llm.generate(prompts, params)
    chunks = list(llm.stream(prompts, params, stream_interval=interval))
    for index, output in enumerate(whole):
        own = [c for c in chunks if c.index == index]
        assert [t for c in own for t in c.token_ids] == output.token_ids
        assert "".join(c.text for c in own) == output.text
        assert all(len(c.token_ids) == interval for c in own[:-1])
        assert [c.output is not None for c in own] == [False] * (len(own) - 1) + [True]
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [output.finish_reason]
        last = own[-1].output
        same = replace(last.completions[0], timings=output.timings)
        assert replace(last, completions=(same,), request_id=output.request_id) == output
        assert last.timings.first_token_s <= last.timings.total_s
    if interval == 1:
        assert [c.index for c in chunks[:6]] == [0, 1, 2, 3, 0, 1], "they do not come side by side"


def test_a_stream_never_breaks_a_character(llm):
    text = "潮汐 🌊👩‍👩‍👧 naïve é\u0301 한국어!"
    script = byte_ids(text)
    with scripted(llm, ([5], script)):
        chunks = list(llm.stream([[5]], up_to(len(script))))
    assert [c.text for c in chunks if c.text] == list(text)
    assert len(chunks) == len(script)


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_stream_as_they_decode(llm, seed):
    """Whole, broken and cut-off characters: every chunk's text stays a part of what the tokenizer decodes in the end."""
    rng = np.random.default_rng(seed)
    pieces = [*byte_ids("🌊潮é a"), *range(2, 281), 300, BOS]
    script = rng.choice(pieces, 120).tolist()
    with scripted(llm, ([5], script)):
        chunks = list(llm.stream([[5]], up_to(120), stream_interval=int(rng.integers(1, 4))))
    assert "".join(c.text for c in chunks) == chunks[-1].output.text == decoded(script)


def test_closing_a_stream_gives_its_blocks_back(llm):
    aborts = llm.stream([[5, 6], [7, 8]], up_to(200))
    stays = llm.stream([9], up_to(12))
    for _ in range(7):
        next(aborts)
    assert llm.stats()["running"] == 3
    aborts.close()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (1, 0, 1)
    assert list(aborts) == []
    assert [t for c in stays for t in c.token_ids] == plain((9,))


def test_leaving_a_loop_over_a_stream_gives_its_blocks_back(llm):
    for chunk in llm.stream([[5, 6], [7]], up_to(200)):
        if chunk.index == 1:
            break
    gc.collect()
    assert is_idle(llm)

    def fails() -> None:
        for _ in llm.stream([[5, 6], [7]], up_to(200)):
            raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        fails()
    gc.collect()
    assert is_idle(llm)


def test_a_stream_that_nobody_reads_leaves_nothing_behind(saved, load):
    llm = load(saved)
    chunks = llm.stream([[5, 6], [7]], up_to(200))
    assert llm.stats()["waiting"] == 2
    del chunks
    gc.collect()
    assert llm.generate([9], up_to(12))[0].token_ids == plain((9,))
    assert is_idle(llm)
    closed = llm.stream([5], up_to(200))
    closed.close()
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
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the finaliser waits for a lock that its own thread holds"
    assert done[0].token_ids == plain((9,)) and done[1]


def test_generate_inside_a_loop_over_a_stream(llm):
    tokens = []
    for i, chunk in enumerate(llm.stream([5, 6], up_to(12))):
        tokens += chunk.token_ids
        if i in (2, 3):
            assert tokens_of(llm.generate([[7], "the tide"], up_to(3))) == [
                plain((7,))[:3],
                plain(ids_of("the tide"))[:3],
            ]
    assert tokens == plain((5, 6))


# -- seeds and order ---------------------------------------------------------------------------------------------------


def test_a_seed_is_a_promise(llm):
    prompts = [[5, 6, 7], *random_prompts(7, longest=30), [5, 6, 7], [5, 6, 7]]
    seeds = [*range(8), 0, 99]
    params = [up_to(15, temperature=1.1, top_k=60, seed=seed) for seed in seeds]
    alone = [tokens_of(llm.generate([p], one))[0] for p, one in zip(prompts, params, strict=True)]
    assert tokens_of(llm.generate(prompts, params)) == alone
    assert tokens_of(llm.generate(prompts[::-1], params[::-1])) == alone[::-1]
    streamed: dict[int, list[int]] = {}
    for chunk in llm.stream(prompts, params, stream_interval=4):
        streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
    assert [streamed[i] for i in range(10)] == alone
    assert alone[0] == alone[8], "the same request twice"
    assert alone[0] != alone[9], "another seed"
    assert len({tuple(t) for t in alone}) == 9
    drawn = [tokens_of(llm.generate([5], up_to(15, temperature=5.0)))[0] for _ in range(2)]
    assert drawn[0] != drawn[1], "no seed is a new one every time"


def test_a_lower_priority_number_goes_first(saved, load):
    llm = load(saved, max_seqs=1)
    begin, order = llm._manager.engine.core.runner.begin, []

    def watched(plan: Any) -> Any:
        order.extend(tuple(new.token_ids.tolist()) for new in plan.admitted)
        return begin(plan)

    llm._manager.engine.core.runner.begin = watched
    first = llm.stream([5], up_to(12))
    next(first)
    streams = [llm.stream([6], up_to(2), priority=5), llm.stream([[7], [8]], up_to(2), priority=-1)]
    streams.append(llm.stream([9], up_to(2)))
    for chunks in [*streams, first]:
        assert list(chunks)[-1].finish_reason == "length"
    assert order == [(5,), (7,), (8,), (9,), (6,)]


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
    prefixes = found | {"findable_blocks": 1, "max_cached_blocks": None}
    assert after == empty | {
        "steps": 5, "computed_tokens": 24, "prompt_tokens": 20, "generated_tokens": 5, "peak_used_blocks": 2,
        "step_tokens": empty["step_tokens"] | {"steps": [4, 0, 0, 1, *[0] * 10]},
        "blocks": empty["blocks"] | cached, "prefix_cache": prefixes,
    }  # fmt: skip
    told = json.loads(json.dumps(output.to_dict()))
    assert told["completions"][0]["token_ids"] == plain((5,) * 20)[:5]


def test_stats_wait_for_no_step(saved, load):
    llm = load(saved)
    inside, goes_on, begin = threading.Event(), threading.Event(), llm._manager.engine.core.runner.begin

    def slow(plan: Any) -> Any:
        if plan.step_id == 3:
            inside.set()
            assert goes_on.wait(60)
        return begin(plan)

    llm._manager.engine.core.runner.begin = slow
    got: list[Any] = []

    def look() -> None:
        assert inside.wait(60)
        during = llm.stats()
        assert not goes_on.is_set() and during["steps"] <= 3
        goes_on.set()

    run_threads(lambda: got.extend(llm.generate([5, 6], up_to(9))), look)
    assert got[0].token_ids == plain((5, 6), 9) and llm.stats()["running"] == 0


def test_prefixes_are_found_within_a_salt_and_until_they_are_reset(saved, load):
    llm = load(saved)
    prompt, before = list(range(5, 70)), 0

    def found(**salt) -> int:
        nonlocal before
        (output,) = llm.generate([prompt], up_to(3), **salt)
        assert output.token_ids == plain(tuple(prompt))[:3]
        before, hits = llm.stats()["prefix_cache"]["hit_tokens"], before
        return before - hits

    assert [found(), found(), found(cache_salt="a"), found(cache_salt="a"), found(cache_salt="b")] == [0, 64, 0, 64, 0]
    llm.reset_prefix_cache()
    assert [found(), found(cache_salt="a")] == [0, 0]
    with pytest.raises(RequestRejected, match="cache_salt must be a text"):
        llm.generate([prompt], up_to(3), cache_salt=b"a")


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


@pytest.mark.parametrize("elastic", [False, True])
def test_what_stays_cached_is_bounded(saved, load, elastic):
    """With 0 nothing stays, and requests that run together share all the same."""
    prompts = [list(range(5 + i, 70 + i)) for i in range(3)]
    memory = {"min": 256 << 10, "max": MIB} if elastic else MIB
    block_bytes = load(saved, share=False)._manager.engine.plan.geometry.block_stride
    for bound, blocks in ((f"{2 * block_bytes}", 2), (5 * block_bytes - 1, 4), (0, 0), ("0", 0), (1, 0)):
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
    shown = [
        repr(llm.config),
        str(llm.config),
        repr(llm),
        json.dumps(llm.stats()),
        repr(llm._manager.engine),
        caplog.text,
    ]
    assert not any(text in told for told in shown for text in (SECRET.decode(), SECRET.hex(), str(list(SECRET))))
    assert "prefix_hash_secret" not in repr(llm.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_hash_secret": SECRET.decode()}, "prefix_hash_secret must be bytes, got str; encode a text"),
        (
            {"prefix_hash_secret": b"short secret"},
            "prefix_hash_secret has 12 bytes, and can be guessed: .* at least 16",
        ),
        ({"prefix_hash_secret": b""}, "prefix_hash_secret has 0 bytes"),
        ({"prefix_hash_secret": SECRET, "prefix_caching": False}, "leave prefix_caching on, or prefix_hash_secret out"),
    ],
)
def test_secrets_that_are_none_are_refused_and_not_repeated(saved, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(saved, device="cpu", **options)
    assert "several workers" not in str(caught.value) and "short secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_memory": -1}, "at least 1 byte, got -1; or 0, or None for no bound"),
        ({"prefix_cache_memory": "many"}, "prefix_cache_memory: cannot read 'many'"),
        ({"prefix_cache_memory": True}, "prefix_cache_memory: cannot read True"),
        ({"prefix_cache_memory": False}, "prefix_cache_memory: cannot read False"),
        ({"prefix_cache_memory": 0, "prefix_caching": False}, "leave prefix_caching on, or prefix_cache_memory out"),
    ],
)
def test_bounds_of_the_prefix_cache_that_cannot_be(saved, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(saved, device="cpu", **options)


def test_without_prefix_caching_nothing_is_kept(saved, load):
    llm = load(saved, prefix_caching=False)
    for _ in range(2):
        (output,) = llm.generate([list(range(5, 70))], up_to(3))
        assert output.num_cached_tokens == 0
    stats = llm.stats()
    assert stats["prefix_cache"] is None and stats["blocks"]["cached"] == 0
    assert stats["computed_tokens"] == 2 * 67
    with pytest.raises(ConfigError, match="prefix_caching must be True or False"):
        load(saved, prefix_caching="yes")


# -- threads and interrupts --------------------------------------------------------------------------------------------


def run_threads(*targets: Callable[[], None]) -> None:
    """Run all at once; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def test_threads_share_an_engine(saved, load):
    llm = load(saved, kv_memory=40 * 8192, max_seqs=6)
    before = set(threading.enumerate())
    work = [
        (random_prompts(5, seed=i), [up_to(8 + j, temperature=float(i % 2), seed=j, stop="qq") for j in range(5)])
        for i in range(4)
    ]
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


@pytest.fixture
def _often_another_thread() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often_another_thread")
def test_an_engine_is_loaded_while_another_works(saved, load):
    """Loading changes torch's default type for a while, and probing transformers' registries: who runs must not see it."""
    llm = load(saved)
    prompts = random_prompts(6)
    expected = [plain(tuple(p), 40) for p in prompts]

    def works() -> None:
        for _ in range(2):
            assert tokens_of(llm.generate(prompts, up_to(40))) == expected

    def loads() -> None:
        for _ in range(4):
            with LLM(saved, device="cpu", kv_memory=MIB, dtype="bfloat16") as other:
                assert [len(t) for t in tokens_of(other.generate(prompts[:2], up_to(5)))] == [5, 5]

    run_threads(works, loads)


@pytest.mark.usefixtures("_often_another_thread")
def test_engines_are_loaded_at_the_same_time(saved, capfd):
    logger, expected = logging.getLogger("transformers"), plain((5, 6))[:3]

    def settings() -> tuple[Any, ...]:
        return torch.get_default_dtype(), logger.handlers[:], logger.propagate, is_progress_bar_enabled()

    def loads(dtype: str) -> None:
        for _ in range(4):
            with LLM(saved, device="cpu", kv_memory=MIB, dtype=dtype) as llm:
                (output,) = llm.generate([5, 6], up_to(3))
                assert dtype != "float32" or output.token_ids == expected

    before = settings()
    try:
        run_threads(*(functools.partial(loads, dtype) for dtype in ("float32", "bfloat16", "float32")))
        assert settings() == before
        assert capfd.readouterr() == ("", "")
    finally:  # the other tests are not to suffer
        torch.set_default_dtype(before[0])
        logger.handlers[:], logger.propagate = before[1], before[2]


def test_two_engines_in_one_process(folder, saved, load):
    tiny("llama", vocab_size=VOCAB, seed=7).save_pretrained(folder)
    one, two = load(saved), load(folder, block_size=4, dtype="float32")
    expected = tokens_of(two.generate(PROMPTS, up_to(12)))
    assert expected != [plain(p) for p in PROMPTS]
    mixed = zip(one.stream(PROMPTS, up_to(12)), two.stream(PROMPTS, up_to(12)), strict=True)
    pairs = list(mixed)
    for which, right in enumerate(([plain(p) for p in PROMPTS], expected)):
        for i in range(4):
            assert [t for pair in pairs if pair[which].index == i for t in pair[which].token_ids] == right[i]
    two.close()
    assert tokens_of(one.generate(PROMPTS, up_to(12))) == [plain(p) for p in PROMPTS]


def raise_at(owner: Any, name: str, call: int, error: BaseException, ran: bool = False) -> None:
    """Let the method raise in its call number `call`, before it does its work or after."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def raising(*arguments: Any) -> Any:
        now = next(calls) == call
        result = None if now and not ran else method(*arguments)
        if now:
            raise error
        return result

    setattr(owner, name, raising)


PLACES: dict[str, Callable[[Any], tuple[Any, str, bool]]] = {
    "before the step runs": lambda core: (core.runner, "begin", False),
    "after the step ran": lambda core: (core.runner, "begin", True),
    "before blocks are taken": lambda core: (core.scheduler.cache, "_allocate", False),
    "after blocks were taken": lambda core: (core.scheduler.cache, "_allocate", True),
    "before tokens are taken in": lambda core: (core.scheduler.rows, "append", False),
    "after tokens were taken in": lambda core: (core.scheduler.rows, "append", True),
}


@pytest.mark.parametrize("call", [0, 1, 6])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_leaves_a_usable_engine(saved, load, place, call):
    llm = load(saved, max_step_tokens=16)
    core = llm._manager.engine.core
    owner, name, ran = PLACES[place](core)
    raise_at(owner, name, call, KeyboardInterrupt(), ran)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(random_prompts(8), up_to(20, temperature=1.0, repetition_penalty=1.5, min_new_tokens=3))
    assert is_idle(llm), llm.stats()
    core.scheduler.check_invariants()
    assert tokens_of(llm.generate(PROMPTS, up_to(12))) == [plain(p) for p in PROMPTS]
    assert is_idle(llm) and not llm._manager.delivery.groups


@pytest.mark.parametrize("place", ["before the step runs", "before tokens are taken in"])
def test_an_interrupt_is_no_error_to_be_logged(saved, load, place, caplog):
    """Whoever presses Ctrl-C knows: no traceback on standard error."""
    llm = load(saved)
    owner, name, ran = PLACES[place](llm._manager.engine.core)
    raise_at(owner, name, 1, KeyboardInterrupt(), ran)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, up_to(12))
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_engines_own_ends_requests_with_the_reason(saved, load, place, caplog):
    llm = load(saved)
    core = llm._manager.engine.core
    owner, name, ran = PLACES[place](core)
    raise_at(owner, name, 6, RuntimeError("planted"), ran)
    outputs = llm.generate(PROMPTS * 2, up_to(12))
    assert {(o.finish_reason, o.error) for o in outputs} == {("error", "RuntimeError: planted")}
    for output, prompt in zip(outputs, PROMPTS * 2, strict=True):
        assert output.token_ids == plain(prompt)[: len(output.token_ids)]
    core.scheduler.check_invariants()
    assert tokens_of(llm.generate(PROMPTS, up_to(12))) == [plain(p) for p in PROMPTS]
    assert is_idle(llm) and not llm._manager.delivery.groups


def test_an_interrupt_ends_who_was_in_the_step_and_no_other(saved, load):
    llm = load(saved, max_seqs=2)
    chunks = llm.stream([5, 6], up_to(12))
    later = llm.stream([[7], [8]], up_to(12))
    tokens = next(chunks).token_ids
    raise_at(llm._manager.engine.core.runner, "begin", 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([9], up_to(5))
    last = list(chunks)[-1].output
    assert (last.finish_reason, last.error) == ("error", "KeyboardInterrupt: ")
    assert last.token_ids == tokens == plain((5, 6))[:1]
    outputs = [c.output for c in later if c.output]
    assert [o.finish_reason for o in outputs] == ["error", "length"]
    assert outputs[1].token_ids == plain((8,))
    assert is_idle(llm)


def test_an_interrupt_between_an_end_and_who_waits_for_it_leaves_nobody_waiting(saved, load, monkeypatch):
    llm = load(saved)
    finish, broken = RequestState.finish, iter([True, False])

    def interrupted(state: Any, *how: Any) -> None:
        if next(broken, False):
            raise KeyboardInterrupt
        finish(state, *how)

    monkeypatch.setattr(RequestState, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], up_to(3))
    assert is_idle(llm)
    stream = llm.stream([5], up_to(3))
    next(stream)
    broken = iter([True])
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert llm.generate([7], up_to(4))[0].token_ids == plain((7,))[:4]
    assert is_idle(llm)


def break_decoding(llm: LLM, token: int, error: BaseException) -> Callable[[], None]:
    """From now on decoding `token` raises. Returns what ends that."""
    tokenizer = llm._manager.engine.encoder.tokenizer
    decode = tokenizer.decode

    def broken(ids: Any, **how: Any) -> str:
        if token in ids:
            raise error
        return decode(ids, **how)

    tokenizer.decode = broken
    return functools.partial(setattr, tokenizer, "decode", decode)


def limit_steps(llm: LLM, most: int = 300) -> None:
    """Let the engine raise where it would step for ever."""
    step, steps = llm._manager.engine.core.step, iter(range(most))
    llm._manager.engine.core.step = lambda: (next(steps), step())[1]


@pytest.mark.parametrize("stop", [None, "never"], ids=["text at the end", "text as it comes"])
def test_a_tokenizer_that_fails_ends_its_request_with_the_reason(saved, load, stop, caplog):
    """As slow tokenizers do for ids that the model has and they have not."""
    llm = load(saved)
    limit_steps(llm)
    fourth = next(p for p in PROMPTS if plain(p)[3] not in plain(p)[:3])
    bad = plain(fourth)[3]
    others = [p for p in PROMPTS if bad not in plain(p)]
    break_decoding(llm, bad, IndexError("piece id is out of range"))
    outputs = llm.generate([fourth, *others], up_to(12, stop=stop))
    assert outputs[0].finish_reason == "error"
    assert "piece id is out of range" in outputs[0].error
    assert outputs[0].token_ids == plain(fourth)[: 4 if stop else 12]
    assert outputs[0].text == (decoded(plain(fourth)[:3]) if stop else "")
    assert tokens_of(outputs[1:]) == [plain(p) for p in others] != []
    assert [o.text for o in outputs[1:]] == [decoded(o.token_ids) for o in outputs[1:]]
    assert is_idle(llm) and not llm._manager.delivery.groups


def test_an_interrupt_while_text_is_made_leaves_a_usable_engine(saved, load):
    """Between a step and the delivery of all its tokens: who ended in this step must not be waited for for ever."""
    llm = load(saved)
    limit_steps(llm)
    fourth = next(p for p in PROMPTS if plain(p)[3] not in plain(p)[:3])
    bad = plain(fourth)[3]
    others = [p for p in PROMPTS if bad not in plain(p)]
    other = llm.stream(others, up_to(4))  # they end in the step whose delivery is interrupted
    heal = break_decoding(llm, bad, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([fourth], up_to(12, stop="never"))
    heal()
    ended = [c.output for c in other if c.output]
    assert [len(o.token_ids) for o in ended] == [4] * len(others)
    assert tokens_of(llm.generate(PROMPTS, up_to(12))) == [plain(p) for p in PROMPTS]
    assert is_idle(llm) and not llm._manager.delivery.groups


def test_a_model_that_fails_ends_its_request_with_the_reason(saved, load, caplog):
    llm = load(saved)
    runner = llm._manager.engine.core.runner
    model = runner.model

    def broken(**inputs: Any) -> Any:
        if (inputs["input_ids"] == 319).any():
            raise RuntimeError("a bad token")
        return model(**inputs)

    runner.model = broken
    outputs = llm.generate([[5, 6], [319, 7], [7]], up_to(12, stop="never"))
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert (outputs[1].error, outputs[1].token_ids, outputs[1].text) == ("RuntimeError: a bad token", [], "")
    assert outputs[1].timings.first_token_s is None
    assert [outputs[0].token_ids, outputs[2].token_ids] == [plain((5, 6)), plain((7,))]
    assert is_idle(llm)


# -- closing and memory ------------------------------------------------------------------------------------------------


def test_closing(saved):
    llm = LLM(saved, device="cpu", kv_memory=MIB, max_seqs=2)
    arena = llm._manager.engine.arena
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
        with pytest.raises(EngineClosed, match="make a new one"):
            call()
    started.close()
    llm.close()


def test_as_a_context_manager(saved):
    llm = LLM(saved, device="cpu", kv_memory=MIB)
    arena, model = llm._manager.engine.arena, weakref.ref(llm._manager.engine.core.runner.model)
    with pytest.raises(RequestRejected), llm:
        llm.generate([])
    assert arena.mapped_bytes == 0
    assert model() is None, "the weights are still held"
    with pytest.raises(EngineClosed):
        llm.generate([5])


def test_closing_ends_what_another_thread_waits_for(saved):
    llm = LLM(saved, device="cpu", kv_memory=MIB)
    begin, running = llm._manager.engine.core.runner.begin, threading.Event()
    got: list[Any] = []

    def told(plan: Any) -> Any:
        if plan.step_id == 5:
            running.set()
        return begin(plan)

    llm._manager.engine.core.runner.begin = told

    def close() -> None:
        running.wait(30)
        llm.close()

    run_threads(lambda: got.extend(llm.generate([[5, 6], [7]], up_to(480))), close)
    assert [o.finish_reason for o in got] == ["aborted", "aborted"]
    assert 5 <= len(got[0].token_ids) < 480
    assert got[0].token_ids == plain((5, 6), 480)[: len(got[0].token_ids)]


def test_impossible_starts_say_the_numbers_and_hold_nothing(saved, monkeypatch):
    made: list[weakref.ref[HostArena]] = []

    class Watched(HostArena):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, budget=lambda: 12_345, **options)
            made.append(weakref.ref(self))

    process = psutil.Process()
    LLM(saved, device="cpu", kv_memory=MIB).close()
    before = process.memory_info().rss
    with pytest.raises(
        ConfigError, match=r"1\.00 KiB is no pool: the least is 2 blocks.* 8\.00 KiB; ask for 16,384 bytes"
    ):
        LLM(saved, device="cpu", kv_memory="1KiB")
    total = psutil.virtual_memory().total
    with pytest.raises(NotEnoughMemory, match=r"KV pool .* on cpu.*asked for .* are free; .*at most") as caught:
        LLM(saved, device="cpu", kv_memory=2 * total)
    assert 1.9 * total < caught.value.asked_bytes <= 2 * total
    assert 0 < caught.value.free_bytes < total
    monkeypatch.setattr(
        executor_module, "HostArena", Watched
    )  # another process takes the memory after the plan was made
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


def test_memory_stays_where_it_is(saved, load):
    """RSS over 20 runs, and over 10 engines built and closed."""
    rss = psutil.Process().memory_info
    llm = load(saved, kv_memory=30 * 8192)
    prompts = random_prompts(12)
    params = [up_to(10, temperature=float(i % 2), repetition_penalty=1.1, stop=["never", "ever"]) for i in range(12)]

    def run() -> None:
        llm.generate(prompts, params)
        chunks = llm.stream(prompts, params, stream_interval=2)
        for _ in range(9):
            next(chunks)
        chunks.close()

    for _ in range(3):
        run()
    gc.collect()
    before = rss().rss
    for _ in range(20):
        run()
    gc.collect()
    assert (rss().rss - before) / 20 <= MIB
    assert is_idle(llm)

    def build() -> None:
        with LLM(saved, device="cpu", kv_memory="32MiB") as other:
            other.generate([5, 6], up_to(2))

    build()
    before = rss().rss
    for _ in range(10):
        build()
    assert (rss().rss - before) / 10 <= MIB


def test_the_plan_is_what_the_start_takes(saved, load):
    """`pagetide plan` against a real engine: bytes counted from its tensors, and sequences that really run together."""
    small = {"block_size": 4, "dtype": "bfloat16"}
    for options in ({"kv_memory": "4MiB"}, {"kv_memory": 3 * MIB, **small}, {"kv_memory": "auto"}):
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


# -- manners -----------------------------------------------------------------------------------------------------------

MANNERS = """
import json, logging, sys, threading
import torch
def settings():
    return [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), str(torch.get_default_device()), torch.initial_seed(),
            torch.get_rng_state().tolist(), torch.backends.mkldnn.enabled, torch.backends.cuda.matmul.allow_tf32]
torch.manual_seed(5)
before = settings()
import pagetide
from pagetide import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", kv_memory="1MiB") as llm:
    outputs = llm.generate(["the tide", [5, 6]], SamplingParams(max_new_tokens=5, temperature=1.0, seed=1))
    list(llm.stream("the tide", SamplingParams(max_new_tokens=5)))
    logger = logging.getLogger("pagetide")
    report = {
        "same": settings() == before,
        "tokens": [o.token_ids for o in outputs],
        "handlers": [len(logging.getLogger().handlers), len(logger.handlers), logger.level],
    }
report["threads"] = [type(thread).__name__ for thread in threading.enumerate()]
open(sys.argv[2], "w").write(json.dumps(report))
"""


def test_a_guest_in_another_program(saved, tmp_path, llm):
    """In a fresh process: nothing printed, no torch setting and no random state changed, no log handler, no thread left."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-P", "-c", MANNERS, str(saved), str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    expected = tokens_of(llm.generate(["the tide", [5, 6]], up_to(5, temperature=1.0, seed=1)))
    assert json.loads(file.read_text()) == {
        "same": True, "tokens": expected, "handlers": [0, 0, 0], "threads": ["_MainThread"],
    }  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar(llm, monkeypatch, capfd):
    """On a terminal when the work is long; elsewhere only when asked for."""
    llm.generate([[5], [6]], up_to(3))
    assert capfd.readouterr() == ("", "")
    llm.generate([[5], [6]], up_to(3), progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "generating" in err and "0/2" in err

    def shown(file: io.StringIO, delay_s: float, progress: bool | None) -> bool:
        monkeypatch.setattr(llm_module, "_UNSET_PROGRESS_DELAY_S", delay_s)
        monkeypatch.setattr(sys, "stderr", file)
        llm.generate([[5], [6]], up_to(3), progress=progress)
        return "generating" in file.getvalue()

    assert shown(Terminal(), 0, None)
    assert not shown(Terminal(), 1000, None)
    assert not shown(Terminal(), 0, False)
    assert not shown(io.StringIO(), 0, None)
    assert shown(io.StringIO(), 1000, True)
    monkeypatch.undo()
    assert capfd.readouterr() == ("", "")

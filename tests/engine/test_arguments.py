"""Calls of LLM and AsyncLLM as users of vLLM and transformers write them."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pagetide
from pagetide import LLM, AsyncLLM, RequestOutput, RequestRejected, SamplingParams
from pagetide.api.arguments import Row, UnknownArgument, rows
from pagetide.engine.config import EngineArguments
from pagetide.engine.loading.models import check_dtype
from pagetide.engine.requests.outputs import Completion, Timings, refused

METHODS = ("generate", "chat", "stream", "stream_chat", "generate_each")
CALLS: dict[str, Any] = {"LLM": LLM, "AsyncLLM": AsyncLLM} | {
    f"{api.__name__}.{name}": getattr(api, name) for api in (LLM, AsyncLLM) for name in METHODS
}
PROMPTS = ["Call me", "The sea was"]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def rows_of(call: str, *kinds: str) -> list[Row]:
    return [row for row in rows() if row.is_of(call) and row.kind in kinds]


@pytest.mark.parametrize("call", CALLS)
def test_every_name_of_the_table_is_answered(call: str) -> None:
    """Before anything is done: the calls get no engine."""
    for name in {name for row in rows_of(call, "error") for name in row.names}:
        with pytest.raises(UnknownArgument) as caught:
            CALLS[call](None, **{name: 1})
        answers = [row.answer for row in rows_of(call, "error") if name in row.names]
        assert str(caught.value) in [f"{call} has no argument {name!r}: {answer}" for answer in answers]


def test_names_that_are_the_same_are_parameters_of_one_of_their_calls() -> None:
    every = {name for call in CALLS.values() for name in inspect.signature(call).parameters}
    for call in CALLS:
        assert {name for row in rows_of(call, "same", "alias") for name in row.names} <= every


def test_methods_of_the_table_are_missing() -> None:
    for api in (LLM, AsyncLLM, RequestOutput, Completion):
        names = {name for row in rows_of(api.__name__, "method") for name in row.names}
        assert api in (LLM, AsyncLLM) or names == {"finished", "metrics", "stop_reason", "index"}
        own = {name for name in names if hasattr(api, name)}
        assert own == ({"sleep", "wake_up"} if api is AsyncLLM else set())  # which LLM lacks
        for name in names - own:
            with pytest.raises(AttributeError, match=f"no attribute '{name}': (write|not)"):
                getattr(object.__new__(api), name)


def test_the_arguments_of_async_llm_are_those_of_llm() -> None:
    given = inspect.signature(LLM).parameters
    assert given == inspect.signature(EngineArguments).parameters
    assert dict(inspect.signature(AsyncLLM).parameters).items() - given.items() == {
        ("max_waiting", inspect.Parameter("max_waiting", inspect.Parameter.KEYWORD_ONLY, default=1024, annotation="int"))
    }
    for name in given:
        assert f"\n        {name}: " in str(LLM.__doc__) and f"\n        {name}: " in str(AsyncLLM.__doc__)
    assert typing.get_type_hints(AsyncLLM.resume) == {"return": type(None)}


def complaint(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UnknownArgument) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_exact_answers() -> None:
    assert complaint(LLM, "demo", max_num_seqs=4) == "LLM has no argument 'max_num_seqs': write max_seqs"
    said = "write stop_token_ids=[...] (beside the model's own end ids, which need not be given; a pipeline takes eos_token_id)"
    assert complaint(SamplingParams, end_id=2) == f"SamplingParams has no argument 'end_id': {said}"
    assert complaint(pagetide.generate, "demo", "a", end_id=2).endswith(f"'end_id': {said}")
    for prompt, said in (([], "no prompt was given"), (None, "prompts must be strings or lists .*, got NoneType")):
        with pytest.raises(RequestRejected, match=said):
            pagetide.generate("no such model", prompt)  # type: ignore[arg-type]  # before anything is loaded
    assert complaint(LLM, "demo", batch_size=4).startswith("LLM has no argument 'batch_size': write max_seqs (a bound: ")
    assert complaint(LLM, "demo", kv_memry=4) == "LLM has no argument 'kv_memry': did you mean 'kv_memory'?"
    assert complaint(AsyncLLM, "demo", max_wait=4) == "AsyncLLM has no argument 'max_wait': did you mean 'max_waiting'?"
    assert complaint(LLM.generate, None, "a", max_new_tokens=5) == (
        "LLM.generate has no argument 'max_new_tokens': it is an argument of SamplingParams: write generate(prompts, "
        "SamplingParams(max_new_tokens=...))"
    )
    assert "it is an argument of SamplingParams" in complaint(LLM.chat, None, [], max_tokens=5)
    assert complaint(LLM.stream, None, "a", progress=True) == (
        "LLM.stream has no argument 'progress': it is an argument of LLM.generate"
    )
    assert complaint(LLM.generate, None, "a", GREEDY, True) == (
        "LLM.generate takes prompts, sampling_params by position; write the others by keyword: cache_salt=, priority=, "
        "progress=, use_tqdm="
    )
    said = complaint(AsyncLLM.generate, None, "a", GREEDY, request_id="7")  # at the call, not at an await
    assert said.startswith("AsyncLLM.generate has no argument 'request_id': leave it out: stream(prompts, params)")


def test_dtypes() -> None:
    given = ["half", "float", "bfloat16", torch.float16, torch.float32, torch.bfloat16]
    assert [check_dtype(one) for one in given] == ["float16", "float32", "bfloat16"] * 2


TEMPLATE = "{% for m in messages %}{{ m.content }}{% if loud %}!{% endif %}{% endfor %}"


def give_template(api: LLM | AsyncLLM) -> None:
    """The bundled model has no chat template."""
    assert api.tokenizer is not None
    api.tokenizer.chat_template = TEMPLATE


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype=torch.float32, kv_memory="16MiB", share=False) as llm:
        give_template(llm)
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_prompts_of_every_form(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    tokenizer: Any = llm.get_tokenizer()
    assert tokenizer is llm.tokenizer
    ids = tokenizer(PROMPTS)["input_ids"]
    tokenizer.pad_token_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padded = tokenizer([PROMPTS[0], PROMPTS[1] * 2], padding=True, return_tensors="pt")
    forms: list[Any] = [
        [{"prompt": text} for text in PROMPTS],
        [{"prompt_token_ids": one} for one in ids],
        [{"prompt": text, "prompt_token_ids": one, "cache_salt": "a"} for text, one in zip(PROMPTS, ids, strict=True)],
        tokenizer(PROMPTS),
        [tokenizer(PROMPTS[0]), tokenizer(PROMPTS[1], return_tensors="pt")],
    ]
    for form in forms:
        assert tokens(llm.generate(form, GREEDY, use_tqdm=False)) == tokens(expected)
    assert [output.prompt for output in llm.generate(forms[2], GREEDY)] == PROMPTS
    assert [output.prompt for output in llm.generate(forms[1], GREEDY)] == [None, None]
    assert tokens(list(llm.generate_each(forms[0], GREEDY))) == tokens(expected)
    assert [llm.tokenize(one) for one in forms[0]] == [output.prompt_token_ids for output in expected]
    assert not padded["attention_mask"].bool().all()
    assert llm.generate(padded, GREEDY)[0].prompt_token_ids == expected[0].prompt_token_ids
    assert tokens(llm.generate({"prompt": PROMPTS[0]}, GREEDY)) == tokens(expected[:1])
    mixed = llm.generate([{"prompt": PROMPTS[0]}, PROMPTS[1], [5, 6]], GREEDY)
    assert [output.prompt_token_ids for output in mixed] == [*(o.prompt_token_ids for o in expected), [5, 6]]


def test_the_salt_of_a_prompt_separates_it(llm: LLM) -> None:
    long = "The sea was calm, and the ship lay still upon it. " * 4

    def cached(prompt: Any, **options: Any) -> bool:
        return llm.generate(prompt, GREEDY, **options)[0].num_cached_tokens > 0

    salted = {"prompt": long, "cache_salt": "one"}
    assert [cached(salted), cached(salted), cached(long, cache_salt="one")] == [False, True, True]
    assert [cached({**salted, "cache_salt": "two"}), cached(long)] == [False, False]
    assert cached(salted, cache_salt="one")


def test_prompts_that_are_refused(llm: LLM) -> None:
    for prompt, said in (
        ({}, "needs `prompt` or `prompt_token_ids`"),
        ({"prompt": [1, 2]}, "`prompt` of a mapping must be a text, got list"),
        ({"prompt_token_ids": "abc"}, "`prompt_token_ids` of a mapping must be a list of token ids, got str"),
        ({"prompt": "a", "prompt_token_ids": "abc"}, "must be a list of token ids, got str; a text is its `prompt`"),
        ({"prompt": "a", "multi_modal_data": {}}, "cannot have the key 'multi_modal_data'; known are prompt,"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt must be a text"),
        ({"prompt": "a", "cache_salt": "b"}, "the prompt has another cache_salt than its call"),
        ({"input_ids": [[1, 2]], "pixel_values": [1]}, "cannot have the key 'pixel_values'"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask must have the shape of input_ids"),
        ({"input_ids": [[1], [2]], "attention_mask": [1]}, "attention_mask must have the shape of input_ids"),
        ([{"input_ids": [[1], [2]]}, "a"], "has 2 prompts, and one is needed here"),
        ([[]], "the prompt is empty: leave it out of the batch, or give a start_id"),
    ):
        with pytest.raises(RequestRejected, match=said):
            llm.generate(prompt, GREEDY, cache_salt="c")
    (output,) = llm.generate_each([{"prompt": "its text is kept", "nonsense": 1}], GREEDY)
    assert (output.prompt, output.text, output.finish_reason) == ("its text is kept", "", "error")
    assert "'nonsense'" in str(output.error)


def test_progress_by_either_name(llm: LLM) -> None:
    with pytest.raises(RequestRejected, match="progress is True and use_tqdm False: they mean the same"):
        llm.generate("a", GREEDY, progress=True, use_tqdm=False)
    with pytest.raises(RequestRejected, match="progress must be True, False or None, got 'yes'"):
        llm.generate("a", GREEDY, use_tqdm="yes")  # type: ignore[arg-type]


def test_the_bar_shows_the_rate_of_tokens(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Call me"] * 3, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=True)
    assert "tokens/s]" in capfd.readouterr().err


CHAT = [{"role": "user", "content": "Call me"}]


def test_chats_stream(llm: LLM) -> None:
    (plain,) = llm.chat(CHAT, GREEDY)
    stream = llm.stream_chat(CHAT, GREEDY, stream_interval=2)
    chunks = list(stream)
    assert [len(chunk.token_ids) for chunk in chunks] == [2, 2, 2]
    assert "".join(chunk.text for chunk in chunks) == plain.text
    assert chunks[-1].output is not None and chunks[-1].output.token_ids == plain.token_ids
    nested = llm.render(CHAT, chat_template_kwargs={"loud": True})
    assert nested == llm.render(CHAT, loud=True) != plain.prompt_token_ids
    with pytest.raises(RequestRejected, match="chat_template_kwargs must map names to values, got list"):
        llm.render(CHAT, chat_template_kwargs=["loud"])


def test_chats_stream_in_async_programs(llm: LLM) -> None:
    (plain,), expected = llm.chat(CHAT, GREEDY), llm.generate("Call me", GREEDY)

    async def use() -> AsyncLLM:
        async with AsyncLLM("demo", device="cpu", kv_memory="16MiB", share=False) as engine:
            give_template(engine)
            text = "".join([chunk.text async for chunk in engine.stream_chat(CHAT, GREEDY)])
            assert text == plain.text
            assert [o.token_ids for o in await engine.generate({"prompt": "Call me"}, GREEDY)] == tokens(expected)
            assert await engine.tokenize({"prompt": "Call me"}) == expected[0].prompt_token_ids
            assert await engine.get_tokenizer() is engine.tokenizer
            told = "AsyncLLM('demo', device='cpu', dtype='float32', KV pool 16.00 MiB, 0 running, 0 waiting)"
            assert repr(engine) == told
        return engine

    assert repr(asyncio.run(use())) == "AsyncLLM('demo', closed)"


def output_of(text: str | None, count: int, prompt: str | None = "p") -> RequestOutput:
    completion = Completion(text, list(range(count)), "length", Timings(0.1, 0.2))
    return RequestOutput("r1", prompt, [5, 6], (completion,))


def test_text_without_a_tokenizer() -> None:
    """A missing text is neither empty nor None."""
    output = output_of(None, 2)
    for one in (output, output.completions[0]):
        with pytest.raises(AttributeError, match="the model has no tokenizer: read token_ids"):
            _ = one.text
        assert getattr(one, "text", "none") == "none"
    assert output.completions[0].decoded is None and output.outputs is output.completions, "by vLLM's name"
    assert output.to_dict()["completions"][0]["text"] is None
    assert output_of("", 1).text == ""
    assert refused("p", "no", has_tokenizer=True).text == ""
    assert refused("p", "no", has_tokenizer=False).completions[0].decoded is None

"""Every API uses the one engine: the same prompt with the same seed gives the same tokens by each of them.

Those of `AsyncLLM` are compared in tests/engine/test_async_llm.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import pagetide
from pagetide import LLM, SamplingParams, StreamChunk
from pagetide.cli import main
from pagetide.engine import llm as llm_module

ENGINE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kv_memory": "16MiB", "max_seqs": 4, "max_chunk_tokens": 8, "share": False
}  # fmt: skip
PROMPTS = ["The prince looked at her and said", "It was", "To be or not to be, said the old man, and"]

ASKED: dict[str, SamplingParams] = {  # of each prompt
    "greedy": SamplingParams(max_new_tokens=8, temperature=0),
    "drawn": SamplingParams(max_new_tokens=8, temperature=0.9, top_k=40, top_p=0.95, seed=11),
    "drawn, with stop strings": SamplingParams(
        max_new_tokens=10, temperature=1.1, top_k=0, top_p=1.0, stop=["he", "\n"], seed=2**63
    ),
    "drawn, three of each": SamplingParams(max_new_tokens=6, temperature=0.8, top_k=50, top_p=0.95, n=3, seed=5),
    "beams": SamplingParams(max_new_tokens=6, temperature=0, num_beams=3, n=2, length_penalty=0.7),
    "biased and penalised": SamplingParams(
        max_new_tokens=8, temperature=0, repetition_penalty=1.3, bad_words_ids=[[263], [5, 6]], logit_bias={11: 2.0}
    ),
}


Tokens = list[list[list[int]]]  # of each continuation of each prompt


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, Tokens]:
    """What `LLM.generate` gives to each of `ASKED`, a prompt at a time."""
    return {
        name: [tokens_of(llm.generate(prompt, params, progress=False)[0]) for prompt in PROMPTS]
        for name, params in ASKED.items()
    }


def tokens_of(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.completions]


def put_together(chunks: Sequence[StreamChunk]) -> Tokens:
    """What the chunks of all prompts say, put together; and that their ends say the same."""
    found: dict[tuple[int, int], list[int]] = {}
    ends: dict[int, Any] = {}
    for chunk in chunks:
        found.setdefault((chunk.index, chunk.number), []).extend(chunk.token_ids)
        if chunk.output is not None:
            ends[chunk.index] = chunk.output
    tokens = [tokens_of(ends[index]) for index in range(len(PROMPTS))]
    assert found == {(i, n): ids for i, each in enumerate(tokens) for n, ids in enumerate(each)}
    return tokens


def test_the_work_shows_something(expected: dict[str, Tokens]) -> None:
    lengths = {len(ids) for each in expected["drawn, with stop strings"] for ids in each}
    assert len(lengths) > 1 and min(lengths) < 10  # some stop early
    assert len({tuple(ids) for ids in expected["drawn, three of each"][0]}) == 3
    distinct = {json.dumps(tokens) for name, tokens in expected.items() if "three" not in name and name != "beams"}
    assert len(distinct) == len(ASKED) - 2


@pytest.mark.parametrize("name", ASKED)
def test_generate_stream_and_generate_each(llm: LLM, expected: dict[str, Tokens], name: str) -> None:
    params = ASKED[name]
    assert [tokens_of(output) for output in llm.generate(PROMPTS, params)] == expected[name]
    assert put_together(list(llm.stream(PROMPTS, params, stream_interval=2))) == expected[name]
    assert [tokens_of(output) for output in llm.generate_each(iter(PROMPTS), params, look_ahead=2)] == expected[name]


def test_pipeline(llm: LLM, expected: dict[str, Tokens]) -> None:
    forms: Iterator[Callable[[list[str]], Any]] = itertools.cycle([list, iter])  # a list, a stream
    with pagetide.pipeline("text-generation", model=llm) as pipe:
        for name, params in ASKED.items():
            answers = list(pipe(next(forms)(PROMPTS), **of_pipeline(params), return_tensors=True))
            found = [[record["generated_token_ids"] for record in records] for records in answers]
            assert found == [
                [padded([*llm.tokenize(prompt), *ids], len(llm.tokenize(prompt)) + max(map(len, each))) for ids in each]
                for prompt, each in zip(PROMPTS, expected[name], strict=True)
            ], name


def of_pipeline(params: SamplingParams) -> dict[str, Any]:
    """The parameters in the words of a pipeline."""
    names = {"n": "num_return_sequences", "stop": "stop_strings"}
    given = {names.get(name, name): value for name, value in said(params).items()}
    del given["ignore_eos"]
    given |= {"do_sample": params.temperature != 0, "temperature": params.temperature or 1.0}
    if biases := given.pop("logit_bias", None):
        given["sequence_bias"] = {(token,): bias for token, bias in biases.items()}
    return given


def padded(ids: list[int], length: int) -> list[int]:
    """As a pipeline has the shorter ones of several: filled up with the padding id, which is 1 here."""
    return ids + [1] * (length - len(ids))


def test_run(llm: LLM, expected: dict[str, Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "LLM", lambda *_, **__: nullcontext(llm))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": prompt, **said(params)} for params in ASKED.values() for prompt in PROMPTS]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert main(["run", "--model", "demo", "--input", str(source), "--output", str(target), "--output-token-ids"]) == 0
    records = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    found = [[each["token_ids"] for each in record.get("completions", [record])] for record in records]
    assert found == [ids for name in ASKED for ids in expected[name]]


def said(params: SamplingParams) -> dict[str, Any]:
    """The parameters as a line of JSON says them."""
    given = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return {name: value for name, value in given.items() if value is not None and name != "num_return_sequences"}

"""`pagetide run`: what it reads, what it writes, and that it goes on where it was. One engine serves nearly all of it."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide import LLM, RequestOutput, SamplingParams
from pagetide.batch import run as run_module
from pagetide.batch.config import KEYS, EngineOptions, RunConfig, add_flags, read_config
from pagetide.batch.input import read_line
from pagetide.cli import main
from pagetide.engine import llm as llm_module
from pagetide.engine.errors import ConfigError
from pagetide.engine.loading.models import BUILT_IN_FILE
from pagetide.engine.text import template_bounds
from pagetide.monitor.units import GIB, parse_bytes

CONFIGS = BUILT_IN_FILE.parent
SHORT = ["--max-new-tokens", "6"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if polite %}Sir, {% endif %}"
LINES = [
    '{"prompt": "Call me Ishmael."}',
    '{"prompt": "Natásha went to the window", "id": 7, "seed": 3}',
    "",
    "{broken",
    '{"custom_id": "b", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}',
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "he?"}]}]}',
    '{"prompt": "To be", "n": 2, "stop": ["zzzz"], "logit_bias": {"11": 0.5}}',
    '{"prompt": ""}',
]


class Served:
    """Stands in for `LLM(...)`: hands out the one engine of these tests, and takes down what was asked for."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.told: dict[str, Any] = {}

    def __call__(self, model: str, **options: Any) -> Served:
        self.told = {"model": model, **options}
        return self

    def __enter__(self) -> LLM:
        return self.llm

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo model, with a chat template; a models file says so, and serves every test of this module."""
    models = tmp_path_factory.mktemp("models") / "models.yaml"
    folder = CONFIGS.parent / "engine" / "demo_model"
    models.write_text(json.dumps({"talk": {"path": str(folder), "tokenizer": {"chat_template": TEMPLATE}}}), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGETIDE_CONFIG", str(models))
        with LLM("talk", device="cpu", kv_memory="32MiB", max_seqs=4) as llm:
            yield llm


@pytest.fixture
def served(talker: LLM, monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served(talker)
    monkeypatch.setattr(llm_module, "LLM", served)
    return served


@pytest.fixture
def run(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs the command over lines of text; tells its status, what it said, and the records."""

    def go(lines: str | list[str] | None = None, *more: str, name: str = "in.jsonl") -> SimpleNamespace:
        source, target = tmp_path / name, tmp_path / "out.jsonl"
        if lines is not None:
            source.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n", "utf-8")
        status = main(["run", "--model", "talk", "--input", str(source), "--output", str(target), *SHORT, *more])
        out, err = capsys.readouterr()
        content = target.read_bytes() if target.exists() else b""
        records = [json.loads(line) for line in content.splitlines()]
        return SimpleNamespace(status=status, out=out, err=err, content=content, records=records, path=target)

    return go


def completion_of(output: RequestOutput, **more: Any) -> dict[str, Any]:
    counts = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.completions)
    usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
    return {"text": output.text, "finish_reason": output.finish_reason, **more, "usage": usage}


# -- in and out --------------------------------------------------------------------------------------------------------


def test_every_line_has_the_record_that_the_library_would_give(talker: LLM, run: Any) -> None:
    done = run(LINES, "--seed", "2", "--temperature", "0.8")
    drawn = SamplingParams(max_new_tokens=6, temperature=0.8)

    def seeded(line: int) -> SamplingParams:
        return replace(drawn, seed=(2 << 32) + line)

    messages = [{"role": "user", "content": "Where is he?"}]
    prompts = ["Call me Ishmael.", "Natásha went to the window", [5, 6, 7], talker.render(messages), "To be", ""]
    params = [
        seeded(1), replace(drawn, seed=3), replace(drawn, max_new_tokens=2, temperature=0), seeded(6),
        replace(seeded(7), n=2, stop=["zzzz"], logit_bias={11: 0.5}), seeded(8),
    ]  # fmt: skip
    one, two, three, four, five, six = talker.generate(prompts, params)
    both = [{"text": each.text, "finish_reason": each.finish_reason} for each in five.completions]
    assert done.records == [
        {"line": 1, "prompt": prompts[0], **completion_of(one)},
        {"line": 2, "id": 7, "prompt": prompts[1], **completion_of(two)},
        {"line": 4, "finish_reason": "error", "error": done.records[2]["error"]},
        {"line": 5, "id": "b", "prompt": [5, 6, 7], **completion_of(three)},
        {"line": 6, "messages": messages, **completion_of(four)},
        {"line": 7, "prompt": "To be", **completion_of(five, completions=both)},
        {"line": 8, "prompt": "", **completion_of(six)},
    ]
    assert done.records[2]["error"].startswith("line 4: it is not valid JSON: ")
    assert done.status == 1
    assert done.out.splitlines()[:2] == [f"records            7 in {done.path}", "errors             1"]
    assert sorted(path.name for path in done.path.parent.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_text_lines_and_what_records_hold(talker: LLM, run: Any) -> None:
    """A mark of UTF-8 at the beginning and both ends of lines are no text; blank lines have no record."""
    done = run("\ufeffCall me\r\n \n\nTo be", "--output-token-ids", "--no-output-prompt", "--json", name="in.txt")
    params = [SamplingParams(max_new_tokens=6, seed=line) for line in (1, 4)]
    outputs = talker.generate(["Call me", "To be"], params)
    assert [(r["line"], r["token_ids"]) for r in done.records] == [(1, outputs[0].token_ids), (4, outputs[1].token_ids)]
    assert list(done.records[0]) == ["line", "text", "token_ids", "finish_reason", "usage"]
    summary = json.loads(done.out)
    assert summary["output"] == str(done.path)
    assert (summary["lines"], summary["errors"], summary["resumed_lines"]) == (2, 0, 0)
    assert summary["completion_tokens"] == sum(len(output.token_ids) for output in outputs)
    assert summary["tokens_per_s"] > 0 and summary["preemptions"] == 0
    assert (done.status, done.err) == (0, "")


def test_a_batch_as_openai_has_it(talker: LLM, run: Any) -> None:
    def line(custom_id: Any, url: str, **body: Any) -> str:
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", **body}})

    chat, text = "/v1/chat/completions", "/v1/completions"
    said = [{"role": "user", "content": "Where?"}]
    lines = [
        line("a", chat, messages=said, max_completion_tokens=3, seed=1, n=2, user="u", tools=None, stream=False),
        line("b", text, prompt=["Call me"], max_tokens=3, seed=1),
        line("c", text, prompt="x", tools=[]),
        line("d", text, prompt="word " * 2000),
        "nonsense",
        line("e", "/v1/embeddings", input="x"),
        line("f", chat, messages=said, chat_template_kwargs={"polite": True}, temperature=0),
    ]
    done = run(lines)
    params = [SamplingParams(max_new_tokens=3, seed=1, n=2), SamplingParams(max_new_tokens=3, seed=1)]
    first, second = talker.generate([talker.render(said), "Call me"], params)
    run_id = done.records[0]["id"].split("_")[2]
    assert done.records[0] == {
        "id": f"batch_req_{run_id}_1",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{run_id}_1",
            "body": {
                "id": f"chatcmpl-{run_id}_1", "object": "chat.completion", "created": 0, "model": "talk",
                "choices": [
                    {"index": i, "message": {"role": "assistant", "content": each.text}, "logprobs": None,
                     "finish_reason": each.finish_reason}
                    for i, each in enumerate(first.completions)
                ],
                "usage": completion_of(first)["usage"],
            },
        },
        "error": None,
    }  # fmt: skip
    body = done.records[1]["response"]["body"]
    choice = {"index": 0, "text": second.text, "logprobs": None, "finish_reason": second.finish_reason}
    assert (body["id"], body["object"], body["choices"]) == (f"cmpl-{run_id}_2", "text_completion", [choice])
    assert [record["custom_id"] for record in done.records] == ["a", "b", "c", "d", None, "e", "f"]
    assert [record["response"]["status_code"] for record in done.records] == [200, 200, 400, 400, 400, 400, 200]
    for record, message in zip(
        done.records[2:6],
        (
            "line 3: unknown field 'tools'",
            "with a context of 1,024",
            "line 5: it is not valid JSON",
            "url must be /v1/comp",
        ),
        strict=True,
    ):
        assert message in record["error"]["message"]
        assert record["response"]["body"]["error"]["message"] == record["error"]["message"]
    assert talker.render(said, polite=True) != talker.render(said)
    assert done.records[6]["response"]["body"]["usage"]["prompt_tokens"] == len(talker.render(said, polite=True))
    assert done.status == 1


def test_log_probabilities_in_both_forms(talker: LLM, run: Any) -> None:
    plain = run(['{"prompt": "Natásha", "logprobs": 2, "prompt_logprobs": 0, "temperature": 0}']).records[0]
    output = talker.generate("Natásha", SamplingParams(max_new_tokens=6, logprobs=2, prompt_logprobs=0, temperature=0))[
        0
    ]
    assert output.completions[0].logprobs is not None and output.prompt_logprobs is not None
    assert [(told["token_id"], told["rank"]) for told in plain["logprobs"]] == [
        (told.token_id, told.rank) for told in output.completions[0].logprobs
    ]
    assert [told["logprob"] for told in plain["logprobs"]] == pytest.approx(
        [told.logprob for told in output.completions[0].logprobs], abs=1e-4
    )
    assert plain["prompt_logprobs"][0] is None and len(plain["prompt_logprobs"]) == len(output.prompt_token_ids)

    body = {"prompt": "Natásha", "logprobs": 2, "temperature": 0}
    lines = [{"custom_id": "a", "url": "/v1/completions", "body": body}]
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "temperature": 0}
    lines.append({"custom_id": "b", "url": "/v1/chat/completions", "body": body})
    done = run([json.dumps(line) for line in lines], "--overwrite")
    text, chat = (record["response"]["body"]["choices"][0] for record in done.records)
    told = text["logprobs"]
    assert "".join(told["tokens"]) == text["text"] == output.text
    assert [
        text["text"][at:][: len(token)] for at, token in zip(told["text_offset"], told["tokens"], strict=True)
    ] == told["tokens"]
    assert all(told["tokens"][i] in top for i, top in enumerate(told["top_logprobs"]))  # greedy: it is the first
    content = chat["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == chat["message"]["content"]
    for one in content:
        assert one["top_logprobs"] == [{name: one[name] for name in ("token", "logprob", "bytes")}]
        assert bytes(one["bytes"]).decode() == one["token"]


def test_standard_input_is_read_to_its_end_and_can_be_gone_on_with(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = run(["Call me", "To be"], name="in.txt").content
    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
    about = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Call me\nTo be\n")))
    arguments = ["run", "--model", "talk", "--input", "-", "--output", str(tmp_path / "out.jsonl"), *SHORT]
    assert main(arguments) == 2  # nothing says what it holds
    assert main([*arguments, "--input-format", "text"]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text()) == about


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff", "it is no text in UTF-8"),
        (None, "it is longer than 32 MiB"),
        (b"[1]", "it must be a JSON object, got list"),
        (b'{"prompt": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands there twice"),
        (b"[" * 200_000, "it is not valid JSON"),
        (b"{}", "it must have a prompt or messages, one of the two"),
        (b'{"prompt": "x", "messages": []}', "one of the two"),
        (b'{"prompt": 5}', "prompt must be a text or a list of token ids, got 5"),
        (b'{"prompt": ["a", "b"]}', "it has 2 prompts: give each a line of its own"),
        (b'{"prompt": "x", "id": [1]}', "id must be a text or an integer, got [1]"),
        (b'{"prompt": "x", "id": 1, "custom_id": "b"}', "give one of them"),
        (b'{"messages": []}', "messages must be a list of"),
        (b'{"messages": [{"content": "x"}]}', "a message must have a role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "of a message only text can be taken"),
        (b'{"prompt": "x", "temprature": 1}', "unknown field 'temprature'; did you mean temperature?"),
        (b'{"prompt": "x", "temperature": -1}', "temperature must be 0 (greedy) or above, got -1"),
        (b'{"prompt": "x", "stream": true}', "stream must be left out here, got True"),
        (b'{"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}', "they mean the same"),
        (b'{"prompt": "x", "top_logprobs": 2}', "top_logprobs needs logprobs to be true, got None"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias must map token ids to numbers, got 'a'"),
        (b'{"prompt": "x", "response_format": {"type": "yaml"}}', "response_format must have the type text"),
        (b'{"prompt": "x", "url": "/v1/completions", "body": {}}', "say `format: openai`"),
        (b'{"prompt": "x", "logits_processors": []}', "unknown field 'logits_processors'"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_asked_says_why(line: bytes | None, message: str) -> None:
    ask = read_line(3, line, "jsonl")
    assert ask.error is not None and message in ask.error
    assert ask.sampling == {}


def test_a_line_brings_no_template_of_its_own(talker: LLM, run: Any) -> None:
    """Nor anything else that is the program's to set; what the model's template asks for is the line's."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    asked = [
        {"polite": True},
        {"chat_template": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"},
        {"tokenize": True}, {"tokenizer_kwargs": {}}, {"return_dict": True}, {"messages": []}, {"add_generation_prompt": False},
    ]  # fmt: skip
    done = run([json.dumps({**chat, "chat_template_kwargs": options}) for options in asked])
    errors = [record.get("error") for record in done.records]
    assert errors[0] is errors[6] is None
    assert done.records[0]["usage"]["prompt_tokens"] == len(talker.render(chat["messages"], polite=True))
    for error, name in zip(
        errors[1:6], ("chat_template", "tokenize", "tokenizer_kwargs", "return_dict", "messages"), strict=True
    ):
        assert error is not None and f"chat_template_kwargs cannot set '{name}': a request may give" in error


def test_a_conversation_that_takes_too_much_is_one_error(
    talker: LLM, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "MOST_MADE_BYTES", 1 << 15)
    chats = [[{"role": "user", "content": "x" * count}] for count in (10, 50_000, 20)]
    done = run([json.dumps({"messages": chat}) for chat in chats])
    assert [("error" in record) for record in done.records] == [False, True, False]
    assert "the chat template cannot be rendered with these messages: its values take" in done.records[1]["error"]


def test_openais_names_are_pagetides() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    line = {
        "prompt": "x", "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -1}, "model": "any",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, "seed": None,
    }  # fmt: skip
    ask = read_line(1, json.dumps(line).encode(), "jsonl")
    assert ask.error is None
    assert ask.sampling == {"max_new_tokens": 5, "logprobs": 2, "logit_bias": {5: -1}, "json_schema": schema}
    for asked, told in (({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": 3}, 3)):
        ask = read_line(1, json.dumps({"prompt": "x", **asked}).encode(), "jsonl")
        assert ask.sampling == {"logprobs": told}
    ask = read_line(1, b'{"prompt": "x", "response_format": {"type": "json_object"}}', "jsonl")
    assert ask.sampling == {"json_schema": {"type": "object"}}


def test_what_a_line_says_goes_before_what_the_run_says(run: Any, talker: LLM) -> None:
    lines = ['{"prompt": "x", "max_new_tokens": 2, "ignore_eos": false}', '{"prompt": "x", "regex": "a"}']
    done = run(lines, "--min-new-tokens", "4", "--ignore-eos", "--json-schema", "{}", "--seed", "1")
    (first, second) = done.records
    assert "json_schema and regex cannot be given together" in second["error"]
    assert first["finish_reason"] == "error" or first["usage"]["completion_tokens"] == 2


# -- going on ----------------------------------------------------------------------------------------------------------


def cuts(whole: bytes) -> dict[str, bytes]:
    """What a killed process or a failed machine may leave of a file."""
    first, second = whole.split(b"\n")[:2]
    accent = whole.index("á".encode()) + 1
    return {
        "nothing": b"",
        "half of the first": whole[: len(first) // 2],
        "no end of the line": first,
        "one": first + b"\n",
        "one and half of a character": whole[:accent],
        "all but the last byte": whole[:-1],
        "all": whole,
        "zeros at the end": first + b"\n" + bytes(4096),
        "a hole": first + b"\n" + bytes(len(second)) + whole[len(first) + len(second) + 1 :],
        "out of order": second + b"\n" + first + b"\n",
        "one twice": (first + b"\n") * 2,
        "another's": first + b'\n{"line": "2"}\n[1]\n',
        "more than there is": whole + first + b"\n",
    }


@pytest.mark.parametrize("form", ["jsonl", "openai"])
def test_from_wherever_it_was_cut_off_it_comes_out_the_same(
    run: Any, form: str, tmp_path: Path, served: Served
) -> None:
    url = {"url": "/v1/completions"}
    texts = ["Natásha", "To be", "Call me", "x" * 5000]
    plain = [{"id": f"á{i}", "prompt": text} for i, text in enumerate(texts)]
    lines = (
        plain if form == "jsonl" else [{"custom_id": p["id"], **url, "body": {"prompt": p["prompt"]}} for p in plain]
    )
    few = ["--max-new-tokens", "2"]
    done = run([json.dumps(line) for line in lines], *few)
    assert done.status == 1 and len(done.records) == 4  # the last prompt is too long
    about = (tmp_path / "out.jsonl.run.json").read_bytes()
    left_behind = cuts(done.content)
    for name in left_behind if form == "jsonl" else ("one and half of a character", "a hole", "out of order", "all"):
        left = left_behind[name]
        (tmp_path / "out.jsonl").unlink()
        (tmp_path / "out.jsonl.part").write_bytes(left)
        served.told = {}
        again = run(None, "--json", *few)
        assert (again.content, again.status) == (done.content, 1), name
        assert (tmp_path / "out.jsonl.run.json").read_bytes() == about, name
        summary = json.loads(again.out)
        assert (summary["lines"], summary["errors"]) == (4, 1), name
        assert summary["resumed_lines"] == {"one": 1, "all": 4, "more than there is": 4}.get(
            name, summary["resumed_lines"]
        )
        assert (served.told == {}) == (name in ("all", "more than there is")), (
            "a model is loaded only where it is needed"
        )


def test_when_all_is_done_nothing_is_done_again(run: Any, served: Served) -> None:
    first = run(LINES)
    served.told = {}
    again = run(None, "--json")
    assert (again.status, again.content) == (1, first.content)
    assert "nothing is left to be done" in again.err
    assert json.loads(again.out)["lines"] == json.loads(again.out)["resumed_lines"] == 7
    assert served.told == {}


def test_other_settings_are_refused_until_it_is_begun_anew(run: Any, tmp_path: Path, served: Served) -> None:
    first = run(["Call me", "To be"], name="in.txt")
    assert run(None, "--temperature", "0", name="in.txt").err.startswith(
        f"pagetide: {first.path} is there already, made with other settings (sampling.temperature was not given and is 0)"
    )
    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
    for more, said in {
        ("--seed", "1"): "seed was 0 and is 1",
        ("--stop", "a", "--n", "1"): "sampling.n was not given and is 1, sampling.stop was not given and is ['a']",
        ("--device", "cuda"): "engine.device was 'auto' and is 'cuda'",
        ("--no-output-prompt",): "output.prompt was True and is False",
    }.items():  # fmt: skip
        refused = run(None, *more, name="in.txt")
        assert refused.status == 2
        assert (
            f"was begun with other settings: {said}; go on with the same, or begin anew with --restart" in refused.err
        )
    (tmp_path / "in.txt").write_text("Call me\nTo me\n")
    assert "the input changed" in run(None, name="in.txt").err
    # How the work is done is no such setting.
    (tmp_path / "in.txt").write_text("Call me\nTo be\n")
    assert run(None, "--kv-memory", "16MiB", "--max-seqs", "2", name="in.txt").content == first.content
    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
    anew = run(None, "--restart", "--temperature", "0", name="in.txt")
    assert anew.status == 0 and anew.content != first.content
    over = run(None, "--overwrite", name="in.txt")
    assert (over.status, over.content) == (0, first.content)
    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
    (tmp_path / "out.jsonl.run.json").write_text("{")
    assert "nothing says what made it" in run(None, name="in.txt").err


def test_two_at_once_are_refused(run: Any, tmp_path: Path) -> None:
    with (tmp_path / "out.jsonl.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = run(["Call me"], name="in.txt")
    assert refused.status == 2
    assert "another run is writing" in refused.err and "out.jsonl.part" in refused.err
    assert run(None, name="in.txt").status == 0


def test_a_full_disk_leaves_what_can_be_gone_on_with(run: Any, tmp_path: Path, served: Served) -> None:
    whole = run(["Call me", "To be", "Natásha"], name="in.txt").content
    (tmp_path / "out.jsonl").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) - 10, before[1]))
    try:
        full = run(None, name="in.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert full.status == 2
    assert "make room and start the run again, it goes on where it is" in full.err
    assert (tmp_path / "out.jsonl.part").read_bytes() == whole[:-10]
    again = run(None, name="in.txt")
    assert (again.status, again.content) == (0, whole)
    assert "going on: 2 of 3 records are there" in again.err


class Faulty:
    """An engine whose `generate_each` does as it is told for each line."""

    def __init__(self, llm: LLM, ends: Callable[[int], RequestOutput]) -> None:
        self._llm, self._ends = llm, ends
        self.tokenizer = None

    def generate_each(self, prompts: Iterator[Any], params: Iterator[Any]) -> Iterator[RequestOutput]:
        return (self._ends(i) for i, _ in enumerate(zip(prompts, params, strict=True)))

    def stats(self) -> dict[str, Any]:
        return self._llm.stats()


def test_a_line_that_fails_has_an_error_record_and_an_engine_that_fails_ends_the_run(
    run: Any, served: Served, talker: LLM, tmp_path: Path
) -> None:
    good = talker.generate("x", SamplingParams(max_new_tokens=2))[0]
    bad = replace(good, completions=(replace(good.completions[0], finish_reason="error", error="lost the device"),))
    served.llm = Faulty(talker, lambda i: good if i in (0, 3) else bad)  # type: ignore[assignment]
    lines = ["x"] * 40
    failing = run(lines, name="in.txt")
    assert failing.status == 2
    assert "32 lines in a row failed in the engine, the last with: lost the device" in failing.err
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl.part").read_bytes().splitlines()]
    assert [record.get("error") for record in kept] == [
        None,
        *["line 2: lost the device", "line 3: lost the device"],
        None,
    ]
    served.llm = Faulty(talker, lambda i: bad if i == 35 else good)  # type: ignore[assignment]
    done = run(None, name="in.txt")
    assert (done.status, len(done.records)) == (1, 40)
    assert [record["line"] for record in done.records if "error" in record] == [2, 3, 40]


def test_an_input_that_changes_meanwhile_is_noticed(run: Any, served: Served, talker: LLM, tmp_path: Path) -> None:
    good = talker.generate("x", SamplingParams(max_new_tokens=2))[0]

    def ends(i: int) -> RequestOutput:
        if i == 0:
            (tmp_path / "in.txt").write_text("To be or\n" * 3000)
        return good

    served.llm = Faulty(talker, ends)  # type: ignore[assignment]
    refused = run(["Call me."] * 3000, name="in.txt")
    assert refused.status == 2
    assert "in.txt has changed while it was read" in refused.err
    assert not refused.path.exists()


def test_an_interrupt_says_how_to_go_on(run: Any, served: Served, talker: LLM) -> None:
    good = talker.generate("x", SamplingParams(max_new_tokens=2))[0]

    def ends(i: int) -> RequestOutput:
        if i == 2:
            raise KeyboardInterrupt
        return good

    served.llm = Faulty(talker, ends)  # type: ignore[assignment]
    stopped = run(["x"] * 3, name="in.txt")
    assert (stopped.status, stopped.out) == (130, "")
    assert stopped.err == "interrupted: 2 of 3 records are there; the same command goes on\n"
    assert run(None, name="in.txt").status == 0


def test_killed_and_started_again_it_comes_out_the_same(run: Any, tmp_path: Path) -> None:
    """Once, really. tests/stress does so at twenty moments."""
    flags = ["--device", "cpu", "--kv-memory", "16MiB", "--max-seqs", "4", "--no-share", "--max-new-tokens", "3"]
    whole = run([f"{i} Call me Ishmael" for i in range(24)], *flags, name="in.txt")
    whole.path.unlink()
    part, files = tmp_path / "out.jsonl.part", ["--input", str(tmp_path / "in.txt"), "--output", str(whole.path)]
    command = [sys.executable, "-P", "-m", "pagetide", "run", "--model", "talk", *files, *SHORT, *flags]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while not (part.exists() and part.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not whole.path.exists()
    again = run(None, *flags, name="in.txt")
    assert "going on: " in again.err
    assert (again.status, again.content) == (0, whole.content)
    assert [record["line"] for record in again.records] == list(range(1, 25))


# -- the settings ------------------------------------------------------------------------------------------------------


def configured(tmp_path: Path, text: str, *flags: str) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text, "utf-8")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_config(parser.parse_args(["--config", str(file), *flags]))


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    text = """
        model: ./model
        input: in.txt
        output: {path: /out.jsonl, token_ids: true}
        engine: {kv_memory: {min: 1GiB, max: 2GiB}, device: cuda, max_seqs: 5}
        sampling: {temperature: 0.5, stop: [a, b], logit_bias: {5: -1}, top_k:}
    """
    config = configured(tmp_path, text)
    assert config.model == str(tmp_path / "model")
    assert config.input.path == str(tmp_path / "in.txt") and config.input.format == "auto"
    assert (config.output.path, config.output.prompt, config.output.token_ids) == ("/out.jsonl", True, True)
    assert config.engine.arguments() == {"kv_memory": {"min": "1GiB", "max": "2GiB"}, "device": "cuda", "max_seqs": 5}
    assert config.sampling == SamplingParams(temperature=0.5, stop=["a", "b"], logit_bias={5: -1})
    flags = (
        "--model demo --input - --input-format text --no-output-token-ids --seed 5 --kv-memory 1GiB --no-prefix-caching "
        "--block-size auto --temperature 1e-1 --stop c --stop d --early-stopping never --n 2 --num-beams 2"
    )
    with pytest.raises(ConfigError, match="--stop: stop cannot be given with num_beams 2"):
        configured(tmp_path, text, *flags.split())
    config = configured(tmp_path, text, *flags.replace("2 --num-beams 2", "2").split(), "--logit-bias", "{6: 2}")
    assert (config.model, config.input.path, config.input.format, config.seed) == ("demo", "-", "text", 5)
    assert not config.output.token_ids and config.output.path == "/out.jsonl"
    assert config.engine.arguments() == {
        "kv_memory": "1GiB", "device": "cuda", "max_seqs": 5, "prefix_caching": False, "block_size": "auto",
    }  # fmt: skip
    assert config.sampling == SamplingParams(
        temperature=0.1, stop=["c", "d"], logit_bias={6: 2}, early_stopping="never", n=2
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input: a\noutput: b", "nothing says the model: write `model:` into the file, or give --model"),
        ("model: demo\noutput: b", "nothing says the input"),
        ("model: demo\ninput: {format: text}\noutput: b", "nothing says the input"),
        ("model: demo\nimput: a", "run.yaml:2: unknown key 'imput' at the top level; did you mean input?"),
        (
            "sampling:\n  temprature: 1",
            "run.yaml:2: unknown key 'temprature' under `sampling`; did you mean temperature?",
        ),
        ("kv_memory: 1GiB", "run.yaml:1: 'kv_memory' does not stand at the top level but under `engine`"),
        (
            "kv_memoy: 1GiB",
            "run.yaml:1: unknown key 'kv_memoy' at the top level; did you mean kv_memory, under `engine`?",
        ),
        ("sampling: {seed: 1}", "'seed' does not stand under `sampling` but at the top level"),
        (
            "engine: {xyzzy: 1}",
            "run.yaml:1: unknown key 'xyzzy' under `engine`; known are device, devices, tensor_parallel_size, dtype, quantization",  # noqa: E501
        ),
        (
            "engine: {kv_memory: {maximum: 1GiB}}",
            "run.yaml:3: kv_memory has an unknown key 'maximum'; did you mean max?",
        ),
        ("engine: {max_seqs: 0}", "run.yaml:3: max_seqs must be at least 1, got 0"),
        ("engine: 5", "run.yaml:1: engine must map some of device, devices, tensor_parallel_size, dtype"),
        ("engine: {max_seqs: 1, max_seqs: 2}", "run.yaml:1: 'max_seqs' stands there twice, first in line 1"),
        ("model: 5", "run.yaml:1: model must be a text, got 5"),
        ("seed: -1", "run.yaml:3: seed must be an integer from 0 to 4,294,967,295, got -1"),
        ("input: {path: a, format: csv}", "input.format must be one of auto, text, jsonl, openai, got 'csv'"),
        ("output: {path: a, prompt: 1}", "output.prompt must be true or false, got 1"),
        ("sampling: {top_p: 2}", "run.yaml:3: top_p must be in (0, 1], got 2"),
        ("5: 6", "run.yaml:1: a key must be text, got '5'"),
        ("[1]", "run.yaml: must hold `key: value` lines, got list"),
        ("a: [", "run.yaml:1: not valid YAML"),
        ("a: \x00", "not valid YAML"),
        (f"sampling: [&a [{'x, ' * 99}], &b [{'*a, ' * 99}], &c [{'*b, ' * 99}]]", "more than 100,000 values"),
        ("model: [" + "x, " * 5000 + "]", "run.yaml:1: model must be a text, got ['x', 'x'"),
    ],
)
def test_a_config_that_is_wrong_is_told_where(tmp_path: Path, text: str, message: str) -> None:
    complete = text
    if ":3: " in message or "must be one of" in message or "true or false" in message:
        rest = {"model": "demo", "input": "a", "output": "b"}
        head = [f"{key}: {value}" for key, value in rest.items() if not text.startswith(key)]
        complete = "\n".join([*head[:2], text, *head[2:]])
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, complete)
    assert message in str(caught.value)


def test_every_field_is_a_key() -> None:
    assert set(KEYS["sampling"]) | {"seed", "logits_processors"} == {f.name for f in fields(SamplingParams)}
    # A secret stands neither in a file nor on a command line; a run has no use for events.
    neither = {"prefix_hash_secret", "kv_events"}
    of_llm = set(signature(LLM.__init__).parameters) - {"self", "model", "tokenizer"} - neither
    assert {f.name for f in fields(EngineOptions)} == of_llm


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--config", "none.yaml"), "No such file or directory: 'none.yaml'"),
        (("--input", "none.txt"), "No such file or directory: 'none.txt'"),
        (("--input", "none"), "No such file or directory: 'none'"),
        (("--output", "-"), "the output must be a file"),
        (("--output", "/none/out.jsonl"), "the output's folder /none is not there"),
        (("--model", "nosuch"), "'nosuch' is not a known name"),
        (("--temperature", "-1"), "--temperature: temperature must be 0 (greedy) or above"),
        (("--input-format", "csv"), "--input-format: input.format must be one of auto"),
    ],
)
def test_bad_arguments(run: Any, more: tuple[str, ...], message: str) -> None:
    refused = run(["x"], *more, name="in.txt")
    assert (refused.status, refused.out) == (2, "")
    assert message in refused.err and refused.err.startswith("pagetide: ") and refused.err.count("\n") == 1


def test_files_that_cannot_be(run: Any, tmp_path: Path) -> None:
    assert "does not say what is in it" in run(["x"], name="in.csv").err
    (tmp_path / "folder").mkdir()
    assert "is a folder: name a file in it" in run(["x"], "--output", str(tmp_path / "folder"), name="in.txt").err
    for name in ("in.txt", "in.txt.part", "in.txt.run.json", "in.txt.run.json.new"):
        source = tmp_path / name
        source.write_text("Call me")
        flags = ("--output", str(tmp_path / "in.txt"), "--input", str(source), "--input-format", "text", "--restart")
        refused = run(None, *flags, "--overwrite", name="x.txt").err
        assert "would be written over by the run: name another output" in refused
        assert source.read_text() == "Call me"
        source.unlink()
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in run(["x"], "--output", str(tmp_path / "pipe"), "--overwrite", name="in.txt").err


def test_behind_a_link_it_is_the_target_that_is_replaced(run: Any, tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("old\n")
    link.symlink_to(target)
    done = run(["Call me"], "--output", str(link), "--overwrite", "--max-new-tokens", "2", name="in.txt")
    assert done.status == 0, done.err
    assert link.is_symlink() and "Call me" in target.read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("run-*.yaml")))
def test_the_examples_are_valid(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    config = read_config(parser.parse_args(["--config", str(CONFIGS / name), "--output", "out.jsonl"]))
    if name == "run-demo.yaml":
        assert Path(config.input.path).read_text("utf-8").count("\n") > 10


def test_the_example_for_24_gb_fits() -> None:
    """By the very arithmetic of `pagetide plan`, with the figures of Qwen2-7B's configuration."""
    import torch

    from pagetide.engine.memory.planning import working_reserve_bytes

    parser = argparse.ArgumentParser()
    add_flags(parser)
    engine = read_config(parser.parse_args(["--config", str(CONFIGS / "run-qwen2-7b-24gb.yaml")])).engine
    shape = SimpleNamespace(
        hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064
    )
    assert engine.max_step_tokens and engine.max_seqs and engine.max_model_len and isinstance(engine.kv_memory, dict)
    reserve = working_reserve_bytes(
        shape, engine.max_step_tokens, engine.max_seqs, torch.bfloat16, torch.device("cuda")
    )
    pool = parse_bytes(engine.kv_memory["max"])
    assert 7_615_616_512 * 2 + reserve + pool < 21 * GIB
    per_token = 28 * 2 * 4 * 128 * 2
    assert (per_token, pool // per_token, pool // per_token // engine.max_seqs) == (57_344, 112_347, 877)
    assert pool // per_token // engine.max_model_len == 27


def test_a_bar_has_no_thread() -> None:
    assert run_module.Bar.monitor_interval == 0

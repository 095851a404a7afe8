"""`pagetide run`: what it reads, what it writes, and that it goes on where it was. One engine serves nearly all of it."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import step
from nearly import nearly
from run_rig import CONFIGS, SHORT, run_fixture, served_fixture, talker_fixture  # noqa: F401

from pagetide import LLM, RequestOutput, SamplingParams
from pagetide.batch import input as run_input
from pagetide.batch import output as output_module
from pagetide.batch import run as run_module
from pagetide.batch.config import SECTIONS, InputOptions, RunConfig, add_run_flags, read_config
from pagetide.batch.input import InputFile, read_line
from pagetide.batch.output import Output
from pagetide.cli import main
from pagetide.common.units import GIB, parse_bytes
from pagetide.engine import llm as llm_module
from pagetide.engine.errors import ConfigError
from pagetide.engine.text import template_bounds
from pagetide.server.requests import CompletionRequest

LINES = [
    '{"prompt": "Call me Ishmael."}',
    '{"prompt": "Natásha went to the window", "id": 7, "seed": 3}',
    "",
    "{broken",
    '{"custom_id": "b", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}',
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": "he?"}]}]}',
    '{"prompt": "To be", "n": 2, "stop": ["zzzz"], "logit_bias": {"11": 0.5}}',
    '{"prompt": ""}',
    '{"prompt": "To be", "max_tokens": 0, "logprobs": 0, "prompt_logprobs": 0}',
]


def completion_of(output: RequestOutput, **more: Any) -> dict[str, Any]:
    counts = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.completions)
    usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
    return {"text": output.text, "finish_reason": output.finish_reason, **more, "usage": usage}


def test_every_line_has_the_record_that_the_library_would_give(talker: LLM, run: Any) -> None:
    done = run(LINES, "--seed", "2", "--temperature", "0.8")
    drawn = SamplingParams(max_new_tokens=6, temperature=0.8)

    def seeded(line: int) -> SamplingParams:
        return replace(drawn, seed=(2 << 32) + line)

    messages = json.loads(LINES[5])["messages"]
    chat = talker.render([{"role": "user", "content": "Where is\nhe?"}])
    prompts = ["Call me Ishmael.", "Natásha went to the window", [5, 6, 7], chat, "To be", "", "To be"]
    params = [
        seeded(1), replace(drawn, seed=3), replace(drawn, max_new_tokens=2, temperature=0), seeded(6),
        replace(seeded(7), n=2, stop=["zzzz"], logit_bias={11: 0.5}), seeded(8),
        replace(seeded(9), max_new_tokens=1, prompt_logprobs=0),
    ]  # fmt: skip
    one, two, three, four, five, six, seven = talker.generate(prompts, params)
    scored = [entry and json.loads(json.dumps(asdict(entry))) for entry in seven.prompt_logprobs or ()]
    both = [{"text": each.text, "finish_reason": each.finish_reason} for each in five.completions]
    assert done.records == [
        {"line": 1, "prompt": prompts[0], **completion_of(one)},
        {"line": 2, "id": 7, "prompt": prompts[1], **completion_of(two)},
        {"line": 4, "finish_reason": "error", "error": done.records[2]["error"]},
        {"line": 5, "id": "b", "prompt": [5, 6, 7], **completion_of(three)},
        {"line": 6, "messages": messages, **completion_of(four)},
        {"line": 7, "prompt": "To be", **completion_of(five, completions=both)},
        {"line": 8, "prompt": "", **completion_of(six)},
        {"line": 9, "prompt": "To be", "text": "", "finish_reason": "length", "logprobs": [], "prompt_logprobs": scored,
         "usage": {"prompt_tokens": (size := len(seven.prompt_token_ids)), "completion_tokens": 0, "total_tokens": size}},
    ]  # fmt: skip
    assert done.records[2]["error"].startswith("line 4: it is not valid JSON: ")
    assert done.status == 1
    assert done.out.splitlines()[:2] == [f"records            8 in {done.path}", "errors             1"]
    assert sorted(path.name for path in done.path.parent.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_calls_of_tools_are_those_of_a_line(run: Any) -> None:
    schema = {"type": "object", "properties": {"depth": {"enum": [3]}}, "required": ["depth"]}
    schema |= {"additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "dive", "parameters": schema}}]
    talk = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required", "max_tokens": 60}
    talk |= {"parallel_tool_calls": False, "seed": 1}
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": talk}
    (plain,) = run([json.dumps(talk)]).records
    assert (plain["text"], plain["finish_reason"]) == (None, "stop")
    (call,) = plain["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("dive", {"depth": 3})
    (cut,) = run([json.dumps({**talk, "max_tokens": 1})], "--overwrite").records
    assert (cut["text"], cut["finish_reason"], "tool_calls" in cut) == ("", "length", False)  # as of a server
    (record,) = run([json.dumps(batch)], "--overwrite").records
    choice = record["response"]["body"]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert [one["function"] for one in choice["message"]["tool_calls"]] == [call["function"]]


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
        line("c", text, prompt="x", tools=[{}]),
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
    said_of = ("line 3: tools must be left out here", "with a context of 1,024", "line 5: it is not valid JSON", "url must be")
    for record, message in zip(done.records[2:6], said_of, strict=True):
        assert message in record["error"]["message"]
        assert record["response"]["body"]["error"]["message"] == record["error"]["message"]
    assert talker.render(said, polite=True) != talker.render(said)
    assert done.records[6]["response"]["body"]["usage"]["prompt_tokens"] == len(talker.render(said, polite=True))
    assert done.status == 1


def test_log_probabilities_in_both_forms(talker: LLM, run: Any) -> None:
    plain = run(['{"prompt": "Natásha", "logprobs": 2, "prompt_logprobs": 0, "temperature": 0}']).records[0]
    params = SamplingParams(max_new_tokens=6, logprobs=2, prompt_logprobs=0, temperature=0)
    (output,) = talker.generate("Natásha", params)
    told = output.completions[0].logprobs
    assert told is not None and output.prompt_logprobs is not None
    assert [(one["token_id"], one["rank"]) for one in plain["logprobs"]] == [(one.token_id, one.rank) for one in told]
    expected = pytest.approx([one.logprob for one in told], abs=1e-4)
    assert [one["logprob"] for one in plain["logprobs"]] == expected
    assert plain["prompt_logprobs"][0] is None and len(plain["prompt_logprobs"]) == len(output.prompt_token_ids)

    body = {"prompt": "Natásha", "logprobs": 2, "temperature": 0}
    lines = [{"custom_id": "a", "url": "/v1/completions", "body": body}]
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "temperature": 0}
    lines.append({"custom_id": "b", "url": "/v1/chat/completions", "body": body})
    done = run([json.dumps(line) for line in lines], "--overwrite")
    text, chat = (record["response"]["body"]["choices"][0] for record in done.records)
    told = text["logprobs"]
    assert "".join(told["tokens"]) == text["text"] == output.text
    places = zip(told["text_offset"], told["tokens"], strict=True)
    assert all(text["text"][at:].startswith(token) for at, token in places)
    assert all(told["tokens"][i] in top for i, top in enumerate(told["top_logprobs"]))  # greedy: it is the first
    content = chat["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == chat["message"]["content"]
    for one in content:
        assert one["top_logprobs"] == [{name: one[name] for name in ("token", "logprob", "bytes")}]
        assert bytes(one["bytes"]).decode() == one["token"]


def test_standard_input_is_read_to_its_end_and_can_be_gone_on_with(run: Any, monkeypatch: Any, tmp_path: Path) -> None:
    whole = run(["Call me", "To be"], name="in.txt").content
    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
    about = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Call me\nTo be\n")))
    arguments = ["run", "--model", "talk", "--input", "-", "--output", str(tmp_path / "out.jsonl"), *SHORT]
    assert main(arguments) == 2  # nothing says what it holds
    assert main([*arguments, "--input-format", "text"]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text()) == about


def test_a_line_that_cannot_be_asked_says_why() -> None:
    for line, message in [
        (b"\xff", "it is not UTF-8 text"),
        (None, "it is longer than 32 MiB"),
        (b"[1]", "it must be a JSON object, got list"),
        (b'{"prompt": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' appears twice"),
        (b"[" * 200_000, "it is not valid JSON"),
        (b"{}", "it must have a prompt or messages, one of the two"),
        (b'{"prompt": "x", "messages": []}', "one of the two"),
        (b'{"prompt": 5}', "prompt must be a text or a list of token ids, got 5"),
        (b'{"prompt": ["a", "b"]}', "it has 2 prompts: give each a line of its own"),
        (b'{"prompt": "x", "id": [1]}', "id must be a text or an integer, got [1]"),
        (b'{"prompt": "x", "id": 1, "custom_id": "b"}', "give one of them"),
        (b'{"messages": []}', "messages must be a list of"),
        (b'{"prompt": "x", "temprature": 1}', "unknown field 'temprature'; did you mean temperature?"),
        (b'{"prompt": "x", "temperature": -1}', "temperature must be 0 (greedy) or above, got -1"),
        (b'{"prompt": "x", "stream": true}', "stream must be left out here, got True"),
        (b'{"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}', "they mean the same"),
        (b'{"prompt": "x", "top_logprobs": 2}', "top_logprobs needs logprobs to be true, got None"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias must map token ids to numbers, got 'a'"),
        (b'{"prompt": "x", "response_format": {"type": "yaml"}}', "response_format must have the type text"),
        (b'{"prompt": "x", "url": "/v1/completions", "body": {}}', "set `format: openai`"),
        (b'{"prompt": "x", "logits_processors": []}', "logits_processors is served as null alone: leave it out"),
    ]:
        ask = read_line(3, line, "jsonl")
        assert ask.error is not None and message in ask.error
        assert ask.sampling == {}


def test_a_conversation_has_only_what_a_line_may_say(talker: LLM, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No template of its own, nor what is the program's to set; what the model's template asks for is the line's."""
    monkeypatch.setattr(template_bounds, "MOST_MADE_BYTES", 1 << 15)
    messages = [{"role": "user", "content": "x"}]
    cannot = "chat_template_kwargs cannot set '{}': a request may give"
    asked: list[tuple[Any, dict[str, Any], str | None]] = [
        (messages, {"polite": True}, None),
        (messages, {"chat_template": "{% for i in range(9) %}x{% endfor %}"}, cannot.format("chat_template")),
        (messages, {"tokenize": True}, cannot.format("tokenize")),
        (messages, {"tokenizer_kwargs": {}}, cannot.format("tokenizer_kwargs")),
        (messages, {"return_dict": True}, cannot.format("return_dict")),
        (messages, {"messages": []}, cannot.format("messages")),
        (messages, {"add_generation_prompt": False}, None),
        ([{"content": "x"}], {}, "a message must have a role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "content of type 'image_url' is not supported"),
        ([{"role": "user", "content": "x" * 50_000}], {}, "cannot be rendered with these messages: its values take"),
    ]
    done = run([json.dumps({"messages": chat, "chat_template_kwargs": options}) for chat, options, _ in asked])
    for record, (_, _, said) in zip(done.records, asked, strict=True):
        assert "error" not in record if said is None else said in record["error"]
    assert done.records[0]["usage"]["prompt_tokens"] == len(talker.render(messages, polite=True))


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
    for more, constraint in ({}, {"type": "object"}), ({"schema": schema}, schema):  # llama.cpp's form
        response_format = {"type": "json_object", **more}
        ask = read_line(1, json.dumps({"prompt": "x", "response_format": response_format}).encode(), "jsonl")
        assert ask.sampling == {"json_schema": constraint}
        assert CompletionRequest(prompt="x", response_format=response_format).params()["json_schema"] == constraint


def test_what_a_line_says_goes_before_what_the_run_says(run: Any, talker: LLM) -> None:
    lines = ['{"prompt": "x", "max_new_tokens": 2, "ignore_eos": false}', '{"prompt": "x", "regex": "a"}']
    done = run(lines, "--min-new-tokens", "4", "--ignore-eos", "--json-schema", "{}", "--seed", "1")
    (first, second) = done.records
    assert "json_schema and regex cannot be given together" in second["error"]
    assert first["finish_reason"] == "error" or first["usage"]["completion_tokens"] == 2


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
def test_from_wherever_it_was_cut_off_it_comes_out_the_same(run: Any, form: str, tmp_path: Path, served: Any) -> None:
    url = {"url": "/v1/completions"}
    texts = ["Natásha", "To be", "Call me", "x" * 5000]
    plain = [{"id": f"á{i}", "prompt": text} for i, text in enumerate(texts)]
    batch = [{"custom_id": p["id"], **url, "body": {"prompt": p["prompt"]}} for p in plain]
    few = ["--max-new-tokens", "2"]
    done = run([json.dumps(line) for line in (plain if form == "jsonl" else batch)], *few)
    assert done.status == 1 and len(done.records) == 4  # the last prompt is too long
    about = (tmp_path / "out.jsonl.run.json").read_bytes()
    served.told = {}
    again = run(None, "--json", *few)
    assert (again.status, again.content, served.told) == (1, done.content, {})
    assert "already complete with these settings" in again.err and json.loads(again.out)["resumed_lines"] == 4
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
        known = {"one": 1, "all": 4, "more than there is": 4}
        assert summary["resumed_lines"] == known.get(name, summary["resumed_lines"])
        assert (served.told == {}) == (known.get(name) == 4), "a model is loaded only where it is needed"


def test_other_settings_are_refused_until_it_is_begun_anew(run: Any, tmp_path: Path, served: Any) -> None:
    first = run(["Call me", "To be"], name="in.txt")
    assert run(None, "--temperature", "0", name="in.txt").err.startswith(
        f"pagetide: {first.path} already exists, made with other settings (sampling.temperature was not given and is 0)"
    )
    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
    for more, said in {
        ("--seed", "1"): "seed was 0 and is 1",
        ("--stop", "a", "--n", "1"): "sampling.n was not given and is 1, sampling.stop was not given and is ['a']",
        ("--device", "cuda"): "engine.device was 'auto' and is 'cuda'",
        ("--no-output-prompt",): "output.prompt was True and is False",
    }.items():
        refused = run(None, *more, name="in.txt")
        expected = f"was started with other settings: {said}; resume with the same, or start over with --restart"
        assert refused.status == 2 and expected in refused.err
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
    assert "its settings are unknown" in run(None, name="in.txt").err


def test_two_at_once_are_refused_and_a_bar_has_no_thread(run: Any, tmp_path: Path) -> None:
    assert run_module.Bar.monitor_interval == 0
    with (tmp_path / "out.jsonl.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = run(["Call me"], name="in.txt")
    assert refused.status == 2
    assert "another run is writing" in refused.err and "out.jsonl.part" in refused.err
    assert run(None, name="in.txt").status == 0


def test_a_full_disk_leaves_what_can_be_gone_on_with(run: Any, tmp_path: Path, served: Any) -> None:
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
    assert again.err.startswith("resuming: 2 of 3 records are complete, 1 to do\n")


def test_unfinished_lines_are_not_lost(run: Any, talker: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        {"prompt": "Call me", "max_tokens": 24},
        {"prompt": "To be", "max_tokens": 2},  # its record waits for the first one's
        {"prompt": "The sea", "max_tokens": 24, "stop": ["zzzz"], "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "He", "max_tokens": 9, "n": 2},  # begins anew
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 24},
    ]
    monkeypatch.setattr(output_module, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(output_module, "MOST_OF_TIME", 1e9)
    kept: list[list[bytes]] = []
    save = Output.save

    def saved(output: Output, make: Any) -> None:
        save(output, make)
        kept.append(output.unfinished.read_bytes().splitlines(keepends=True))

    monkeypatch.setattr(Output, "save", saved)
    results = llm_module._BlockingCall.results

    def after_a_step(call: Any, timeout_s: float | None = None) -> Any:
        if timeout_s is not None:
            step(talker)
            if call.pending.result is None:
                raise TimeoutError
        return results(call)

    monkeypatch.setattr(llm_module._BlockingCall, "results", after_a_step)
    whole = run([json.dumps(line) for line in lines])
    unfinished, target, part = (tmp_path / f"out.jsonl{end}" for end in (".unfinished.jsonl", "", ".part"))
    assert not unfinished.exists() and len(whole.records) == 6
    total = sum(record.get("usage", {}).get("completion_tokens", 0) for record in whole.records)
    last = next(content for content in kept if b'"record"' in b"".join(content))
    assert ["record" in entry for entry in map(json.loads, last)] == [False, True, False]
    for left, known in ((last, last), (kept[-1], kept[-1]), ([*last[:2], last[2][:-9], b"[1]\n"], last[:2]), ([], [])):
        target.unlink()
        part.touch()
        unfinished.write_bytes(b"".join(left))
        before = talker.stats()["generated_tokens"]
        again = run(None, "--json")
        begun = f", {len(known)} of them begun" if known else ""
        assert again.err.startswith(f"resuming: 0 of 6 records are complete, 6 to do{begun}\n")
        assert again.records == nearly(whole.records)
        tokens = [
            len(entry["request"]["token_ids"]) if "request" in entry else entry["record"]["usage"]["completion_tokens"]
            for entry in map(json.loads, known)
        ]
        assert talker.stats()["generated_tokens"] - before == total - sum(tokens)
    target.rename(part)
    unfinished.write_bytes(b"".join(last))
    assert "with other settings: seed was 0 and is 1" in run(None, "--seed", "1").err
    assert run(None, "--restart").records == nearly(whole.records) and not unfinished.exists()


class Told(Iterator[RequestOutput]):
    """What `generate_each` gives, as `ends` says for each line."""

    def __init__(self, ends: Callable[[int], RequestOutput], *inputs: Iterator[Any], exported: Iterator[Any]) -> None:
        self._each = (ends(i) for i, _ in enumerate(zip(*inputs, exported, strict=True)))
        self.wait, self.pending = lambda timeout_s: True, list

    def __next__(self) -> RequestOutput:
        return next(self._each)


def faulty(llm: LLM, ends: Callable[[int], RequestOutput]) -> Any:
    return SimpleNamespace(tokenizer=None, stats=llm.stats, generate_each=partial(Told, ends))


@pytest.fixture(scope="module")
def good(talker: LLM) -> RequestOutput:
    return talker.generate("x", SamplingParams(max_new_tokens=2))[0]


def test_errors_of_lines_and_too_many(run: Any, served: Any, talker: LLM, good: RequestOutput, tmp_path: Path) -> None:
    bad = replace(good, completions=(replace(good.completions[0], finish_reason="error", error="lost the device"),))
    served.llm = faulty(talker, lambda i: good if i in (0, 3) else bad)
    lines = ["x"] * 40
    failing = run(lines, name="in.txt")
    assert failing.status == 2
    assert "32 lines in a row failed in the engine, the last with: lost the device" in failing.err
    kept = [json.loads(line).get("error") for line in (tmp_path / "out.jsonl.part").read_bytes().splitlines()]
    assert kept == [None, "line 2: lost the device", "line 3: lost the device", None]
    served.llm = faulty(talker, lambda i: bad if i == 35 else good)
    done = run(None, name="in.txt")
    assert (done.status, len(done.records)) == (1, 40)
    assert [record["line"] for record in done.records if "error" in record] == [2, 3, 40]


def test_an_input_that_changes_meanwhile_is_noticed_and_an_interrupt_says_how_to_go_on(
    run: Any, served: Any, talker: LLM, good: RequestOutput, tmp_path: Path
) -> None:
    def changed(i: int) -> RequestOutput:
        if i == 0:
            (tmp_path / "in.txt").write_text("To be or\n" * 3000)
        return good

    def interrupted(i: int) -> RequestOutput:
        if i == 2:
            raise KeyboardInterrupt
        return good

    served.llm = faulty(talker, changed)
    refused = run(["Call me."] * 3000, name="in.txt")
    assert (refused.status, refused.path.exists()) == (2, False)
    assert "in.txt changed while it was read" in refused.err
    served.llm = faulty(talker, interrupted)
    (tmp_path / "out.jsonl.part").unlink()
    stopped = run(["x"] * 3, name="in.txt")
    assert (stopped.status, stopped.out) == (130, "")
    assert stopped.err.endswith("interrupted: 2 of 3 records are complete; the same command resumes\n")
    assert run(None, name="in.txt").status == 0


def config_of(file: Path, *flags: str) -> RunConfig:
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    return read_config(parser.parse_args(["--config", str(file), *flags]))


def configured(tmp_path: Path, text: str, *flags: str) -> RunConfig:
    (tmp_path / "run.yaml").write_text(text, "utf-8")
    return config_of(tmp_path / "run.yaml", *flags)


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
    assert config.engine == {"kv_memory": {"min": "1GiB", "max": "2GiB"}, "device": "cuda", "max_seqs": 5}
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
    assert config.engine == {
        "kv_memory": "1GiB", "device": "cuda", "max_seqs": 5, "prefix_caching": False, "block_size": "auto",
    }  # fmt: skip
    stops = SamplingParams(temperature=0.1, stop=["c", "d"], logit_bias={6: 2}, early_stopping="never", n=2)
    assert config.sampling == stops


def test_a_config_that_is_wrong_is_told_where(tmp_path: Path) -> None:
    for text, message in [
        ("input: a\noutput: b", "no model given: set `model:` in the file, or use --model"),
        ("model: demo\noutput: b", "no input given"),
        ("model: demo\ninput: {format: text}\noutput: b", "no input given"),
        ("model: demo\nimput: a", ":2: unknown key 'imput' at the top level; did you mean input?"),
        ("sampling:\n  temprature: 1", ":2: unknown key 'temprature' under `sampling`; did you mean temperature"),
        ("kv_memory: 1GiB", ":1: 'kv_memory' does not belong at the top level but under `engine`"),
        ("kv_memoy: 1GiB", ":1: unknown key 'kv_memoy' at the top level; did you mean kv_memory, under `engine`"),
        ("sampling: {seed: 1}", "'seed' does not belong under `sampling` but at the top level"),
        ("engine: {xyzzy: 1}", ":1: unknown key 'xyzzy' under `engine`; known are device, devices, tensor_par"),
        ("engine: {kv_memory: {maximum: 1GiB}}", ":3: kv_memory: unknown setting 'maximum'; did you mean max"),
        ("engine: {max_seqs: 0}", ":3: max_seqs must be an integer from 1 to 1,048,576, got 0"),
        ("engine: 5", ":1: engine must map some of device, devices, tensor_parallel_size, dtype"),
        ("engine: {max_seqs: 1, max_seqs: 2}", ":1: not valid YAML: 'max_seqs' appears twice, first in line 1"),
        ("model: 5", ":1: model must be a text, got 5"),
        ("seed: -1", ":3: seed must be an integer from 0 to 4,294,967,295, got -1"),
        ("input: {path: a, format: csv}", ":3: format must be one of auto, text, jsonl, openai, got 'csv'"),
        ("output: {path: a, prompt: 1}", ":3: prompt must be true or false, got 1"),
        ("sampling: {top_p: 2}", ":3: top_p must be in (0, 1], got 2"),
        ("5: 6", ":1: a key must be text, got '5'"),
        ("[1]", ": must map settings to values, as in `key: value`, got list"),
        ("a: [", ":1: not valid YAML"),
        (f"sampling: [&a [{'x, ' * 99}], &b [{'*a, ' * 99}], &c [{'*b, ' * 99}]]", "more than 100,000 values"),
        ("model: [" + "x, " * 5000 + "]", ":1: model must be a text, got ['x', 'x'"),
    ]:
        complete = text
        if ":3: " in message or "must be one of" in message or "true or false" in message:
            rest = {"model": "demo", "input": "a", "output": "b"}
            head = [f"{key}: {value}" for key, value in rest.items() if not text.startswith(key)]
            complete = "\n".join([*head[:2], text, *head[2:]])
        with pytest.raises(ConfigError) as caught:
            configured(tmp_path, complete)
        assert (f"run.yaml{message}" if message[0] == ":" else message) in str(caught.value)


def test_every_field_is_a_key() -> None:
    no_settings = {"seed", "logits_processors", "kept_special_tokens"}
    assert SECTIONS["sampling"].keys() | no_settings == {f.name for f in fields(SamplingParams)}
    # A secret stands neither in a file nor on a command line; a run has no use for events.
    neither = {"prefix_hash_secret", "kv_events"}
    of_llm = set(signature(LLM).parameters) - {"model", "tokenizer"} - neither
    assert SECTIONS["engine"].keys() == of_llm


def test_bad_arguments(run: Any) -> None:
    for more, message in [
        (("--config", "none.yaml"), "none.yaml: No such file or directory; check the path"),
        (("--input", "none.txt"), "none.txt: No such file or directory; check the path"),
        (("--input", "none"), "none: No such file or directory; check the path"),
        (("--output", "-"), "the output must be a file"),
        (("--output", "/none/out.jsonl"), "the output's folder /none is not there"),
        (("--model", "nosuch"), "'nosuch' is neither a known name nor a folder"),
        (("--temperature", "-1"), "--temperature: temperature must be 0 (greedy) or above"),
        (("--input-format", "csv"), "--input-format: format must be one of auto"),
    ]:
        refused = run(["x"], *more, name="in.txt")
        assert (refused.status, refused.out) == (2, "")
        assert message in refused.err and refused.err.startswith("pagetide: ") and refused.err.count("\n") == 1


def test_files_that_cannot_be(run: Any, tmp_path: Path) -> None:
    assert "does not tell its format" in run(["x"], name="in.csv").err
    (tmp_path / "folder").mkdir()
    assert "is a folder: name a file in it" in run(["x"], "--output", str(tmp_path / "folder"), name="in.txt").err
    for name in ("in.txt", "in.txt.part", "in.txt.run.json", "in.txt.run.json.new", "in.txt.unfinished.jsonl"):
        source = tmp_path / name
        source.write_text("Call me")
        flags = ("--output", str(tmp_path / "in.txt"), "--input", str(source), "--input-format", "text", "--restart")
        refused = run(None, *flags, "--overwrite", name="x.txt").err
        assert "would be written over by the run: name another output" in refused
        assert source.read_text() == "Call me"
        source.unlink()
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in run(["x"], "--output", str(tmp_path / "pipe"), "--overwrite", name="in.txt").err

    # Behind a link it is the target that is replaced.
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("old\n")
    link.symlink_to(target)
    done = run(["Call me"], "--output", str(link), "--overwrite", "--max-new-tokens", "2", name="in.txt")
    assert done.status == 0, done.err
    assert link.is_symlink() and "Call me" in target.read_text()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("run-*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    config = config_of(path, "--output", "out.jsonl")
    if path.name == "run-demo.yaml":
        assert Path(config.input.path).read_text("utf-8").count("\n") > 10


def test_the_example_for_24_gb_fits() -> None:
    """By the very arithmetic of `pagetide plan`, with the figures of Qwen2-7B's configuration."""
    from pagetide.engine.memory.memory_plan import working_reserve_bytes

    engine = config_of(CONFIGS / "run-qwen2-7b-24gb.yaml").engine
    shape = SimpleNamespace(
        hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064
    )
    sizes = engine["max_step_tokens"], engine["max_seqs"]
    reserve = working_reserve_bytes(shape, *sizes, "bfloat16", on_cpu=False)
    pool = parse_bytes(engine["kv_memory"]["max"])
    assert 7_615_616_512 * 2 + reserve + pool < 21 * GIB
    per_token = 28 * 2 * 4 * 128 * 2
    assert (per_token, pool // per_token, pool // per_token // engine["max_seqs"]) == (57_344, 112_347, 877)
    assert pool // per_token // engine["max_model_len"] == 27


BOM = b"\xef\xbb\xbf"


def test_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, expected in [
        (BOM, []),
        (BOM + b"\n", []),
        (BOM + b"\r\n", []),
        (BOM + b"a", [(1, b"a")]),
        (BOM + b"\n" + BOM + b"\n", [(2, BOM)]),  # a mark anywhere else is text
        (b"12345678", [(1, b"12345678")]),  # as long as a line may be
        (b"1234567\n", [(1, b"1234567")]),
        (b"12345678\nb\n", [(1, None), (2, b"b")]),
        (b"123456789", [(1, None)]),
        (b"1" * 30 + b"\nb", [(1, None), (2, b"b")]),
        (BOM + b"12345", [(1, b"12345")]),
    ]:
        monkeypatch.setattr(run_input, "LONGEST_LINE_BYTES", 8)
        path = tmp_path / "in.txt"
        path.write_bytes(content)
        source, digest = InputFile(InputOptions(str(path))), hashlib.sha256()
        assert list(source.lines(digest)) == expected
        assert digest.digest() == hashlib.sha256(content).digest()
        assert source.survey().num_lines == len(expected)
        source.close()


class _Key(str):
    """A key that counts how often one of its kind is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        _Key.num_compared += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


@pytest.mark.parametrize("twice", ["k0", "k1999"])
def test_a_key_that_stands_there_twice_is_found_in_one_pass(twice: str) -> None:
    pairs: list[tuple[str, Any]] = [(_Key(f"k{i}"), i) for i in range(2000)]
    _Key.num_compared = 0
    assert run_input._distinct(pairs) == dict(pairs)
    with pytest.raises(ValueError, match=f"the key '{twice}' appears twice"):
        run_input._distinct([*pairs, (_Key(twice), 5)])
    assert _Key.num_compared < 2 * len(pairs)  # a comparison each would be too many already


def test_a_long_name_is_not_repeated_in_full() -> None:
    name = "temprature" * 100_000
    for line in (f'{{"prompt": "x", "{name}": 1}}', f'{{"{name}": 1, "{name}": 2}}'):
        error = read_line(1, line.encode(), "jsonl").error
        assert error is not None and "tempratu" in error and len(error) < 200


def test_every_field_that_the_server_takes_is_known() -> None:
    """Of what changes no token in a file any value is taken; the others have a value that is."""
    pytest.importorskip("pydantic")
    from pagetide.server.fields import ANSWERS, AS_HERE, IGNORED, WITHOUT_EFFECT
    from pagetide.server.requests import ChatRequest, CompletionRequest

    values = {
        "n": 1, "best_of": 1, "temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "frequency_penalty": 0, "seed": 1,
        "presence_penalty": 0, "repetition_penalty": 1.0, "length_penalty": 1.0, "early_stopping": False, "logit_bias": {},
        "stop": ["x"], "stop_token_ids": [1], "bad_words": [], "ignore_eos": False, "skip_special_tokens": True,
        "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "prompt_logprobs": 0, "logprobs": True, "top_logprobs": 1,
        "add_special_tokens": True, "stream": False, "echo": False, "parallel_tool_calls": True, "modalities": ["text"],
        "tool_choice": "none", "tools": [], "use_beam_search": False, "return_token_ids": False, "suffix": "",
        "response_format": {"type": "text"}, "structured_outputs": {"choice": ["a.", "b"]}, "chat_template_kwargs": {},
        "add_generation_prompt": True, "continue_final_message": False, "documents": [], **AS_HERE,
    }  # fmt: skip
    for body, prompt in ((ChatRequest, "messages"), (CompletionRequest, "prompt")):
        content = {"messages": [{"role": "user", "content": "a"}]} if prompt == "messages" else {"prompt": "a"}
        for name in (*body.model_fields, *AS_HERE, *WITHOUT_EFFECT):
            if name in content or (prompt == "prompt" and name == "logprobs"):
                continue
            more = {"logprobs": True} if name == "top_logprobs" else {}
            line = json.dumps(content | more | {name: values.get(name, "any")}).encode()
            assert read_line(1, line, "jsonl").error is None, name
    for name, answer in ANSWERS.items():
        error = read_line(1, json.dumps({"prompt": "a", name: [5]}).encode(), "jsonl").error
        assert error is not None and (answer in error or name in (*run_input._SAMPLING, *run_input._RENAMED))
    fields = dict.fromkeys(IGNORED, 1) | {"options": {"num_ctx": 1}}
    assert read_line(1, json.dumps({"prompt": "a"} | fields).encode(), "jsonl").ignored == (*IGNORED, "num_ctx")
    for form, found in (
        ({"json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"choice": ["a.", "b"]}, {"regex": r"(a\.)|(b)"}),
        ({"json_object": True}, {"json_schema": {"type": "object"}}),
    ):
        assert read_line(1, json.dumps({"prompt": "a", "structured_outputs": form}).encode(), "jsonl").sampling == found
    for wrong in ({}, {"regex": 1}, {"json": {"a": 1}, "regex": "a"}, {"choice": [1]}, "json"):
        error = read_line(1, json.dumps({"prompt": "a", "structured_outputs": wrong}).encode(), "jsonl").error
        assert error is not None and "structured_outputs must have one of" in error


@pytest.mark.parametrize(("fields", "is_taken"), [
    ({"prompt": "a", "max_tokens": 0}, True), ({"prompt": "a", "max_tokens": -1}, False),
    ({"prompt": "a", "max_tokens": 0, "min_tokens": 2}, False), ({"prompt": "a", "stop": "\ud800"}, False),
    ({"prompt": "a", "bad_words": ["\udfff"]}, False), ({"prompt": "a", "stop": "\U0001f30a"}, True),
    *(({"messages": [{"role": role, "content": "a"}], **more}, is_taken) for role, more, is_taken in (
        ("robot", {}, False), ("tool", {}, True), ("developer", {}, True), ("user", {"max_tokens": 0}, False),
    )),
])  # fmt: skip
def test_a_line_is_taken_as_the_server_takes_it(fields: dict[str, Any], is_taken: bool) -> None:
    pytest.importorskip("pydantic")
    from pydantic import ValidationError

    from pagetide.server.errors import ApiError
    from pagetide.server.requests import ChatRequest

    body = ChatRequest if "messages" in fields else CompletionRequest
    try:
        body.model_validate_json(json.dumps(fields)).params()
        served = True
    except (ValidationError, ApiError):
        served = False
    url = f"/v1/{'chat/' if 'messages' in fields else ''}completions"
    request = {"custom_id": "a", "url": url, "body": fields}
    of_lines = {
        read_line(1, json.dumps(each).encode(), form).error is None for each, form in ((fields, "jsonl"), (request, "openai"))
    }
    assert (served, of_lines) == (is_taken, {is_taken})


def test_tools_of_a_line() -> None:
    tool = {"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}
    talk = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "parallel_tool_calls": False}
    ask = read_line(1, json.dumps({**talk, "tool_choice": "required"}).encode(), "jsonl")
    assert ask.error is None and ask.tools is not None
    given = [ask.tools[name] for name in ("tools", "tool_choice", "parallel_tool_calls")]
    assert given == [[tool], "required", False]
    for wrong, said in (
        ({"tools": [{"type": "function"}]}, "tools must be a list of"),
        ({"tools": [{"type": "x", "function": {"name": "a"}}]}, "tools must be a list of"),
        ({"tool_choice": "some"}, 'tool_choice must be "none", "auto"'),
        ({"tool_choice": {"type": "function", "function": {"name": "swim"}}}, "tool_choice names 'swim', tools has dive"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "cannot have another constraint beside it"),
    ):
        error = read_line(1, json.dumps(talk | wrong).encode(), "jsonl").error
        assert error is not None and said in error, wrong

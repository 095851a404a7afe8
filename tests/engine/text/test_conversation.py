"""What chat templates get of the messages of any API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_level import byte_level
from transformers import PreTrainedTokenizerFast

from pagetide.batch.input import read_line
from pagetide.engine.text.conversation import _parts, template_messages
from pagetide.engine.text.encoder import Encoder
from pagetide.scheduler.request import RequestRejected

HEAD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
TAIL = "{% endfor %}{% endfor %}"
# How published templates write the arguments of a call, and what stands in the prompt then.
ARGUMENTS = {
    "tojson": ('{"arguments": {{ c.function.arguments | tojson }}}', '{"arguments": {"city": "Zürich", "days": 2}}'),
    "items": ("{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}", "<city>Zürich<days>2"),
    "added": ("{{ 'json\\n' + c.function.arguments + '\\n' }}", 'json\n{"city": "Zürich", "days": 2}\n'),
    "printed": ("{{ c.function.arguments }}", '{"city": "Zürich", "days": 2}'),
    "either": ("{% set a = c.function.arguments %}{{ a if a is string else a|tojson }}", '{"city": "Zürich", "days": 2}'),
}
OBJECT = {"city": "Zürich", "days": 2}


def tokenizer(template: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(["abc"], 300, ["<s>", "</s>"]), chat_template=template)


def prompt(template: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    own = tokenizer(template)
    return str(own.decode(Encoder(own, 300, None, 4096).render(messages, options)))


def call(arguments: Any) -> list[dict[str, Any]]:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "no"},
    ]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_earlier_calls_have_the_form_that_the_template_needs(name: str) -> None:
    template, written = ARGUMENTS[name]
    for given in (OBJECT, json.dumps(OBJECT, ensure_ascii=False)):
        text = prompt(HEAD + template + TAIL, call(given))
        assert text == f"[user]Rain?[assistant]{written}[tool]no", given


def test_the_content_has_the_form_in_which_the_template_shows_it() -> None:
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No"}]
    called, parts = call(json.dumps(OBJECT)), [{**turn, "content": _parts(turn["content"])} for turn in turns]
    for given, shown, template in (
        ([called[0], {**called[1], "content": ""}], called[:2], "{% if m.content is defined %}[{{ m.role }}]{{ m.content }}"
         "{% else %}{{ '<call>' + m.tool_calls[0].function.arguments }}{% endif %}"),
        (turns, parts, "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }};{% endfor %}"),
        (parts, [parts[0], turns[1]], "{{ m.content[0].text if m.role == 'user' else '|' + m.content }}"),
    ):  # fmt: skip
        template = "{% for m in messages %}" + template + "{% endfor %}"
        expected = tokenizer(template).apply_chat_template(shown, tokenize=False)
        assert prompt(template, given) == prompt(template, shown) == expected
        assert "No" in expected or "<call>" in expected, "the row shows nothing"


def test_a_template_that_tests_the_content_for_none_shows_calls() -> None:
    """As DeepSeek's: transformers drops the None. Other tests for None keep their meaning in other conversations."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{{ '<call>' + m['tool_calls'][0]['function']['arguments'] }}"
        "{% elif m['content'] is not none %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}{{ absent is none }}"
    )
    arguments = json.dumps(OBJECT, ensure_ascii=False)
    for content in (None, "", []):
        messages = call(arguments)
        messages[1]["content"] = content
        assert prompt(template, messages) == f"[user]Rain?<call>{arguments}[tool]noTrue"
    messages[1]["content"] = "Well"
    assert prompt(template, messages) == "[user]Rain?[assistant]Well[tool]noFalse"


def test_a_template_without_calls_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ absent is none }}"
    own = Encoder(tokenizer(template), 300, None, 4096)
    for _ in range(2):
        assert own.tokenizer.decode(own.render(call(OBJECT), {})) == "[user]Rain?[assistant][tool]noFalse"
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the model's chat template shows no tool calls"]


def test_arguments_that_are_no_json_object_and_none() -> None:
    template = HEAD + "{{ c.function.arguments | tojson }}" + TAIL
    for given, written in (("{broken", '"{broken"'), ("[1]", '"[1]"'), ("", "{}"), (None, "{}"), ({}, "{}")):
        assert prompt(template, call(given)) == f"[user]Rain?[assistant]{written}[tool]no", given
    flat = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}, "odd"]}]
    (message,) = template_messages(tokenizer("x"), flat, {})
    assert message["tool_calls"] == [{"name": "f", "arguments": {"x": 1}}, "odd"]  # transformers' form
    assert flat[0]["tool_calls"][0] == {"name": "f", "arguments": '{"x": 1}'}, "the caller's messages stay"


def test_contents_roles_and_other_keys() -> None:
    template = "{% for m in messages %}{{ m | dictsort | map('join', '=') | join(';') }}|{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    messages = [
        {"role": "developer", "content": parts, "name": "n"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "own": 1},
        {"role": "assistant"},
    ]
    assert prompt(template, messages) == (
        "content=a\nb\nc;name=n;role=system|"
        "content=;own=1;reasoning_content=r;role=assistant;thinking=r|content=;role=assistant|"
    )
    assert prompt("{# developer #}" + template, messages[:1]).endswith("role=developer|")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, "a message must have a role"),
        ({"role": 1, "content": "x"}, "a message must have a role"),
        ({"role": "user", "content": 5}, "a text or a list of parts, got 5"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content of type 'image_url' is not supp"),
        ({"role": "user", "content": [{"type": "text"}]}, "content of type 'text' is not supported"),
        ({"role": "user", "content": ["x"]}, "the part 'x' is not supported"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "is not supported: only text is"),
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestRejected, match=said):
        prompt("{{ messages }}", [message])
    with pytest.raises(RequestRejected, match="a conversation is a list of"):
        prompt("{{ messages }}", [said])  # type: ignore[list-item]


def test_of_named_templates_tools_choose_theirs() -> None:
    named = {"default": "plain:" + HEAD + TAIL, "tool_use": "tools:{{ tools | length }}"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert prompt(named, call({})).startswith("plain:[user]Rain?")
    assert prompt(named, call({}), tools=tools) == "tools:1"
    with pytest.raises(RequestRejected, match="there is no chat template to use"):
        prompt({"a": "x", "b": "y"}, call({}))


def test_the_server_and_a_file_of_requests_pass_messages_as_they_are() -> None:
    pytest.importorskip("pydantic")
    from pagetide.server.requests import ChatRequest

    messages = [*call('{"x": 1}'), {"role": "user", "content": [{"type": "text", "text": "a", "k": 1}], "own": [1]}]
    body = ChatRequest.model_validate({"model": "m", "messages": messages})
    assert [message.model_dump(exclude_unset=True) for message in body.messages] == messages
    line = read_line(1, json.dumps({"messages": messages}).encode(), "jsonl")
    assert (line.error, line.messages) == (None, messages)

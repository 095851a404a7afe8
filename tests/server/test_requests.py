"""The fields of requests: which are accepted, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pagetide.server.app import AppOptions, Server
from pagetide.server.errors import ApiError
from pagetide.server.fields import IGNORED
from pagetide.server.keys import ApiKeys
from pagetide.server.models import ModelRegistry
from pagetide.server.requests import ChatRequest, CompletionRequest, TokenizeRequest, from_validation

MESSAGES: Any = [{"role": "user", "content": "a"}]
AS_HERE = {
    "spaces_between_special_tokens": True, "detokenize": True, "separate_reasoning": True,
    "include_stop_str_in_output": False, "truncate_prompt_tokens": None, "return_tokens_as_token_ids": False,
}  # fmt: skip
FLAGS = {name: value for name, value in AS_HERE.items() if value is not None}


def bodies(fields: dict[str, Any]) -> list[ChatRequest | CompletionRequest]:
    return [
        ChatRequest.model_validate({"messages": MESSAGES} | fields),
        CompletionRequest.model_validate({"prompt": "a"} | fields),
    ]


def test_fields_that_change_nothing_are_accepted() -> None:
    chat = {"prediction": {"type": "content", "content": "a"}, "web_search_options": {}}
    bodies(chat)[0].check_fields(False)
    nothing = ("prediction", "web_search_options", "audio", "functions", "function_call", "suffix", "tools", "best_of")
    for body in bodies(AS_HERE | dict.fromkeys(nothing)):
        body.check_fields(False)


def test_fields_that_are_not_served_say_so() -> None:
    for field, value, message in (
        *((name, not value, f"{name} is served as {str(value).lower()} alone") for name, value in FLAGS.items()),
        ("detokenize", 1, "detokenize is served as true alone: leave it out"),
        ("truncate_prompt_tokens", 5, "truncate_prompt_tokens is served as null alone"),
        ("mirostat", 2, "mirostat is served as 0 alone"), ("functions", [], 'write "tools"'),
        ("function_call", "auto", 'write "tool_choice"'), ("audio", {"voice": "a"}, "only text is served"),
        ("think", False, 'write "enable_thinking" or "reasoning_effort"'),
        ("repeat_penalty", 1.1, 'write "repetition_penalty"'),
        ("options", {"num_ctx": 5, "temperature": 0}, "write its 'temperature' at the top of the request"),
        ("options", {"num_predict": 5}, "unknown field 'num_predict': write \"max_tokens\""),
        ("options", [], "unknown field 'options': write its fields at the top"),
        ("guided_json", 1, ': write "structured_outputs": {"json": ...}, or "response_format"'),
        ("guided_regex", 1, ': write "structured_outputs": {"regex": ...}'),
        ("guided_grammar", 1, ': write "structured_outputs": {"grammar": ...}'),
        ("guided_choice", 1, ': write "structured_outputs": {"choice": ...}'),
        ("do_sample", 1, 'unknown field \'do_sample\': write "temperature": 0 for greedy output, or a "temperature" above 0'),
        ("max_tokenz", None, "unknown field 'max_tokenz'; did you mean 'max_tokens'?"), ("quux", 1, "unknown field 'quux'"),
    ):  # fmt: skip
        for body in bodies({field: value}):
            with pytest.raises(ApiError) as caught:
                body.check_fields(False)
            assert message in caught.value.message and (caught.value.param, caught.value.status) == (field, 400)
            assert ("did you mean" in caught.value.message) is (field == "max_tokenz")
            assert body.check_fields(True) == []


def test_fields_of_other_servers_that_change_nothing_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"repeat_penalty": 1.0, "mirostat": 0, "typical_p": 1, "n_probs": 0, "format": "", "best_of": None}
    options = {"num_thread": 8, "top_k": None}
    given = {**neutral, "num_ctx": 4096, "keep_alive": "5m", "num_gpu": None, "options": options}
    for body in bodies(given):
        assert body.check_fields(False) == ["num_ctx", "keep_alive", "num_thread"]
    server = Server(ModelRegistry(), ApiKeys(), AppOptions())
    for body in bodies({"num_ctx": 4096}) * 2:
        server.check_fields(body)
    assert [one.getMessage() for one in caplog.records] == [f"requests give num_ctx, which is ignored: {IGNORED['num_ctx']}"]


PARTS = "give a text, or a list of parts"
PROMPTS = "give a text, token ids (from 0 to 2,147,483,647), or a list of them"
WRONG: list[tuple[Any, dict[str, Any], str, str]] = [
    (ChatRequest, {"tool_choice": "zzz"}, "tool_choice", 'give "none", "auto", "required", {'),
    (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice", 'give "none"'),
    (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", PARTS),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * 99}]}, "messages.0.content", PARTS),
    (ChatRequest, {"messages": [{"role": "user", "tool_calls": [{}] * 99}]}, "messages.0.tool_calls.0.function", "is"),
    (ChatRequest, {"tools": [{}] * 99}, "tools.0.type", "is missing"),
    (ChatRequest, {"documents": [1] * 99}, "documents.0", "Input should be a valid dictionary"),
    (ChatRequest, {"modalities": ["x"] * 99}, "modalities.0", "Input should be 'text'"),
    (TokenizeRequest, {"messages": [{}] * 99}, "messages.0.role", "is missing"),
    (TokenizeRequest, {"tools": [{}] * 99}, "tools.0.type", "is missing"),
    (ChatRequest, {"logit_bias": {"4": "1.5", "5": "x"} | dict.fromkeys("abcdefgh")}, "logit_bias.5", "Input should"),
    (ChatRequest, {"messages": [{"role": "whale"}]}, "messages.0.role", "Input should be 'system'"),
    (ChatRequest, {"stream_options": 5}, "stream_options", "Input should be"),
    (CompletionRequest, {"prompt": [1, "a"]}, "prompt", PROMPTS),
    (CompletionRequest, {"prompt": [-1]}, "prompt", PROMPTS),
    (CompletionRequest, {"prompt": ["a"] * 2049}, "prompt", "Value should have at most 2048 items"),
    (CompletionRequest, {"stop": [1]}, "stop", "give a text, or a list of texts"),
    (CompletionRequest, {"early_stopping": "maybe"}, "early_stopping", 'give true, false or "never"'),
    (CompletionRequest, {"max_tokens": "x"}, "max_tokens", "Input should be a valid integer"),
]


def test_errors_name_the_field_or_the_parameter_and_what_it_takes() -> None:
    for kind, fields, param, message in WRONG:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({"messages": MESSAGES, "prompt": "a"} | fields)
        error = from_validation(list(caught.value.errors()))
        assert error.param == param and error.message.startswith((f"{param}: {message}", f"{param} {message}")), fields
        assert caught.value.error_count() <= 4, fields  # not thousands, which take long to say
    fault = {"type": "int_parsing", "loc": ("query", "level"), "msg": "Input should be a valid integer"}
    error = from_validation([fault])
    assert (error.param, error.message) == ("level", "level: Input should be a valid integer")


def test_what_beams_exclude_is_refused() -> None:
    for name, value in {"best_of": 4, "logprobs": 2, "prompt_logprobs": 0, "stop": ["a"]}.items():
        body = CompletionRequest.model_validate({"prompt": "a", "n": 4, "use_beam_search": True, name: value})
        with pytest.raises(ApiError, match=f"{name} cannot be given with use_beam_search"):
            body.params()


def test_no_log_probabilities_may_be_said_as_false() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "logprobs": False})
    assert body.logprobs is None and "logprobs" not in body.params()
    assert CompletionRequest.model_validate({"prompt": "a", "logprobs": 0}).params()["logprobs"] == 0

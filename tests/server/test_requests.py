"""The fields of requests: which are accepted, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from pagetide.server.errors import ApiError
from pagetide.server.requests import ChatRequest, CompletionRequest, from_validation

MESSAGES: Any = [{"role": "user", "content": "a"}]
AS_HERE = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "detokenize": True, "include_reasoning": True,
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((name, not value, f"{name} is served as {str(value).lower()} alone") for name, value in FLAGS.items()),
        ("skip_special_tokens", 1, "skip_special_tokens is served as true alone: leave it out"),
        ("truncate_prompt_tokens", 5, "truncate_prompt_tokens is served as null alone"),
        ("functions", [], 'write "tools"'),
        ("function_call", "auto", 'write "tool_choice"'),
        ("audio", {"voice": "a"}, "only text is served"),
        ("max_tokenz", None, "did you mean 'max_tokens'"),
    ],
)  # fmt: skip
def test_fields_that_are_not_served_say_so(field: str, value: Any, message: str) -> None:
    for body in bodies({field: value}):
        with pytest.raises(ApiError) as caught:
            body.check_fields(False)
        assert message in caught.value.message and caught.value.param == field and caught.value.status == 400
        body.check_fields(True)


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        (ChatRequest, {"tool_choice": "zzz"}, "tool_choice", 'give "none", "auto", "required" or {'),
        (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice", 'give "none"'),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "give a text, or a list of parts",
        ),
        (ChatRequest, {"messages": [{"role": "whale"}]}, "messages.0.role", "Input should be 'system'"),
        (ChatRequest, {"stream_options": 5}, "stream_options", "Input should be"),
        (
            CompletionRequest,
            {"prompt": [1, "a"]},
            "prompt",
            "give a text, token ids (from 0 to 2,147,483,647), or a list of them",
        ),
        (CompletionRequest, {"prompt": [-1]}, "prompt", "give a text, token ids (from 0"),
        (CompletionRequest, {"prompt": ["a"] * 2049}, "prompt", "Value should have at most 2048 items"),
        (CompletionRequest, {"stop": [1]}, "stop", "give a text, or a list of texts"),
        (CompletionRequest, {"early_stopping": "maybe"}, "early_stopping", 'give true, false or "never"'),
        (CompletionRequest, {"logit_bias": {"5": "x"}}, "logit_bias.5", "Input should be a valid number"),
        (CompletionRequest, {"max_tokens": "x"}, "max_tokens", "Input should be a valid integer"),
    ],
)
def test_errors_name_the_field_and_what_it_takes(kind: Any, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"messages": MESSAGES, "prompt": "a"} | fields)
    error = from_validation(list(caught.value.errors()))
    assert error.param == param and error.message.startswith(f"{param}: {message}")


def test_errors_of_the_query_name_the_parameter() -> None:
    error = from_validation(
        [{"type": "int_parsing", "loc": ("query", "level"), "msg": "Input should be a valid integer"}]
    )
    assert (error.param, error.message) == ("level", "level: Input should be a valid integer")

"""A tokenizer's own response template: transformers' parser is the oracle for answers that it can parse."""

from __future__ import annotations

import json
import random
from typing import Any

import torch  # noqa: F401  (transformers looks for it)
from transformers.utils.chat_parsing import parse_response

from pagetide.server.answers import AnswerReader
from pagetide.server.response_templates import choose_template

OWN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}  # fmt: skip
TOOLS = {"tools": [{"type": "function", "function": {"name": "dive"}}]}


def test_answers_that_transformers_parses_are_parsed_alike() -> None:
    template, draw = choose_template(None, json.dumps(OWN)), random.Random(0)
    assert template.name == "own"
    for prompt in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"):
        for _ in range(300):
            words = [draw.choice(["Down", "we", "go", "{", "<", "ä", "1 < 2", "\n"]) for _ in range(draw.randint(1, 9))]
            thought = " ".join(words)
            calls = [
                {"name": "dive", "arguments": {"depth": draw.random(), "note": " ".join(words)}}
                for _ in range(draw.randint(0, 3))
            ]
            text = "" if prompt.endswith("<think>\n") else "<think>\n"
            text += f"{thought}\n</think>\n\n" + ("" if calls else " ".join(words))
            text += "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
            wanted = parse_response(text, OWN, prefix=prompt)
            reader = AnswerReader(TOOLS, template)
            reader.prompt_end = prompt
            found = reader.read(0, text)
            assert found.reasoning == wanted.get("reasoning_content", "")
            assert found.content.strip() == wanted.get("content", "")
            named = [{"name": call.name, "arguments": json.loads(call.text)} for call in found.calls]
            assert named == [call["function"] for call in wanted.get("tool_calls", ())]

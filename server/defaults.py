"""The API's defaults: what a request gets that leaves a parameter open, and which options of a chat template it may set.

Used by processes that hold a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..api.sampling_params import SamplingParams
from ..scheduler.request import PromptTooLong
from .messages import Submit

API_TEMPERATURE = 1.0  # OpenAI's default, for models with a generation config that samples nothing
# Options of the chat template that the server sets; a request's own go through `options_from_data`.
_TRUSTED_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template")


def completed(
    submit: Submit, params: SamplingParams, num_prompt: int, max_model_len: int, temperature: float | None
) -> SamplingParams:
    """The parameters of a request with `num_prompt` prompt tokens. `temperature` is the model's. Raises PromptTooLong."""
    room = max_model_len - num_prompt
    if params.max_new_tokens is None and submit.fills_context and room > 0:
        params = replace(params, max_new_tokens=max(room, params.min_new_tokens or 0))
    elif submit.strict_length and params.max_new_tokens is not None and params.max_new_tokens > room:
        raise PromptTooLong(
            f"the model's context is {max_model_len:,} tokens; the prompt has {num_prompt:,} and max_tokens asks for "
            f"{params.max_new_tokens:,} more: shorten the prompt, or ask for at most {max(room, 0):,} tokens"
        )
    if params.temperature is None:
        params = replace(params, temperature=temperature or API_TEMPERATURE)
    return params


def by_prompt_end(submit: Submit, params: SamplingParams, end: str) -> SamplingParams:
    """`params` for a prompt with this end: another grammar holds where it opens reasoning."""
    other = submit.reasoning_grammar
    if other is None or not end.rstrip().endswith(tuple(text.rstrip() for text in other.opens)):
        return params
    return replace(params, grammar=other.grammar)


def template_options(tokenizer: Any, template: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `chat` for a request's `template`. Raises RequestRejected."""
    from ..engine.text.chat_template import options_from_data

    trusted = {name: template[name] for name in _TRUSTED_OPTIONS if name in template}
    others = {name: value for name, value in template.items() if name not in trusted}
    return {**options_from_data(tokenizer, others), **trusted}

"""Fields of requests that are no settings here, and what to write instead: one table for the server and for files of requests.

OpenAI's, vLLM's, SGLang's, llama.cpp's and Ollama's names, and those of clients. A field that changes no token is ignored;
one that would change the answer is refused, with the field that does it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]  # of a message

# OpenAI's and Anthropic's, accepted with any value.
WITHOUT_EFFECT = (
    "cache_control", "client_metadata", "container", "context_management", "diagnostics", "include", "inference_geo",
    "kv_hints", "max_tool_calls", "mcp_servers", "moderation", "prompt_cache_options", "speed", "truncation",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "prediction", "web_search_options",
)  # fmt: skip

_AT_START = "the engine's settings are those of the server's start"
_ONE_SERVER = "this server has one provider for each model"
_NEEDS = 'it changes nothing without "{}", which is not served'

# Other servers' fields that change no token: accepted with any value, and logged the first time, with the reason.
IGNORED: dict[str, str] = {
    "num_ctx": "the context is set by --max-model-len at the start; longer prompts are refused",
    "keep_alive": "--keep-alive sets it; Ollama's endpoints take it",
    **dict.fromkeys(
        ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock", "low_vram", "f16_kv",
         "vocab_only", "logits_all"),
        _AT_START,
    ),
    **dict.fromkeys(
        ("truncate", "shift", "num_keep", "n_keep", "n_discard", "truncation_side"),
        "prompts are never cut; too long ones are refused",
    ),
    **dict.fromkeys(
        ("cache_prompt", "n_cache_reuse", "id_slot", "slot_id"),
        "prefix caching is on, unless --no-prefix-caching turned it off at the start",
    ),
    **dict.fromkeys(("timings_per_token", "return_progress", "response_fields"), "answers have OpenAI's form"),
    **dict.fromkeys(
        ("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type", "ngram_corpus_id",
         "draft_model"),
        "there is no speculative decoding",
    ),
    "backend_sampling": _AT_START, "guided_decoding_backend": "llguidance holds the constraint",
    "stream_interval": "a stream sends the tokens of each step", "rid": "the header x-request-id names a request",
    **dict.fromkeys(("session_id", "custom_labels"), "requests stand alone"),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank"), "the server chooses the engine"),
    **dict.fromkeys(("provider", "route"), _ONE_SERVER), "ttl": "see --keep-alive and POST /sleep",
    "usage": 'every answer has it; streams with "stream_options": {"include_usage": true}',
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), _NEEDS.format("mirostat")),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        _NEEDS.format("dry_multiplier"),
    ),
    "xtc_threshold": _NEEDS.format("xtc_probability"), "dynatemp_exponent": _NEEDS.format("dynatemp_range"),
}  # fmt: skip

# Other servers' fields, with the value that says what happens here anyway; other values are refused.
AS_HERE: dict[str, Any] = {
    "spaces_between_special_tokens": True, "detokenize": True, "include_reasoning": True, "stream_reasoning": True,
    "separate_reasoning": True, "parse_tool_calls": True, "penalize_newline": True, "parse_special": True,
    "add_special_tokens": False,  # of a chat
    "include_stop_str_in_output": False, "no_stop_trim": False, "return_tokens_as_token_ids": False,
    "thinking_forced_open": False, "return_prompt_text": False, "return_token_offsets": False,
    "return_hidden_states": False, "return_routed_experts": False, "return_cached_tokens_details": False,
    "post_sampling_probs": False, "watermarking": False, "safe_prompt": False, "raw": False,
    "truncate_prompt_tokens": None, "allowed_token_ids": None, "logits_processors": None, "custom_logit_processor": None,
    "custom_params": None, "mm_processor_kwargs": None, "media_io_kwargs": None, "kv_transfer_params": None,
    "ec_transfer_params": None, "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None, "vllm_xargs": None,
    "chat_template": None, "prompt_embeds": None, "thinking_token_budget": None, "logprob_token_ids": None,
    "repetition_detection": None, "guided_whitespace_pattern": None, "session_params": None, "lora_path": None,
    "lora": [], "transforms": [], "plugins": [], "samplers": None, "min_keep": 0, "n_indent": 0,
    "routed_experts_start_len": 0, "routed_experts_prompt_start": 0, "t_max_predict_ms": 0, "reasoning_format": "none",
    "repeat_last_n": -1, "repeat_penalty": 1, "mirostat": 0, "typical_p": 1, "tfs_z": 1, "top_a": 0, "top_n_sigma": -1,
    "dynatemp_range": 0, "xtc_probability": 0, "dry_multiplier": 0, "n_probs": 0, "reasoning_budget": -1, "format": "",
    "guided_json_object": False, "return_tokens": False,
}  # fmt: skip

# Other servers' fields, and what to write here.
_GUIDED = 'write "structured_outputs": {{{}: ...}}'
_LARK = _GUIDED.format('"grammar"') + ", in Lark's notation"
_THINK = 'write "enable_thinking" or "reasoning_effort", in a chat'
ANSWERS = {
    **dict.fromkeys(("guided_json", "json_schema"), _GUIDED.format('"json"') + ', or "response_format"'),
    **dict.fromkeys(("guided_regex", "regex"), _GUIDED.format('"regex"')),
    "guided_grammar": _GUIDED.format('"grammar"'), "grammar": _LARK, "ebnf": _LARK,
    "guided_choice": _GUIDED.format('"choice"'),
    **dict.fromkeys(("guided_json_object", "format"), 'write "response_format": {"type": "json_object"}, or a schema'),
    "do_sample": 'write "temperature": 0 for greedy output, or a "temperature" above 0',
    "functions": 'write "tools": [{"type": "function", "function": {...}}]',
    "function_call": 'write "tool_choice"',
    **dict.fromkeys(("audio", "images", "images_config"), "only text is served"),
    **dict.fromkeys(("num_predict", "n_predict", "max_new_tokens", "max_output_tokens", "max_gen_len"), 'write "max_tokens"'),
    "max_length": 'write "max_tokens", which does not count the prompt',
    **dict.fromkeys(("min_new_tokens", "min_length"), 'write "min_tokens"'),
    **dict.fromkeys(("num_return_sequences", "n_cmpl"), 'write "n"'),
    "num_beams": 'write "use_beam_search": true, with as many beams as "n"',
    "repeat_penalty": 'write "repetition_penalty", which counts the whole text',
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_regex"), 'write "stop", a text or a list of texts'),
    **dict.fromkeys(("eos_token_id", "end_id"), 'write "stop_token_ids"'),
    "random_seed": 'write "seed"', "extra_key": 'write "cache_salt"',
    "n_probs": 'write "logprobs"', "return_tokens": 'write "return_token_ids"',
    **dict.fromkeys(("think", "thinking", "enable_thinking", "reasoning"), _THINK),
    **dict.fromkeys(("thinking_budget", "reasoning_budget"), '"max_tokens" bounds the whole output'),
    "system": 'write a message of the role "system"', "template": "--chat-template sets it at the start",
    "content": 'write "prompt", or "messages"', "with_pieces": 'write "return_token_strs"',
    "add_special": 'write "add_special_tokens"', "context": "write the earlier tokens into the prompt",
    "models": 'write "model"', "extra_body": "write its fields at the top of the request",
}  # fmt: skip


class FieldRefused(ValueError):
    """A field is not served; the message says what to write."""


def ignored_fields(name: str, value: Any) -> list[str] | None:
    """Of a field without effect, the names in `IGNORED`, for the log; None for a name that is not in the table.

    Ollama's `options` has several. Raises FieldRefused.
    """
    if name == "options":
        if not isinstance(value, Mapping | None):
            raise FieldRefused("unknown field 'options': write its fields at the top of the request")
        return [found for inner, given in (value or {}).items() for found in _of_options(inner, given)]
    if name in IGNORED:
        return [] if value is None else [name]
    if name not in AS_HERE and name not in ANSWERS:
        return [] if name in WITHOUT_EFFECT else None
    if value is None or (name in AS_HERE and _is_same(value, AS_HERE[name])):
        return []
    if name in ANSWERS:
        raise FieldRefused(f"unknown field {name!r}: {ANSWERS[name]}")
    raise FieldRefused(f"{name} is served as {json.dumps(AS_HERE[name])} alone: leave it out")


def _of_options(name: str, value: Any) -> list[str]:
    found = [] if value is None else ignored_fields(name, value)
    if found is None:
        raise FieldRefused(f"unknown field 'options': write its {name!r:.80} at the top of the request")
    return found


def _is_same(value: Any, here: Any) -> bool:
    """Whether two JSON values are equal: true is not 1."""
    return bool(value == here) and isinstance(value, bool) == isinstance(here, bool)

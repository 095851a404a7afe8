"""Converts an engine's outputs and errors to the messages that carry them. Used by processes that hold an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..scheduler.request import PromptTooLong, RequestRejected
from .messages import ErrorKind, Piece, RequestEnd, Score, WholeScores, token_text

if TYPE_CHECKING:
    from ..engine.requests.outputs import Completion, RequestOutput, StreamChunk, TokenLogprobs

PROMPT_END_TOKENS = 32  # at the end of a prompt, of which the text tells whether it opened reasoning
MOST_DETOKENIZED = 65_536  # tokens of a call, or the model's context

AT_ONCE = 4096  # likely tokens of which the event loop makes messages between two turns

MakeScores = Callable[[Any, Sequence[int]], "list[Score] | None"]


class Asleep(Exception):
    """The model is asleep."""


def error_kind(error: Exception) -> ErrorKind:
    """The kind of `Failed` for an error of the engine."""
    from ..engine.errors import EngineClosed, NotEnoughMemory

    if isinstance(error, PromptTooLong):
        return "too_long"
    if isinstance(error, RequestRejected | ValueError | TypeError):
        return "invalid"
    if isinstance(error, NotEnoughMemory):
        return "memory"
    return "unavailable" if isinstance(error, Asleep | EngineClosed) else "internal"


@lru_cache(maxsize=1 << 16)
def token_bytes_of(tokenizer: Any, token_id: int) -> bytes:
    """The text of a token by itself, in UTF-8; empty without a tokenizer."""
    from ..engine.text.detokenizer import token_bytes

    return b"" if tokenizer is None else token_bytes(tokenizer, token_id)


def detokenized(tokenizer: Any, tokens: Sequence[int], vocab_size: int, max_model_len: int) -> str:
    """The text of token ids. Raises RequestRejected."""
    if tokenizer is None:
        raise RequestRejected("the model has no tokenizer: it serves token ids only")
    if len(tokens) > (most := max(MOST_DETOKENIZED, max_model_len)):
        raise RequestRejected(f"at most {most:,} tokens are detokenized at a time, got {len(tokens):,}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise RequestRejected(f"token ids must be from 0 to {vocab_size - 1:,}")
    if len(tokens) <= MOST_DETOKENIZED:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    # One call would hold the GIL for longer than streams may wait.
    from ..engine.text.detokenizer import Detokenizer

    text = Detokenizer(tokenizer, (), skip_special_tokens=False)
    return text.push(tokens) + text.finish()


def prompt_end(tokenizer: Any, prompt: Sequence[int]) -> str:
    """The text of the last tokens of a prompt, with special tokens; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(list(prompt[-PROMPT_END_TOKENS:]), clean_up_tokenization_spaces=False))


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """What `ModelInfo` says of a tokenizer."""
    from ..engine.text.chat_template import tool_template
    from ..engine.text.detokenizer import special_tokens

    own = getattr(tokenizer, "response_template", None)
    return {
        "has_tokenizer": tokenizer is not None,
        "chat_template": tool_template(tokenizer),
        "special_tokens": () if tokenizer is None else tuple(special_tokens(tokenizer)),
        "response_template": json.dumps(own, ensure_ascii=False) if isinstance(own, dict) else "",
        "added_tokens": added_tokens(tokenizer),
        "constrains": find_spec("llguidance") is not None and hasattr(tokenizer, "backend_tokenizer"),
    }


@lru_cache(maxsize=8)
def added_tokens(tokenizer: Any) -> dict[str, int]:
    """The added tokens of a tokenizer and their ids."""
    known: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return dict(known)


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token by itself."""
    return [token_text(token_bytes_of(tokenizer, token_id)) for token_id in tokens]


def scores(tokenizer: Any, logprobs: Sequence[TokenLogprobs | None] | None, ids: Sequence[int]) -> list[Score] | None:
    """The log-probabilities of the tokens `ids`, of which the first of a prompt has none."""
    if logprobs is None:
        return None
    return [
        Score.of(
            token_id,
            token_bytes_of(tokenizer, token_id),
            None if one is None else one.logprob,
            0 if one is None else one.rank,
            [] if one is None else [(i, token_bytes_of(tokenizer, i), logprob) for i, logprob in one.top],
        )
        for token_id, one in zip(ids, logprobs, strict=False)  # a request that ended early scored a part of its prompt
    ]


async def scores_in_parts(
    make: MakeScores, logprobs: Sequence[TokenLogprobs | None], ids: Sequence[int]
) -> AsyncIterator[list[Score]]:
    """As `make`, in parts between which the event loop turns; at least one."""
    last = logprobs[-1] if logprobs else None
    step = max(1, AT_ONCE // (1 + (0 if last is None else len(last.top))))
    for begin in range(0, max(len(logprobs), 1), step):
        if begin:
            await asyncio.sleep(0)
        yield make(logprobs[begin : begin + step], ids[begin : begin + step]) or []


def piece_of(number: int, chunk: StreamChunk, make: MakeScores) -> Piece:
    """The new output in a chunk of a stream."""
    error = chunk.completion.error if chunk.completion is not None else None
    return Piece(
        number, chunk.number, chunk.text, chunk.token_ids, make(chunk.logprobs, chunk.token_ids), chunk.finish_reason, error
    )


def whole_piece(number: int, index: int, completion: Completion) -> Piece:
    """All output of a continuation but its scores."""
    reason, error = completion.finish_reason, completion.error
    return Piece(number, index, completion.text or "", completion.token_ids, None, reason, error)


async def whole_scores(number: int, output: RequestOutput, make: MakeScores) -> AsyncIterator[WholeScores]:
    """The scores of a request's prompt and continuations."""
    found: list[tuple[int | None, Any, list[int]]] = [(None, output.prompt_logprobs, output.prompt_token_ids)]
    found += [(index, one.logprobs, one.token_ids) for index, one in enumerate(output.completions)]
    for index, logprobs, ids in found:
        if logprobs is not None:
            async for scores in scores_in_parts(make, logprobs, ids):
                yield WholeScores(number, index, scores)


def request_end(
    number: int, output: RequestOutput, pieces: list[Piece], scores: list[Score] | None, num_generated: int
) -> RequestEnd:
    """The end of a request, once all its continuations have ended. `scores` are the prompt's."""
    each = [completion.timings for completion in output.completions]
    first_token_s = min((one.first_token_s for one in each if one.first_token_s is not None), default=None)
    total_s = max(one.total_s for one in each)
    return RequestEnd(
        number, pieces, output.num_cached_tokens, scores, each[0].queued_s, first_token_s, total_s, num_generated,
        output.num_preemptions, output.num_disk_tokens,
    )  # fmt: skip

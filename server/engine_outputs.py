"""Converts an engine's outputs and errors to the messages that carry them. Used by processes that hold an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..scheduler.errors import PromptTooLong, RequestRejected
from .messages import ErrorKind, Piece, RequestEnd, Score

if TYPE_CHECKING:
    from ..engine.requests.outputs import Completion, RequestOutput, StreamChunk, TokenLogprobs

MakeScores = Callable[[Any, Sequence[int]], "list[Score] | None"]


class Asleep(Exception):
    """The model is asleep."""


def error_kind(error: Exception) -> ErrorKind:
    """The kind of `Failed` for an error of the engine."""
    from ..engine.errors import EngineClosed

    if isinstance(error, PromptTooLong):
        return "too_long"
    if isinstance(error, RequestRejected | ValueError | TypeError):
        return "invalid"
    return "unavailable" if isinstance(error, Asleep | EngineClosed) else "internal"


@lru_cache(maxsize=1 << 16)
def token_text_of(tokenizer: Any, token_id: int) -> str:
    """The text of a token by itself; empty without a tokenizer."""
    from ..engine.text.detokenizer import token_text

    return "" if tokenizer is None else token_text(tokenizer, token_id)


def scores(tokenizer: Any, logprobs: Sequence[TokenLogprobs | None] | None, ids: Sequence[int]) -> list[Score] | None:
    """The log-probabilities of the tokens `ids`, of which the first of a prompt has none."""
    if logprobs is None:
        return None
    return [
        Score(
            token_id, token_text_of(tokenizer, token_id), None if one is None else one.logprob, 0 if one is None else one.rank,
            [] if one is None else [(i, token_text_of(tokenizer, i), logprob) for i, logprob in one.top],
        )
        for token_id, one in zip(ids, logprobs, strict=False)  # a request that ended early scored a part of its prompt
    ]  # fmt: skip


def piece_of(number: int, chunk: StreamChunk, make: MakeScores) -> Piece:
    """The new output in a chunk of a stream."""
    error = chunk.completion.error if chunk.completion is not None else None
    return Piece(
        number,
        chunk.number,
        chunk.text,
        chunk.token_ids,
        make(chunk.logprobs, chunk.token_ids),
        chunk.finish_reason,
        error,
    )


def whole_piece(number: int, index: int, completion: Completion, make: MakeScores) -> Piece:
    """All output of a continuation."""
    return Piece(
        number, index, completion.text or "", completion.token_ids, make(completion.logprobs, completion.token_ids),
        completion.finish_reason, completion.error,
    )  # fmt: skip


def request_end(
    number: int, output: RequestOutput, pieces: list[Piece], make: MakeScores, num_generated: int
) -> RequestEnd:
    """The end of a request, once all its continuations have ended."""
    scores = make(output.prompt_logprobs, output.prompt_token_ids)
    each = [completion.timings for completion in output.completions]
    first_token_s = min((one.first_token_s for one in each if one.first_token_s is not None), default=None)
    total_s = max(one.total_s for one in each)
    return RequestEnd(
        number, pieces, output.num_cached_tokens, scores, each[0].queued_s, first_token_s, total_s, num_generated
    )

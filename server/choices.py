"""What completions and chat completions share: ids, usage, finish reasons, and the order of choices."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from ..scheduler.request import REQUEST_FAULTS
from .engine_client import Generation
from .errors import ApiError, invalid, unavailable
from .messages import Piece, Score

json_encode = msgspec.json.Encoder().encode
PART_BYTES = 32 << 10  # of scores that become JSON between two turns of the event loop, some milliseconds
_SCORE_BYTES = 64  # beside its likely tokens
EVENTS = "text/event-stream"  # the media type of server-sent events
DONE = b"data: [DONE]\n\n"
_REASONS = {"stop": "stop", "length": "length"}


def new_id(kind: str) -> str:
    """An id such as "cmpl-5f..."."""
    return f"{kind}-{secrets.token_hex(12)}"


def event(data: Any) -> bytes:
    """A server-sent event with `data` as JSON."""
    return b"data: " + json_encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The events that end a stream which fails."""
    return event(error.body) + DONE


async def json_list(scores: Sequence[Score], make: Callable[[Score], Any]) -> AsyncIterator[bytes]:
    """What `make` gives for each of these as a JSON list, in parts between which the event loop turns."""
    step = max(1, PART_BYTES // (_SCORE_BYTES + max((len(score.packed_top) for score in scores[-1:]), default=0)))
    yield b"["
    for begin in range(0, len(scores), step):
        yield (b"," if begin else b"") + json_encode([make(score) for score in scores[begin : begin + step]])[1:-1]
        await asyncio.sleep(0)
    yield b"]"


async def raw_list(scores: Sequence[Score], make: Callable[[Score], Any]) -> msgspec.Raw:
    """As `json_list`, whole."""
    return msgspec.Raw(b"".join([part async for part in json_list(scores, make)]))


def finish_reason(piece: Piece) -> str | None:
    """OpenAI's finish reason. Raises ApiError where the engine failed on this continuation, or was stopped amid it."""
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "aborted":  # not by its client, which would not be here
        raise unavailable("the model was put to sleep, unloaded or shut down before this request had ended")
    if piece.finish_reason == "error":
        if (piece.error or "").startswith(REQUEST_FAULTS):
            raise invalid(f"the request cannot be followed: {piece.error}")
        raise ApiError(500, f"the engine failed on this request: {piece.error}")
    return _REASONS[piece.finish_reason]


def usage(generations: list[Generation], num_dropped: int = 0) -> dict[str, Any]:
    """OpenAI's `usage` of these prompts. `num_dropped` output tokens were asked for by the server alone.

    `disk_tokens` are those of the cached ones that were read from disk, if there are some.
    """
    prompt = sum(len(generation.prompt_token_ids or ()) for generation in generations)
    output = sum(generation.num_generated for generation in generations) - num_dropped
    ends = [one.finished for one in generations if one.finished is not None]
    cached, from_disk = sum(end.num_cached_tokens for end in ends), sum(end.num_disk_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached} | ({"disk_tokens": from_disk} if from_disk else {}),
    }


def running_usage(generations: list[Generation], num_output: int) -> dict[str, Any]:
    """OpenAI's `usage` amid a stream of which so many tokens are sent."""
    prompt = sum(len(generation.prompt_token_ids or ()) for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": num_output, "total_tokens": prompt + num_output}


def joined(pieces: list[Piece]) -> Piece:
    """Successive pieces of a continuation as one."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return Piece(
        last.number,
        last.index,
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        None if last.scores is None else [score for piece in pieces for score in piece.scores or ()],
        last.finish_reason,
        last.error,
    )

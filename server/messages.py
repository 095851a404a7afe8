"""The messages between the server and an engine process. Plain data; `connection.py` carries them as msgpack.

A request is one prompt with all its continuations. The server numbers the requests and calls of a connection.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from ..scheduler.sequence import FinishReason

ErrorKind: TypeAlias = Literal["invalid", "too_long", "unavailable", "internal", "conflict", "not_found", "limited"]


class Score(Struct, array_like=True, frozen=True):
    """The log-probability of a token, and the most likely tokens in its place.

    Attributes:
        token: The text of the token by itself; bytes that are no whole character are replaced by U+FFFD.
        logprob: None for the first token of a prompt.
        top: Token ids, their texts and log-probabilities, best first.
    """

    token_id: int
    token: str
    logprob: float | None
    rank: int
    top: list[tuple[int, str, float]] = []


# ---- server to engine ---------------------------------------------------------------------------------------------


class Start(Struct, tag=True, frozen=True):
    """Load `model`, with these arguments of `AsyncLLM`. The first message of a connection."""

    model: str
    options: dict[str, Any] = {}


class Submit(Struct, tag=True, frozen=True):
    """Continue a prompt, or answer a conversation.

    Attributes:
        prompt: A text or token ids; None with `messages`.
        messages: A conversation for the chat template.
        template: Options of the chat template.
        params: Arguments of `SamplingParams`.
        streams: Send the output as `OutputPieces`; otherwise all of it comes with `RequestEnd`.
        fills_context: Without `max_new_tokens` generate up to the model's context.
        strict_length: Reject the request if prompt and `max_new_tokens` exceed the model's context.
        request_id: The id of the HTTP request, as the request's label.
        durable_id: Names the request for good. A durable engine client attaches to the request of this id, or begins it if
            there is none. An engine process ignores this field and those below.
        tenant: The name of the API key. A request of another tenant is not found.
        fingerprint: A digest of the HTTP request's body; the request of the same id with another one is a conflict.
        attach: Fail with "not_found" instead of beginning the request.
        most_requests, most_sequences: That the tenant may have unfinished, over all servers; None is no limit.
    """

    number: int
    params: dict[str, Any]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str | None = None
    streams: bool = True
    fills_context: bool = False
    strict_length: bool = True
    request_id: str = ""
    durable_id: str = ""
    tenant: str = ""
    fingerprint: str = ""
    attach: bool = False
    most_requests: int | None = None
    most_sequences: int | None = None


class Cancel(Struct, tag=True, frozen=True):
    """Abort a request. It is answered by `Aborted`, unless the request has ended."""

    number: int


class Call(Struct, tag=True, frozen=True):
    """Call a method of the engine process: see `EngineServer.calls`."""

    number: int
    method: str
    arguments: dict[str, Any] = {}


class Stop(Struct, tag=True, frozen=True):
    """Refuse new requests, let the running ones finish within `drain_s`, and end the process."""

    drain_s: float = 0.0


# ---- engine to server ---------------------------------------------------------------------------------------------


class ModelInfo(Struct, frozen=True):
    """What the server needs to know of a loaded model."""

    path: str
    max_model_len: int
    max_seqs: int
    block_size: int
    vocab_size: int
    has_tokenizer: bool
    chat_template: str | None
    device: str
    dtype: str
    version: str


class ModelReady(Struct, tag=True, frozen=True):
    """The model is loaded."""

    info: ModelInfo


class StartFailed(Struct, tag=True, frozen=True):
    """The model cannot be loaded; the process ends."""

    error: str
    kind: str


class Accepted(Struct, tag=True, frozen=True):
    """The prompt was tokenized. It is queued, unless the scheduler rejects it.

    Attributes:
        max_new_tokens: That the request may get; None: up to the model's context.
    """

    number: int
    prompt_token_ids: list[int]
    max_new_tokens: int | None = None


class Piece(Struct, array_like=True, frozen=True):
    """New output of continuation `index` of request `number`."""

    number: int
    index: int
    text: str
    token_ids: list[int]
    scores: list[Score] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


class OutputPieces(Struct, tag=True, frozen=True):
    """New output of several requests, of a step or a few."""

    pieces: list[Piece]


class RequestEnd(Struct, tag=True, frozen=True):
    """All continuations have ended.

    Attributes:
        pieces: The whole continuations, best first, unless they were streamed.
        queued_s, first_token_s, total_s: Seconds in the engine, from the tokenized prompt to the first admission, the first
            token and the end. None if it never came so far.
        num_generated: Tokens of all continuations, with those that `best_of` leaves out.
    """

    number: int
    pieces: list[Piece]
    num_cached_tokens: int
    prompt_scores: list[Score] | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    num_generated: int = 0


class Aborted(Struct, tag=True, frozen=True):
    """The answer to `Cancel` of a request that had not ended: the tokens that were generated for it."""

    number: int
    num_generated: int


class Failed(Struct, tag=True, frozen=True):
    """The request was rejected or could not be served, or a call raised."""

    number: int
    kind: ErrorKind
    error: str


class CallResult(Struct, tag=True, frozen=True):
    """The result of a call."""

    number: int
    value: Any


ToEngine: TypeAlias = Start | Submit | Cancel | Call | Stop
ToServer: TypeAlias = ModelReady | StartFailed | Accepted | OutputPieces | RequestEnd | Aborted | Failed | CallResult

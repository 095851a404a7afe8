"""The messages between the server and an engine process. Plain data; `connection.py` carries them as msgpack.

A request is one prompt with all its continuations. The server numbers the requests and calls of a connection.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct, msgpack

from ..cache.retention import Retention
from ..common.answer_memory import SCORED_BYTES, TOKEN_BYTES
from ..scheduler.request import FinishReason

BEAT_S = 1.0  # interval of `Alive`

ErrorKind: TypeAlias = Literal[
    "invalid", "too_long", "unavailable", "memory", "internal", "conflict", "not_found", "limited", "cancelled"
]


LikelyTokens: TypeAlias = list[tuple[int, bytes, float]]
_pack = msgpack.Encoder().encode
_unpack = msgpack.Decoder(LikelyTokens).decode


class Score(Struct, array_like=True, frozen=True):
    """The log-probability of a token, and the most likely tokens in its place.

    Attributes:
        token: The text of the token by itself in UTF-8, perhaps only a part of a character: see `token_text`.
        logprob: None for the first token of a prompt.
        packed_top: `top` as msgpack, a tenth of its objects; empty if there are none.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int
    packed_top: bytes = b""

    @classmethod
    def of(cls, token_id: int, token: bytes, logprob: float | None, rank: int, top: LikelyTokens) -> Score:
        """The score with these likely tokens."""
        return cls(token_id, token, logprob, rank, _pack(top) if top else b"")

    @property
    def top(self) -> LikelyTokens:
        """Token ids, their texts and log-probabilities, best first."""
        return _unpack(self.packed_top) if self.packed_top else []

    @property
    def text(self) -> str:
        """The token's text."""
        return token_text(self.token)


def token_text(token: bytes) -> str:
    """The text of a token; bytes that are no whole character are replaced by U+FFFD."""
    return token.decode("utf-8", "replace")


# ---- server to engine ---------------------------------------------------------------------------------------------


class Start(Struct, tag=True, frozen=True):
    """Load `model`, with these arguments of `AsyncLLM`, to be served under a name. The first message of a connection."""

    model: str
    options: dict[str, Any] = {}
    name: str = ""  # "": that of the model


class ReasoningGrammar(Struct, frozen=True):
    """A grammar for an answer that begins amid reasoning, because the prompt ends with one of these texts."""

    opens: tuple[str, ...]
    grammar: str


class Submit(Struct, tag=True, frozen=True):
    """Continue a prompt, or answer a conversation.

    Attributes:
        prompt: A text or token ids; None with `messages`.
        messages: A conversation for the chat template.
        template: Options of the chat template.
        params: Arguments of `SamplingParams`.
        reasoning_grammar: Replaces that of `params` where the prompt opens reasoning.
        streams: Send the output as `OutputPieces`; otherwise all of it comes with `RequestEnd`.
        fills_context: Without `max_new_tokens` generate up to the model's context.
        strict_length: Reject the request if prompt and `max_new_tokens` exceed the model's context.
        request_id: The id of the HTTP request, as the request's label.
        retention: How long the prompt is worth keeping. A durable engine client ignores it.
        durable_id: Names the request for good. A durable engine client attaches to the request of this id, or begins it if
            there is none. An engine process ignores this field and those below but `tenant`.
        tenant: The name of the API key, whose work is done in turns with that of others. A durable request of another tenant is
            not found.
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
    retention: Retention | None = None
    reasoning_grammar: ReasoningGrammar | None = None
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
    """Call a method of the engine process for a tenant: see `EngineServer.calls`."""

    number: int
    method: str
    arguments: dict[str, Any] = {}
    tenant: str = ""


class Stop(Struct, tag=True, frozen=True):
    """Refuse new requests, let the running ones finish within `drain_s`, and end the process."""

    drain_s: float = 0.0


# ---- engine to server ---------------------------------------------------------------------------------------------


class ModelInfo(Struct, frozen=True):
    """What the server needs to know of a loaded model.

    Attributes:
        chat_template: The one for conversations with tools.
        response_template: That of the tokenizer as JSON; "" without one.
        added_tokens: The ids of the tokenizer's added tokens.
        constrains: Whether output can be constrained.
        leases: The names of its leases, and the uuids of their devices.
    """

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
    answers_bytes: int = 1 << 62  # that undelivered answers may take; default: any
    special_tokens: tuple[str, ...] = ()
    response_template: str = ""
    added_tokens: dict[str, int] = {}
    constrains: bool = False
    weights_bytes: int = 0
    leases: tuple[tuple[str, str], ...] = ()


class ModelReady(Struct, tag=True, frozen=True):
    """The model is loaded, or loaded again as it wakes up."""

    info: ModelInfo


class StartFailed(Struct, tag=True, frozen=True):
    """The model cannot be loaded; the process ends."""

    error: str
    kind: str


class Accepted(Struct, tag=True, frozen=True):
    """The prompt was tokenized. It is queued, unless the scheduler rejects it.

    Attributes:
        max_new_tokens: That the request may get; None: up to the model's context.
        prompt_end: The text of the prompt's last tokens, with special tokens.
    """

    number: int
    prompt_token_ids: list[int]
    max_new_tokens: int | None = None
    prompt_end: str = ""


class Piece(Struct, array_like=True, frozen=True):
    """New output of continuation `index` of request `number`."""

    number: int
    index: int
    text: str
    token_ids: list[int]
    scores: list[Score] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes."""
        if not self.scores:
            return len(self.token_ids) * TOKEN_BYTES
        likely = sum(len(score.packed_top) for score in self.scores)
        return len(self.token_ids) * (TOKEN_BYTES + SCORED_BYTES) + likely


class OutputPieces(Struct, tag=True, frozen=True):
    """New output of several requests, of a step or a few."""

    pieces: list[Piece]


class WholeScores(Struct, tag=True, frozen=True):
    """Log-probabilities of a request that is not streamed, sent in parts before its end: of continuation `index`, or of the
    prompt if that is None.
    """

    number: int
    index: int | None
    scores: list[Score]


class RequestEnd(Struct, tag=True, frozen=True):
    """All continuations have ended.

    Attributes:
        pieces: The whole continuations, best first, unless they were streamed. Their scores may come before, and the prompt's:
            see `WholeScores`.
        queued_s, first_token_s, total_s: Seconds in the engine, from the tokenized prompt to the first admission, the first
            token and the end. None if it never came so far.
        num_generated: Tokens of all continuations, with those that `best_of` leaves out.
        num_preemptions: Of the first continuation.
    """

    number: int
    pieces: list[Piece]
    num_cached_tokens: int
    prompt_scores: list[Score] | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    num_generated: int = 0
    num_preemptions: int = 0
    num_disk_tokens: int = 0  # of the cached ones


class Aborted(Struct, tag=True, frozen=True):
    """The answer to `Cancel` of a request that had not ended: the tokens that were generated for it."""

    number: int
    num_generated: int


class Alive(Struct, tag=True, frozen=True):
    """Sent every BEAT_S while a model is loaded or sleeps: see `AsyncLLM.heartbeat`."""

    beats: int
    allowed_s: float


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
ToServer: TypeAlias = (
    ModelReady | StartFailed | Alive | Accepted | OutputPieces | WholeScores | RequestEnd | Aborted | Failed | CallResult
)

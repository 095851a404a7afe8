"""The messages between front ends, the queue and the workers of a fleet. Plain data, sent as msgpack (`encode`, `decode`).

A request is one prompt with all its continuations. Its output is a list of records: `Piece`, then one `RequestEnd` or
`Failed`. The queue numbers requests; the worker's epoch travels with everything that a worker says.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ..api.sampling_params import MOST_FORKS
from ..server.messages import Failed, Piece, RequestEnd

Record: TypeAlias = Piece | RequestEnd | Failed  # what clients see of a request's output, in order
Kind = TypeVar("Kind")

encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """The message of type `kind` in `data`. Raises msgspec.ValidationError."""
    return msgspec.msgpack.decode(data, type=kind)


class TaggedPiece(Struct, tag=True, frozen=True):
    """A `Piece` among records of several kinds (`Piece` has no tag of its own)."""

    piece: Piece


StoredRecord: TypeAlias = TaggedPiece | RequestEnd | Failed
_decoder = msgspec.msgpack.Decoder(StoredRecord)


def encode_record(record: Record) -> bytes:
    """A record as bytes, for the journal and for front ends."""
    return encode(TaggedPiece(record) if isinstance(record, Piece) else record)


def decode_record(data: bytes) -> Record:
    """The record in `data`."""
    record = _decoder.decode(data)
    return record.piece if isinstance(record, TaggedPiece) else record


# ---- front ends and the queue ---------------------------------------------------------------------------------------


class NewRequest(Struct, array_like=True, frozen=True):
    """A request as a front end submits it: checked, tokenized and resolved, so that any worker gives the same tokens.

    Attributes:
        request_id: Names the request for good. It is enough to read the output, so it is not guessable.
        handover: The data of `Handover.to_dict` for the first continuation, without output.
        num_sequences: Continuations, or beams of a search, that run for it.
        digests: The first 64 bits of the prefix hash of each full block of the prompt.
        fingerprint: Digest of the request's body: the same id with another body is refused. Empty: not compared.
        tenant: The owner, for shares of the queue.
        created: Seconds since 1970.
        max_new_tokens: As the client asked for it.
        may_exist: It may have been submitted before: look for it first.
        most_requests, most_sequences: That the tenant may have unfinished; None is no limit.
    """

    request_id: str
    handover: dict[str, Any]
    num_sequences: int = 1
    digests: list[int] = []
    fingerprint: str = ""
    tenant: str = ""
    created: float = 0.0
    max_new_tokens: int | None = None
    may_exist: bool = False
    most_requests: int | None = None
    most_sequences: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what the queue could not use: `msgspec.ValidationError` while a message is decoded."""
        sampling = self.handover.get("sampling")
        if not isinstance(self.handover.get("prompt_token_ids"), list) or not isinstance(sampling, dict):
            raise ValueError("its handover has no list prompt_token_ids, or no mapping sampling")
        numbers = (sampling.get("max_new_tokens"), self.handover.get("priority"), sampling.get("num_beams") or 1)
        if not all(isinstance(number, int) for number in numbers) or not 1 <= self.num_sequences <= MOST_FORKS:
            raise ValueError(f"max_new_tokens, priority, num_beams, {self.num_sequences=} are not what a request has")

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        ids: list[int] = self.handover["prompt_token_ids"]
        return ids

    @property
    def most_new_tokens(self) -> int:
        """The most tokens of a continuation."""
        return int(self.handover["sampling"]["max_new_tokens"])

    @property
    def priority(self) -> int:
        """Lower goes first."""
        return int(self.handover["priority"])

    @property
    def is_beam_search(self) -> bool:
        """Whether it is a beam search, which begins anew on another worker."""
        return int(self.handover["sampling"].get("num_beams") or 1) > 1


class Submission(Struct, array_like=True, frozen=True):
    """What the queue says of a submitted request, or of one that a front end attaches to.

    Attributes:
        number: The request's number; None if it is refused.
        kind, error: Why it is refused: see `messages.Failed`.
        request: The request as it was accepted first, when the front end attaches to it.
    """

    number: int | None = None
    kind: str = ""
    error: str = ""
    request: NewRequest | None = None


class Deliveries(Struct, array_like=True, frozen=True):
    """New records of the requests that a front end follows.

    Attributes:
        records: By number: how many records come before these, and these, encoded by `encode_record`.
        unknown: Numbers that the queue does not follow for this front end: it has to attach again.
    """

    records: dict[int, tuple[int, list[bytes]]] = {}
    unknown: list[int] = []


class FleetModel(Struct, array_like=True, frozen=True):
    """The model that all workers of a fleet serve, and what front ends need to know of it.

    Attributes:
        reference: What the workers were told to load: a name, a folder or a hub id.
        sampling: The engine's defaults, arguments of `SamplingParams`.
        identity: Digest of the model's configuration and of the names and sizes of its weight files.
        layout: How weights, K and V are stored. Workers with another one are refused, since tokens could differ.
        bos_token_id: Begins an empty prompt.
    """

    reference: str
    path: str
    name: str
    identity: str
    dtype: str
    layout: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_tables: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    sampling: dict[str, Any]
    version: str

    def difference(self, other: FleetModel) -> str | None:
        """A field in which `other` may not differ and does, in words; None if the workers can replace each other."""
        for name in ("identity", "dtype", "layout", "max_model_len", "vocab_size", "block_size", "eos_token_ids"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                models = f" (the model {other.name} instead of {self.name})" if name == "identity" else ""
                return f"{name} {theirs!r} instead of {ours!r}{models}"
        return None


class FleetInfo(Struct, array_like=True, frozen=True):
    """What a front end needs to begin: the model, the secret of the prefix hashes and the sequences that the fleet can run."""

    model: FleetModel
    secret: bytes
    max_seqs: int


# ---- workers and the queue ------------------------------------------------------------------------------------------


class WorkerState(Struct, array_like=True, frozen=True):
    """The memory and the load of a worker, as its engine counts them.

    Attributes:
        usable_blocks: Blocks that are mapped.
        limit_blocks: Blocks that the lease may still become.
        unused_blocks: Mapped blocks with nothing in them.
        device: The device's name.
        stats: `AsyncLLM.stats`, now and then.
    """

    usable_blocks: int
    limit_blocks: int
    unused_blocks: int = 0
    preemptions: int = 0
    device: str = ""
    stats: dict[str, Any] | None = None


class CacheChanges(Struct, array_like=True, frozen=True):
    """Digests of blocks (their first 64 bits) that a worker can find now, and no longer. `cleared` comes before `stored`."""

    stored: list[int] = []
    removed: list[int] = []
    cleared: bool = False


class Registration(Struct, array_like=True, frozen=True):
    """A worker that has loaded its model and asks for an epoch.

    Attributes:
        step_tokens: Tokens that a step computes at most.
    """

    worker: str
    model: FleetModel
    max_seqs: int
    state: WorkerState
    step_tokens: int = 2048
    pid: int = 0
    node: str = ""


class Report(Struct, array_like=True, frozen=True):
    """What a worker computed since its last report. Reports of an epoch are numbered from 1; a repeated one is ignored.

    Attributes:
        records: Of all requests, in order.
        released: Numbers of requests that were handed back, after all their records.
        faults: Requests on which the engine failed, after all their records, and why: they are handed back too.
    """

    worker: str
    epoch: int
    sequence: int
    records: list[bytes] = []
    released: list[int] = []
    state: WorkerState | None = None
    cache: CacheChanges | None = None
    faults: dict[int, str] = {}


class Assignment(Struct, array_like=True, frozen=True):
    """A request for a worker: the data of `Handover.to_dict` of each unfinished continuation, with its output so far."""

    number: int
    handovers: list[dict[str, Any]]
    label: str = ""


class Orders(Struct, array_like=True, frozen=True):
    """What a worker is to do, the answer to its pull.

    Attributes:
        cancelled: Requests to abort: nothing more is said of them.
        released: Requests to hand back.
        stop: End the process once nothing runs.
    """

    assignments: list[Assignment] = []
    cancelled: list[int] = []
    released: list[int] = []
    stop: bool = False


class StaleEpoch(Exception):
    """The queue has given this worker's requests to others, or was restarted: the worker has to register again."""


class WorkerRefused(Exception):
    """The worker cannot serve in this fleet: another model, dtype or layout."""

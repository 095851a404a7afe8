"""The recorded output of one request: what has been generated, and the state in which another worker continues it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..server.messages import Failed, Piece, RequestEnd, Score
from .messages import NewRequest, Record, encode_record


@dataclass(slots=True)
class SequenceOutput:
    """The recorded output of one continuation. `OutputLog.append` changes it."""

    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0
    scores: list[Score] = field(default_factory=list)
    finish_reason: str | None = None


class OutputLog:
    """The records of a request, in order, and the output of each continuation that they add up to.

    Attributes:
        records: As bytes (`encode_record`).
        end: The last record, once it is there.
    """

    def __init__(self, request: NewRequest) -> None:
        self._request = request
        self.records: list[bytes] = []
        self.end: RequestEnd | Failed | None = None
        count = 1 if request.is_beam_search else request.num_sequences
        self.sequences = [SequenceOutput() for _ in range(count)]

    @property
    def num_tokens(self) -> int:
        """Tokens recorded so far, of all continuations."""
        return sum(len(one.token_ids) for one in self.sequences)

    @property
    def num_unfinished(self) -> int:
        """Sequences that a worker runs for it."""
        if self.end is not None:
            return 0
        if self._request.is_beam_search:
            return self._request.num_sequences
        return sum(one.finish_reason is None for one in self.sequences)

    def append(self, record: Record, data: bytes | None = None) -> None:
        """Add a record. `data` are its bytes. Raises ValueError for a record of no continuation."""
        self.records.append(encode_record(record) if data is None else data)
        if not isinstance(record, Piece):
            self.end = record
            return
        if self._request.is_beam_search:
            return
        if not 0 <= record.index < len(self.sequences):
            raise ValueError(f"a record is of continuation {record.index}, and there are {len(self.sequences)}")
        output = self.sequences[record.index]
        output.token_ids += record.token_ids
        output.num_characters += len(record.text)
        output.scores += record.scores or ()
        output.finish_reason = record.finish_reason

    def handovers(self) -> list[dict[str, Any]]:
        """The data of `Handover.to_dict` for each unfinished continuation. A beam search begins at its prompt."""
        return [
            self._handover(index, output)
            for index, output in enumerate(self.sequences)
            if output.finish_reason is None or self._request.is_beam_search
        ]

    def _handover(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        base = self._request.handover
        data = {**base, "index": index} if index else dict(base)
        if not output.token_ids or self._request.is_beam_search:
            return data
        data["token_ids"] = output.token_ids
        data["num_told_tokens"] = len(output.token_ids)
        data["num_told_characters"] = output.num_characters
        if base["sampling"].get("logprobs") is not None:
            data["logprobs"] = _columns(output.scores)
        return data


def _columns(scores: list[Score]) -> dict[str, Any]:
    """Scores in the form of `Handover.to_dict`."""
    return {
        "token_ids": [[one.token_id, *(token_id for token_id, _, _ in one.top)] for one in scores],
        "logprobs": [[one.logprob, *(logprob for _, _, logprob in one.top)] for one in scores],
        "ranks": [one.rank for one in scores],
    }

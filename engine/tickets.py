"""What callers wait for: a request's continuations as their tokens come in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..scheduler.outcome import Finished
from ..scheduler.request import Request
from ..scheduler.sequence import FinishReason
from .outputs import Completion, RequestOutput, StreamChunk, Timings
from .text import TextStream

log = logging.getLogger(__name__)


class Ticket:
    """One continuation of a prompt. Mutated under the engine's lock."""

    def __init__(self, answer: Answer, number: int, request: Request, text: TextStream | None, streams: bool) -> None:
        self.answer = answer
        self.number = number
        self.request = request
        self.completion: Completion | None = None
        self._text = text
        self._eager = text is not None and (streams or text.has_stops)
        self._new: list[int] = []
        self._new_text: list[str] = []
        self._first_token_at: float | None = None
        self._failure: str | None = None  # why there is no more text

    def push(self, token: int, now: float) -> FinishReason | None:
        """Take in a token. Returns why the request is to end here, if it is: a stop string, or text that cannot be made."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._new.append(token)
        if self._eager and self._failure is None:
            self._read([token])
        return "error" if self._failure else "stop" if self._text is not None and self._text.stopped else None

    def finish(self, finished: Finished, now: float) -> None:
        """The request has ended: this is what became of it."""
        tokens = finished.token_ids.tolist()
        try:
            if self._text is not None and self._failure is None:
                self._read(tokens if not self._eager else [], last=True)
        finally:
            stopped = self._text is not None and self._text.stopped
            arrival = self.request.arrival
            first = None if self._first_token_at is None else self._first_token_at - arrival
            self.completion = Completion(
                text=None if self._text is None else self._text.text,
                token_ids=tokens,
                finish_reason="error" if self._failure else "stop" if stopped else finished.reason,
                timings=Timings(first_token_s=first, total_s=now - arrival),
                num_preemptions=finished.num_preemptions,
                error=self._failure or finished.error,
            )

    def _read(self, tokens: list[int], last: bool = False) -> None:
        """Turn tokens into text. A tokenizer that raises fails this request and no other; an interrupt goes on."""
        assert self._text is not None
        try:
            self._new_text.append(self._text.push(tokens)[0])
            if last:
                self._new_text.append(self._text.finish())
        except BaseException as error:
            self._failure = f"the text cannot be made: {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
            log.exception("request %s: the tokenizer cannot say its tokens; it ends", self.request.request_id)

    def ready(self, interval: int) -> bool:
        """Whether a chunk is to be given now."""
        return self.completion is not None or len(self._new) >= interval

    def take(self) -> StreamChunk:
        """What is new since the last chunk. The last one of all of the prompt's tickets carries the output."""
        answer, done = self.answer, self.completion is not None
        answer.num_taken += done
        output = answer.output if done and answer.num_taken == len(answer.tickets) else None
        chunk = StreamChunk(answer.index, "".join(self._new_text), self._new, self.number, self.completion, output)
        self._new, self._new_text = [], []
        return chunk


class Answer:
    """All that was asked for of one prompt: a ticket for each continuation."""

    def __init__(self, index: int, prompt: str | None) -> None:
        self.index = index  # of the prompt, in its call
        self.prompt = prompt
        self.tickets: Sequence[Ticket] = ()
        self.num_taken = 0  # tickets whose last chunk was given

    @property
    def output(self) -> RequestOutput:
        """What became of it. Of the tickets that have ended, which must be all."""
        first = self.tickets[0].request
        completions = tuple(ticket.completion for ticket in self.tickets if ticket.completion is not None)
        return RequestOutput(first.request_id, self.prompt, first.prompt_token_ids.tolist(), completions)

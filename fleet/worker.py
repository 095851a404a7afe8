"""A worker: one engine that pulls requests from the queue and reports what it generates."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.heartbeat import SilenceWatch
from ..engine.loading.weight_files import find_weights
from ..scheduler.request import REQUEST_FAULTS
from ..server.engine_outputs import MakeScores, error_kind, piece_of, request_end, scores, scores_in_parts
from ..server.messages import Failed, Piece, RequestEnd, Score
from ..version import __version__
from .links import QueueLink, QueueUnavailable
from .messages import Assignment, CacheChanges, FleetModel, Orders, Registration, Report, StaleEpoch, WorkerState
from .report_buffer import ReportBuffer

if TYPE_CHECKING:
    from ..cache.cache_events import CacheEvents
    from ..engine.async_llm import AsyncLLM
    from ..engine.requests.outputs import RequestOutput, StreamChunk
    from ..scheduler.request import FinishReason
    from .kv_events import KvEventPublisher

log = logging.getLogger(__name__)

STATE_EVERY_S = 0.1
STATS_EVERY_S = 1.0
AGAIN_S = 0.1  # between attempts to reach the queue
BEAT_S = 1.0  # interval of looks at the engine's heartbeat
UNLIMITED_WAITING = 1 << 30  # the queue bounds what waits


class EngineFault(Exception):
    """The engine failed on a request that it could serve: another engine may serve it."""


class EngineHangs(Exception):
    """The engine is at work and comes no further. It cannot be stopped: its process has to be killed."""


class FleetWorker:
    """Serves the queue from one engine, under one epoch after the other, until the queue orders its end.

    Args:
        publisher: Gets the events of the prefix cache too.
        model: See `FleetModel`; `model_of` makes it.
    """

    def __init__(
        self, name: str, llm: AsyncLLM, model: FleetModel, link: QueueLink, publisher: KvEventPublisher | None = None
    ) -> None:
        self.name = name
        self.model = model
        self._llm = llm
        self._link = link
        self._publisher = publisher
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the number of the request
        self._buffer = ReportBuffer()
        self._stats_at = 0.0

    async def run(self) -> None:
        """Serve until the queue orders the end. Raises WorkerRefused and EngineHangs."""
        serving, watching = asyncio.create_task(self._serve_epochs()), asyncio.create_task(self._watch())
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            await (watching if watching.done() else serving)
        finally:
            hangs = watching.done()
            watching.cancel()
            serving.cancel()
            if not hangs:  # an engine that hangs would let this wait for ever
                await asyncio.gather(serving, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Raise EngineHangs once the engine gives no beat for longer than it said."""
        silence = SilenceWatch(2 * BEAT_S)
        while True:
            beats, allowed_s = self._llm.heartbeat
            said = (beats, allowed_s) if allowed_s else object()  # at rest, nothing is waited for
            if silence.look(said, asyncio.get_running_loop().time()) > allowed_s > 0:
                raise EngineHangs(f"its engine came no further for {allowed_s:g} s")
            await asyncio.sleep(BEAT_S)

    async def _serve_epochs(self) -> None:
        while True:
            try:
                epoch = await self._register()
                await self._serve(epoch)
                return
            except (StaleEpoch, QueueUnavailable) as error:
                log.warning("the worker %s begins anew: %s", self.name, error)
                await asyncio.sleep(AGAIN_S)
            finally:
                await self._abort(list(self._tasks))

    async def _register(self) -> int:
        self._buffer = ReportBuffer()
        state = await self._state()
        registration = Registration(
            self.name,
            self.model,
            self._llm.config.max_seqs,
            state,
            self._llm.config.max_step_tokens,
            os.getpid(),
            socket.gethostname(),
        )
        epoch = await self._link.register(registration)
        await self._link.cache(self.name, epoch, await self._whole_cache())
        return epoch

    async def _serve(self, epoch: int) -> None:
        """Pull and report until the end is ordered."""
        pulling, reporting = asyncio.create_task(self._pull(epoch)), asyncio.create_task(self._report(epoch))
        try:
            await asyncio.wait({pulling, reporting}, return_when=asyncio.FIRST_COMPLETED)
            for task in (pulling, reporting):
                if task.done():
                    task.result()
        finally:
            for task in (pulling, reporting):
                task.cancel()
            await asyncio.gather(pulling, reporting, return_exceptions=True)

    # -- orders ------------------------------------------------------------------------------------------------------

    async def _pull(self, epoch: int) -> None:
        while True:
            orders = await self._link.pull(self.name, epoch)
            await self._follow(orders)
            if orders.stop and not self._tasks and self._buffer.is_empty:
                return

    async def _follow(self, orders: Orders) -> None:
        for assignment in orders.assignments:
            task = asyncio.create_task(self._generate(assignment))
            self._tasks[assignment.number] = task
            task.add_done_callback(partial(self._ended, assignment.number))
        if orders.cancelled:
            await self._abort(orders.cancelled)
            for number in orders.cancelled:
                self._buffer.drop(number)
        for number in orders.released:
            if number in self._tasks:
                await self._abort([number])
                self._buffer.release(number)

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]

    async def _abort(self, numbers: Sequence[int]) -> None:
        tasks = [task for number in numbers if (task := self._tasks.get(number)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _generate(self, assignment: Assignment) -> None:
        """Continue a request to its end. What it generates goes into the buffer."""
        number = assignment.number
        try:
            await self._stream(assignment)
        except Exception as error:
            kind, text = error_kind(error), str(error) or type(error).__name__
            if kind == "internal":
                log.warning("the engine failed on request %d: %s", number, text, exc_info=_unexpected(error))
                self._buffer.fail(number, text)
            elif kind != "unavailable":  # a closed engine ends this worker: the request goes on elsewhere
                self._buffer.add(Failed(number, kind, text))

    async def _stream(self, assignment: Assignment) -> None:
        number, make = assignment.number, partial(scores, self._llm.tokenizer)
        handovers, pieces = self._split(assignment)
        searches = any((one["sampling"].get("num_beams") or 1) > 1 for one in handovers)
        self._buffer.add_all(pieces)
        outputs: dict[int, RequestOutput] = {}
        found: list[Piece] = []  # in one report with the end
        if handovers:
            stream = self._llm.import_request(handovers, keep_logprobs=False)
            async with aclosing(stream):
                async for chunk in stream:
                    self._refuse_if_broken(chunk)
                    if chunk.output is not None:
                        outputs[chunk.index] = chunk.output
                    piece = piece_of(number, chunk, make)
                    if searches:
                        found.append(piece)
                        continue
                    piece = _at_index(piece, handovers[chunk.index]["index"])
                    if len(outputs) == len(handovers):
                        found.append(piece)
                    else:
                        self._buffer.add(piece)
        end = await _end_of(number, [one for _, one in sorted(outputs.items())], make)
        self._buffer.add_all([*found, end])

    @staticmethod
    def _refuse_if_broken(chunk: StreamChunk) -> None:
        """Do not record an end that is the engine's alone: the request goes on elsewhere. Raises EngineFault."""
        if chunk.finish_reason == "aborted":  # the engine is being stopped
            raise asyncio.CancelledError
        error = (chunk.completion.error if chunk.completion is not None else None) or ""
        if chunk.finish_reason == "error" and not error.startswith(REQUEST_FAULTS):
            raise EngineFault(error)

    def _split(self, assignment: Assignment) -> tuple[list[dict[str, Any]], list[Piece]]:
        """The continuations to go on with, and pieces that end the others: their last token is recorded, their end is not."""
        going, pieces = [], []
        for one in assignment.handovers:
            found = _end_of_recorded(one, self._llm.tokenizer, self.model.max_model_len)
            if found is None:
                going.append(one)
            else:
                reason, text = found
                pieces.append(Piece(assignment.number, one["index"], text, [], None, reason))
        return going, pieces

    # -- reports -----------------------------------------------------------------------------------------------------

    async def _report(self, epoch: int) -> None:
        """Report new records at once where they begin or end a request, else within REPORT_EVERY_S; and the state."""
        loop = asyncio.get_running_loop()
        sequence, state_at = 0, 0.0
        looking: asyncio.Task[tuple[WorkerState, CacheChanges | None]] | None = None
        try:
            while True:
                if looking is None and loop.time() - state_at >= STATE_EVERY_S:
                    state_at = loop.time()
                    looking = asyncio.create_task(self._look())  # beside the records, which do not wait for it
                    looking.add_done_callback(lambda _: self._buffer.wake())
                await self._buffer.wait(STATE_EVERY_S if looking else state_at + STATE_EVERY_S - loop.time())
                records, released, faults = self._buffer.take()
                state = cache = None
                if looking is not None and looking.done():
                    state, cache = looking.result()
                    looking = None
                if records or released or faults or state is not None:
                    sequence += 1
                    await self._link.report(Report(self.name, epoch, sequence, records, released, state, cache, faults))
        finally:
            if looking is not None:
                looking.cancel()

    async def _look(self) -> tuple[WorkerState, CacheChanges | None]:
        return await self._state(), await self._cache_changes()

    async def _state(self) -> WorkerState:
        stats = await self._llm.stats()
        blocks, now = stats["blocks"], asyncio.get_running_loop().time()
        told = None
        if now - self._stats_at >= STATS_EVERY_S:
            self._stats_at, told = now, stats
        return WorkerState(blocks["usable"], blocks["limit"], blocks["free"], stats["preemptions"], stats["device"], told)

    async def _cache_changes(self) -> CacheChanges | None:
        if not self._follows_cache:
            return None
        if self._publisher is not None and self._publisher.needs_snapshot:
            return await self._whole_cache()
        events = await self._llm.cache_events()
        if events.lost:
            return await self._whole_cache()
        if self._publisher is not None and events:
            self._publisher.publish(events)
        return _changes(events) if events else None

    async def _whole_cache(self) -> CacheChanges:
        if not self._follows_cache:
            return CacheChanges(cleared=True)
        events = await self._llm.cache_snapshot()
        if self._publisher is not None:
            self._publisher.publish(events)
        return _changes(events)

    @property
    def _follows_cache(self) -> bool:
        return self._llm.config.kv_events


def _changes(events: CacheEvents) -> CacheChanges:
    """The changes as the queue needs them: the first 64 bits of each digest."""
    stored, removed = [block.digest >> 64 for block in events.stored], [digest >> 64 for digest in events.removed]
    return CacheChanges(stored, removed, events.cleared)


def _unexpected(error: Exception) -> Exception | None:
    """The error, if its traceback says more than its message."""
    return None if isinstance(error, EngineFault) else error


def _at_index(piece: Piece, index: int) -> Piece:
    if piece.index == index:
        return piece
    return Piece(piece.number, index, piece.text, piece.token_ids, piece.scores, piece.finish_reason, piece.error)


async def _end_of(number: int, outputs: Sequence[RequestOutput], make: MakeScores) -> RequestEnd:
    """The end of a request of which these continuations ended here."""
    if not outputs:
        return RequestEnd(number, [], 0)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    scores: list[Score] | None = None
    if (logprobs := outputs[0].prompt_logprobs) is not None:
        parts = scores_in_parts(make, logprobs, outputs[0].prompt_token_ids)
        scores = [score async for part in parts for score in part]
    return request_end(number, outputs[0], [], scores, generated)


def _end_of_recorded(handover: Mapping[str, Any], tokenizer: Any, max_model_len: int) -> tuple[FinishReason, str] | None:
    """The end of a continuation with its last token recorded: its end was lost with its worker. None if it is not there.

    Returns the reason, and the text that was held back. An engine finds a stop string after it has given the token.
    """
    from ..engine.text.detokenizer import TextStream

    tokens, sampling = handover["token_ids"], handover["sampling"]
    room = max_model_len - len(handover["prompt_token_ids"])
    reason, stops = _reason_of_end(tokens, sampling, room), sampling.get("stop") or ()
    if tokenizer is None or not tokens or not (reason or stops):
        return None if reason is None else (reason, "")
    skips, kept = sampling.get("skip_special_tokens") is not False, sampling.get("kept_special_tokens") or ()
    stream = TextStream(tokenizer, handover["prompt_token_ids"], stops, skips, kept)
    text = "".join([stream.push([token]) for token in tokens])
    if reason is not None:
        text += stream.finish()
    if stream.stopped:
        reason = "stop"
    return None if reason is None else (reason, text[handover["num_told_characters"] :])


def _reason_of_end(tokens: Sequence[int], sampling: Mapping[str, Any], room: int) -> FinishReason | None:
    if not tokens:
        return None
    if tokens[-1] in sampling["stop_token_ids"] and len(tokens) >= (sampling.get("min_new_tokens") or 0):
        return "stop"
    return "length" if len(tokens) >= min(sampling["max_new_tokens"], room) else None


def model_of(llm: AsyncLLM, reference: str) -> FleetModel:
    """What front ends and the queue need to know of a loaded model."""
    facts, spec = llm.facts, llm.config.model
    defaults = {field.name: getattr(facts.sampling, field.name) for field in fields(facts.sampling)}
    return FleetModel(
        reference=reference,
        path=str(spec.path),
        name=spec.name,
        identity=_identity(spec.path),
        dtype=facts.dtype,
        layout=facts.layout,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        num_tables=facts.num_tables,
        eos_token_ids=list(facts.eos_token_ids),
        bos_token_id=facts.bos_token_id,
        sampling={name: value for name, value in defaults.items() if value is not None},
        version=__version__,
    )


def _identity(path: Path) -> str:
    """A digest of the configuration in a model's folder, and of the names and sizes of its weight files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(path.glob("*")) if path.is_dir() else find_weights(path).paths:
        if file.suffix in (".safetensors", ".bin") or path.is_file():
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        elif file.name == "config.json":
            digest.update(file.read_bytes())
    return digest.hexdigest()

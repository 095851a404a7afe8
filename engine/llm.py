"""The embedded engine: `LLM`, for programs that generate in their own process."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from ..allocator.errors import LeaseClosed
from ..scheduler.errors import RequestRejected
from ..scheduler.outcome import Finished
from ..scheduler.request import Request, SamplingParams
from .build import Engine, build
from .config import DEFAULT_IDLE_S, EngineConfig
from .errors import EngineClosed
from .fair_lock import FairLock
from .outputs import RequestOutput, StreamChunk
from .tickets import Answer, Ticket

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
MOST_PRIORITY = 1000  # either way
_UNSET_PROGRESS_DELAY_S = 2.0  # shorter work shows no bar
STARVING_WAIT_S = 0.02
KEEPER_WAIT_S = 0.25
KEEPER_BUSY_WAIT_S = 0.06  # with memory still to be moved: whoever makes steps moves it meanwhile


class LLM:
    """A model and its paged KV cache, ready to generate.

    Args:
        model: A name from `configs/models.yaml` (or the file that PAGETIDE_CONFIG names; "demo" is always there), a
            folder in transformers' format, or a hub id that is in the local cache. Nothing is ever downloaded.
        device: "cpu", "cuda", "cuda:1"; "auto" is CUDA where there is a device.
        dtype: "float32", "bfloat16", "float16"; "auto" is the checkpoint's, except float16 on a CPU becomes float32.
        kv_memory: Bytes for the KV cache. A number, or a text like "2GiB": exactly so much. A mapping {"min", "max", "weight",
            "priority"}: it grows and shrinks between the bounds. "auto" does so too, within what `pagetide plan` shows.
        block_size: Tokens in a block; "auto" is 16.
        max_seqs: Sequences that run at the same time.
        max_step_tokens: Tokens computed in one step. No more sequences run than this, as each gets a token a step.
        max_model_len: Longest prompt and output together; None is the model's own limit.
        max_chunk_tokens: Most tokens of one prompt in one step; None is no limit but the step's.
        prefix_caching: Keep what was computed, so that prompts which begin alike are computed once.
        host_kv_memory: Host memory, such as "8GiB", to which what was computed is swapped out when the pool is full, instead of
            being computed again. None: none. Taken as it is needed, given back after `idle_s` without a request and by `close`.
        idle_s: Seconds after which memory goes back that no request needs, cached prefixes included.
        share: Hold a lease of the device, so that memory can move between engines; False keeps to itself.
        trust_remote_code: Run Python code that comes with the model's files; None is as the models file says (no).

    Raises:
        ModelNotFound, UnsupportedModel, NotEnoughMemory, ConfigError: see `pagetide.engine.errors`. Nothing stays allocated.

    May be used from several threads; whoever waits for an output drives the engine. Use as a context manager, or
    `close` it, to give the memory back at a known time.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str | Mapping[str, Any] = "auto",
        block_size: int | str = "auto",
        max_seqs: int = 256,
        max_step_tokens: int = 2048,
        max_model_len: int | None = None,
        max_chunk_tokens: int | None = None,
        prefix_caching: bool = True,
        host_kv_memory: int | str | None = None,
        idle_s: float = DEFAULT_IDLE_S,
        share: bool = True,
        trust_remote_code: bool | None = None,
    ) -> None:
        self.config = EngineConfig.resolve(
            model,
            device=device,
            dtype=dtype,
            kv_memory=kv_memory,
            block_size=block_size,
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            max_chunk_tokens=max_chunk_tokens,
            prefix_caching=prefix_caching,
            host_kv_memory=host_kv_memory,
            idle_s=idle_s,
            share=share,
            trust_remote_code=trust_remote_code,
        )
        self._engine: Engine | None = build(self.config)
        self._lock = FairLock()
        self._tickets: dict[str, Ticket] = {}
        self._undelivered: deque[tuple[str, int | Finished]] = deque()  # of the last step: empty, but for an interrupt
        self._abandoned: deque[Ticket] = deque()  # of streams that were forgotten; ended by the next step
        self._numbers = itertools.count()
        self._keeper = threading.Thread(
            target=_keep_memory, args=(weakref.ref(self),), name="pagetide-memory", daemon=True
        )
        self._keeper.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Returns the outputs in the order of the prompts (a list for a single prompt too).

        Args:
            prompts: A string or token ids, or several of them, mixed as you like.
            sampling_params: One for all, or one each; None is the model's generation config.
            priority: Lower goes first; a step of it weighs as much as 30 seconds of waiting.
            cache_salt: What is computed is shared with requests of the same salt alone, such as those of one tenant.
            progress: Show a bar; None shows one on a terminal when it takes longer than two seconds.

        Raises:
            RequestRejected: a prompt that cannot be served; then nothing of the call was started.
        """
        tickets = self._submit(self._encode_all(prompts, sampling_params), priority, cache_salt)
        try:
            with _Bar(
                total=sum(ticket.number == 0 for ticket in tickets), unit="prompt", leave=False, desc="generating",
                delay=_UNSET_PROGRESS_DELAY_S if progress is None else 0, disable=None if progress is None else not progress,
            ) as bar:  # fmt: skip
                for ticket in tickets:
                    while ticket.completion is None:
                        self._step(ticket)
                    if ticket is ticket.answer.tickets[-1]:
                        bar.update()
        finally:
            self._drop(tickets)
        return [ticket.answer.output for ticket in tickets if ticket.number == 0]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of `{"role": ..., "content": ...}`, through the tokenizer's template.

        Raises:
            RequestRejected: the model has no tokenizer, or its tokenizer no chat template.
        """
        prompts = self._render(messages, template_options)
        return self.generate(prompts, sampling_params, priority=priority, cache_salt=cache_salt, progress=progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[StreamChunk]:
        """Like `generate`, but gives what is new of each prompt as it comes, at least `stream_interval` tokens at a time.

        The requests are checked and queued by this call; they advance while the iterator is read. Closing it aborts what
        has not ended. A chunk's text ends at a whole character; the last chunk of each prompt carries its `output`.
        """
        if isinstance(stream_interval, bool) or not isinstance(stream_interval, int) or stream_interval < 1:
            raise RequestRejected(f"stream_interval must be an integer of at least 1, got {stream_interval!r}")
        tickets = self._submit(self._encode_all(prompts, sampling_params), priority, cache_salt, streams=True)
        return _Stream(self, tickets, stream_interval)

    def tokenize(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The token ids that `generate` would start from. Raises RequestRejected for what has none."""
        ids: list[int] = self._open().encoder.encode(prompt, sampling_params or SamplingParams()).tolist()
        return ids

    def reset_prefix_cache(self) -> None:
        """Let nothing that was computed so far be found by later requests. Those that run go on with what they have."""
        with self._lock:
            self._open().core.scheduler.cache.reset()

    def stats(self) -> dict[str, Any]:
        """What the engine holds and did: requests, blocks, bytes, counters. Plain data."""
        with self._lock:
            return self._open().stats()

    def explain(self) -> list[dict[str, Any]]:
        """The last 64 decisions that were made as blocks ran short, with the numbers they were made by. Plain data.

        Who waited or was passed, who was preempted and what that cost, what was evicted or swapped: see `Scheduler.explain`.
        """
        with self._lock:
            return self._open().core.scheduler.explain()

    def close(self) -> None:
        """End what runs (as aborted), give all memory back. Idempotent; whatever is asked afterwards raises EngineClosed."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is None:
                return
            for request_id in list(self._tickets):
                engine.core.abort(request_id)
            try:
                while engine.core.has_work or self._undelivered:
                    self._advance(engine)
            finally:
                engine.close()
        self._keeper.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------------------------

    def _open(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("this LLM is closed: make a new one")
        return self._engine

    def _encode_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[str | None, np.ndarray, SamplingParams]]:
        """Each prompt as (its string, its token ids, its parameters)."""
        self._open()
        many = _as_list(prompts)
        each: list[Any]
        if isinstance(params, SamplingParams | None):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params) if isinstance(params, Iterable) and not isinstance(params, Mapping) else [params]
        for given in each:
            if not isinstance(given, SamplingParams):
                raise RequestRejected(f"sampling_params must be SamplingParams, got {type(given).__name__}")
        if len(each) != len(many):
            raise RequestRejected(
                f"{len(many)} prompts, but {len(each)} sampling_params: give one for all, or one each"
            )
        engine = self._open()
        return [
            (prompt if isinstance(prompt, str) else None, engine.encoder.encode(prompt, given), given)
            for prompt, given in zip(many, each, strict=True)
        ]

    def _submit(
        self,
        encoded: list[tuple[str | None, np.ndarray, SamplingParams]],
        priority: int,
        cache_salt: str | None,
        streams: bool = False,
    ) -> list[Ticket]:
        """Queue all, or, when one is refused, none."""
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestRejected(f"cache_salt must be a text, or None for none, got {type(cache_salt).__name__}")
        salt = None if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MOST_PRIORITY:
            raise RequestRejected(
                f"priority must be an integer from {-MOST_PRIORITY} to {MOST_PRIORITY}, got {priority!r}"
            )
        with self._lock:
            engine = self._open()
            tickets: list[Ticket] = []
            for index, (prompt, ids, given) in enumerate(encoded):
                params = given.over(engine.sampling)
                engine.encoder.check_stops(params)
                request = Request(
                    request_id=f"r{next(self._numbers)}",
                    prompt_token_ids=ids,
                    sampling=params.resolve(engine.eos_token_ids),
                    priority=priority,
                    arrival=engine.core.clock(),
                    cache_salt=salt,
                )
                engine.core.scheduler.check(request)
                answer = Answer(index, prompt)
                answer.tickets = [
                    Ticket(answer, number, one, engine.encoder.text_stream(ids, params), streams)
                    for number, one in enumerate(request.forked(params.n or 1))
                ]
                tickets += answer.tickets
            for ticket in tickets:
                engine.core.add(ticket.request)
                self._tickets[ticket.request.request_id] = ticket
        return tickets

    def _step(self, ticket: Ticket) -> None:
        """One step of the engine, unless another thread's step finished `ticket` meanwhile."""
        with self._lock:
            if ticket.completion is not None:
                return
            engine = self._open()
            self._advance(engine)
        self._wait_if_starving(engine)

    def _wait_if_starving(self, engine: Engine) -> None:
        """Where steps do nothing but wait for the pool to grow: let the broker speak first."""
        memory = engine.core.memory
        if memory is not None and engine.core.scheduler.starving:
            with suppress(LeaseClosed):  # whoever closed it: the next step says so
                memory.wait(STARVING_WAIT_S)

    def _serve_memory(self) -> float | None:
        """Move memory between steps that nobody makes: serve recalls and give back when idle.

        Returns for how many seconds there is nothing to do, unless the broker speaks; None once closed.
        """
        with self._lock:
            if self._engine is None or (memory := self._engine.core.memory) is None:
                return None
            if memory.due:
                self._advance(self._engine)
                return KEEPER_BUSY_WAIT_S if memory.due else KEEPER_WAIT_S
            return KEEPER_WAIT_S

    def _advance(self, engine: Engine) -> None:
        """One step; its tokens and ends go to their tickets. What an interrupt keeps from them comes with the next call."""
        while self._abandoned:
            engine.core.abort(self._abandoned.popleft().request.request_id)
        events = self._undelivered
        if not events:
            emissions = engine.core.step()
            events.extend(zip(emissions.request_ids, emissions.tokens, strict=True))
            events.extend((finished.request_id, finished) for finished in emissions.finished)
        now = engine.core.clock()
        while events:
            request_id, event = events.popleft()
            if isinstance(event, Finished):
                ticket = self._tickets.pop(request_id, None)
                if ticket is not None:
                    ticket.finish(event, now)
            elif (ticket := self._tickets.get(request_id)) is not None:
                reason = ticket.push(event, now)
                if reason is not None:
                    engine.core.abort(request_id, reason)

    def _drop(self, tickets: Iterable[Ticket]) -> None:
        """Abort what has not ended: its caller is gone."""
        with self._lock:
            left = [t for t in tickets if t.completion is None]
            if self._engine is None or not left:
                return
            for ticket in left:
                self._engine.core.abort(ticket.request.request_id)
            while any(t.completion is None for t in left):
                self._advance(self._engine)

    def _next_chunk(self, tickets: list[Ticket], interval: int) -> StreamChunk | None:
        """A chunk of the first ticket that has one, moved to the end of `tickets` or, after its last one, out of it. None
        when none had one, after a step.
        """
        with self._lock:
            for i, ticket in enumerate(tickets):
                if ticket.ready(interval):
                    del tickets[i]
                    chunk = ticket.take()
                    if chunk.completion is None:
                        tickets.append(ticket)
                    return chunk
            engine = self._open()
            self._advance(engine)
        self._wait_if_starving(engine)
        return None

    def _forget(self, tickets: list[Ticket]) -> None:
        """Abort what has not ended: at once, or by the next step where one is running, perhaps in this very thread."""
        self._abandoned.extend(t for t in tickets if t.completion is None)
        if self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._engine is not None and self._abandoned:
                    self._advance(self._engine)
            finally:
                self._lock.release()

    def _render(self, messages: Any, options: dict[str, Any]) -> list[list[int]]:
        engine = self._open()
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise RequestRejected(
                f"messages must be a list of {{'role': ..., 'content': ...}}, or several such lists, got "
                f"{type(messages).__name__}"
            )
        many = list(messages)
        conversations = [many] if many and isinstance(many[0], Mapping) else many
        return [engine.encoder.render(conversation, options) for conversation in conversations]


class _Bar(tqdm):
    """A progress bar without the thread that tqdm otherwise starts with its first bar, and never ends."""

    monitor_interval = 0


class _Stream(Iterator[StreamChunk]):
    """The chunks of some requests, as they come. Reading drives the engine; `close` aborts what has not ended.

    One that is forgotten instead leaves its requests to the next step: the garbage collector may run in the middle of
    one, in the very thread that holds the engine's lock, so nothing may be waited for there.
    """

    def __init__(self, llm: LLM, tickets: list[Ticket], interval: int) -> None:
        self._llm = llm
        self._tickets = tickets  # those whose last chunk was not given
        self._interval = interval

    def __next__(self) -> StreamChunk:
        try:
            while self._tickets:
                chunk = self._llm._next_chunk(self._tickets, self._interval)
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        tickets, self._tickets = self._tickets, []
        self._llm._drop(tickets)

    def __del__(self) -> None:
        self._llm._forget(self._tickets)


def _keep_memory(reference: weakref.ref[LLM]) -> None:
    """Until the engine is closed or forgotten: wait for its lease to say something, then let it be served."""
    while (llm := reference()) is not None:
        engine = llm._engine
        if engine is None or engine.core.memory is None:
            return
        memory = engine.core.memory
        wait_s: float | None = KEEPER_WAIT_S
        try:
            wait_s = llm._serve_memory()
        except Exception:
            log.exception("the engine's memory could not be moved; tried again in %g s", KEEPER_WAIT_S)
        if wait_s is None:
            return
        del llm, engine  # while it waits, nothing but its users keeps the engine alive
        try:
            memory.wait(wait_s)
        except LeaseClosed:
            return


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many, as many. Raises RequestRejected for none."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise RequestRejected(f"prompts must be strings or lists of token ids, got {type(prompts).__name__}")
    many = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # an array's or a tensor's numbers
    if not isinstance(many, list):
        raise RequestRejected(f"prompts must be strings or lists of token ids, got the single number {many!r}")
    if not many:
        raise RequestRejected("no prompt was given: pass a string, token ids, or a list of them")
    first = many[0]
    return [many] if not isinstance(first, str) and not isinstance(first, Iterable) else many

"""The embedded engine `LLM`, for programs that generate text in their own process."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.arguments import explains_arguments, explains_names, takes
from ..api.sampling_params import SamplingParams
from ..cache.cache_events import CacheEvents
from ..common.on_error import OnError
from ..common.settings import lists_settings
from ..frames.source import encode
from ..scheduler.request import RequestRejected
from .config import EngineArguments, EngineConfig
from .errors import EngineClosed
from .requests.engine_thread import EngineThread, result_of
from .requests.inputs import Message, Prompt, PromptInput, Prompts, check_count, joined_progress, pair_params, paired, text_of
from .requests.manager import RequestManager
from .requests.outputs import PinnedPrefix, RequestOutput, StreamChunk, refused
from .requests.pending_calls import PendingCall
from .requests.progress import Bar
from .requests.states import RequestState
from .requests.warm_prompts import warm_up
from .watch import EngineWatch, decoder, with_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .build import Engine, ModelFacts

log = logging.getLogger(__name__)
Value = TypeVar("Value")

_UNSET_PROGRESS_DELAY_S = 2.0  # shorter calls show no bar


@lists_settings(EngineArguments)
@explains_names("LLM")
class LLM:
    """A model and its paged KV cache, ready to generate.

    Args: see `EngineArguments`.

    Raises:
        ModelNotFound, UnsupportedModel, NotEnoughMemory, ConfigError: see `pagetide.engine.errors`. Nothing stays allocated.
        ShardLost: a process of a divided model has ended while it loaded.
        UnknownArgument: (a TypeError and ValueError) an unknown name, also in the methods; says what to write instead.

    Thread-safe. A thread of the engine's own runs the steps, while a caller waits for an output or a chunk. KeyboardInterrupt
    is raised in that wait, and aborts its requests. Use it as a context manager, or call `close`, to free the memory at a known
    time.
    """

    @takes("LLM", EngineArguments)
    def __init__(self, arguments: EngineArguments) -> None:
        self.config = EngineConfig.of(arguments)
        self._manager = RequestManager(self.config)
        self._engine_thread = EngineThread(self._manager, "LLM", max_waiting=sys.maxsize, on_demand=True)
        weakref.finalize(self, self._engine_thread.forget).atexit = False  # engine_thread.py ends it at exit
        warm_up(self.config.warm_prompts, self._engine_thread, self._manager)

    @explains_arguments("LLM.generate")
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Returns the outputs in the order of the prompts (a list for a single prompt too).

        Args:
            prompts: A string or token ids, or several of them, mixed as you like. vLLM's `{"prompt": ...}` and
                `{"prompt_token_ids": [...]}`, which may have a `cache_salt`, and a tokenizer's result are prompts too.
            sampling_params: One for all, or one each; None is the model's generation config.
            priority: Lower values are served first; a difference of 1 weighs as much as 30 seconds of waiting.
            cache_salt: Computed blocks are shared with requests of the same salt only, such as those of one tenant.
            progress: Show a bar; None shows one on a terminal if the call takes longer than two seconds. Alias:
                `use_tqdm`.

        Raises:
            RequestRejected: a prompt cannot be served; nothing of the call is started then.
        """
        progress, intake = joined_progress(progress, use_tqdm), self._engine_thread.intake
        call = self._begin(intake.encode(prompts, sampling_params), priority, cache_salt)
        try:
            return self._outputs(call, progress)
        finally:
            call.close()

    def _begin(
        self, inputs: list[PromptInput], priority: int | None, cache_salt: str | None, interval: int | None = None
    ) -> _BlockingCall:
        """Send the requests of a call to the engine's thread. An error of its inputs waits for the call's results.

        Raises RequestRejected for a constraint, and EngineClosed.
        """
        self._engine_thread.check_caller()
        for one in inputs:
            one.prepared.compile()
        call = _BlockingCall(self, len(inputs), PendingCall(None, priority, cache_salt, interval))
        self._engine_thread.submit(call.pending, inputs)
        return call

    def _outputs(self, call: _BlockingCall, progress: bool | None) -> list[RequestOutput]:
        """The outputs of `call`, with a bar meanwhile."""
        thread, pending, num_tokens = self._engine_thread, call.pending, 0
        with Bar(
            lambda: num_tokens,
            disable=None if progress is None else not progress,
            delay=_UNSET_PROGRESS_DELAY_S if progress is None else 0,
            total=call.num_prompts,
            unit="prompt",
            desc="generating",
        ) as bar:
            while True:
                with suppress(TimeoutError):
                    outputs: list[RequestOutput] = call.results(None if bar.disable else bar.mininterval)
                    bar.update(len(outputs) - bar.n)
                    return outputs
                ended, num_tokens = thread.ask(
                    thread.run_with_engine,
                    lambda _: (sum(group.is_finished for group in pending.groups), pending.num_generated),
                )
                bar.update(ended - bar.n)

    @explains_arguments("LLM.chat")
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of `{"role": ..., "content": ...}`, through the tokenizer's template.

        Args:
            messages: A conversation, or a list of them.
            sampling_params: See `generate`, also for the next three.
            template_options: Variables of the template, and options of the tokenizer's `apply_chat_template`. vLLM's
                `chat_template_kwargs` are more of them.

        Raises:
            RequestRejected: the model has no tokenizer, or its tokenizer no chat template.
        """
        prompts, progress = (self._engine_thread.intake.render(messages, template_options), joined_progress(progress, use_tqdm))
        return self.generate(prompts, sampling_params, priority=priority, cache_salt=cache_salt, progress=progress)

    @explains_arguments("LLM.stream")
    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Stream:
        """Like `generate`, but streams the output in chunks of at least `stream_interval` tokens.

        This call checks and queues the requests; steps run while a caller waits for a chunk or an output. Closing the
        iterator aborts unfinished requests. A chunk's text ends at a whole character; the last chunk of each prompt carries its
        `output`.
        """
        check_count("stream_interval", stream_interval)
        inputs = self._engine_thread.intake.encode(prompts, sampling_params)
        return Stream(self._begin(inputs, priority, cache_salt, stream_interval))

    @explains_arguments("LLM.stream_chat")
    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> Stream:
        """Like `chat`, but streams the answers: see `stream`."""
        prompts = self._engine_thread.intake.render(messages, template_options)
        return self.stream(prompts, sampling_params, stream_interval=stream_interval, priority=priority, cache_salt=cache_salt)

    @explains_arguments("LLM.import_request")
    def import_request(
        self, data: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, stream_interval: int = 1, priority: int | None = None
    ) -> Stream:
        """Continue requests that another process has exported (`RequestHandle.export`).

        The chunks begin where those of the other process ended; the outputs are complete.

        Args:
            data: The result of `export`, or several, perhaps through JSON. Each has an output of its own, in this order.
            stream_interval: See `stream`.
            priority: None keeps the priority of each request.

        Raises:
            RequestRejected: the data are inconsistent or of another version or vocabulary, or the engine cannot serve a
                request; nothing of the call is started then.
        """
        check_count("stream_interval", stream_interval)
        inputs = self._engine_thread.intake.parse_exported(data)
        return Stream(self._begin(inputs, priority, None, stream_interval))

    @explains_arguments("LLM.generate_each")
    def generate_each(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        look_ahead: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        exported: Iterable[Mapping[str, Any] | None] = (),
    ) -> OrderedOutputs:
        """Continue prompts from an iterable, which may be endless. Yields the outputs in the same order.

        A rejected prompt has an output in its place, with finish reason "error".

        Args:
            prompts: Strings or token ids, one by one.
            sampling_params: One for all, or an iterable of one each.
            look_ahead: Maximum prompts taken from the iterable before the first one's output; default `2 * max_seqs`.
            exported: For each prompt the data of its request that `OrderedOutputs.pending` gave in another process, to continue
                it, or None. A request that cannot be continued begins anew, which is logged. May be shorter than `prompts`.
        """
        if look_ahead is None:
            look_ahead = 2 * self.config.max_seqs
        check_count("look_ahead", look_ahead)
        begun = iter(exported)
        inputs = ((prompt, params, next(begun, None)) for prompt, params in paired(prompts, sampling_params))
        return OrderedOutputs(self, inputs, look_ahead, priority, cache_salt)

    def render(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The prompt token ids of `chat` for this conversation. Raises RequestRejected as `chat` does."""
        (ids,) = self._engine_thread.intake.render([messages], template_options)
        return ids

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model: its context, vocabulary, device, dtype and default sampling."""
        return self._engine_thread.open().facts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer; None for a model that serves token ids only. Shared with the engine: do not modify it."""
        tokenizer: PreTrainedTokenizerBase | None = self._engine_thread.open().encoder.tokenizer
        return tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """`tokenizer`, by vLLM's name."""
        return self.tokenizer

    @explains_arguments("LLM.tokenize")
    def tokenize(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The prompt token ids of `generate` for this prompt. Raises RequestRejected for an invalid prompt."""
        return self._engine_thread.intake.tokenize(prompt, sampling_params or SamplingParams())

    @explains_arguments("LLM.pin_prefix")
    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> PinnedPrefix:
        """Compute a prefix, unless it is cached, and keep its full blocks in memory until `unpin_prefix`.

        Requests that begin with these tokens, and have the same `cache_salt`, find them. `render` gives the tokens of a chat;
        leave its generation prompt out with `add_generation_prompt=False` where other messages may follow.

        A pin ends by itself with `reset_prefix_cache`, and if a recall, a lower limit or the device takes the memory of its
        blocks; the newest ends first. `stats()["prefix_cache"]` counts pins, their blocks, and `lost_pins`.

        Raises:
            RequestRejected: too few blocks would be left for one request of `max_model_len` tokens, the prompt has no full
                block, or it cannot be computed.
        """
        thread = self._engine_thread
        (one,) = thread.intake.encode_pin(prompt)
        with OnError(lambda: thread.unpin(one)):
            call = self._begin([one], 0, cache_salt)
            try:
                (output,) = self._outputs(call, False)
            finally:
                call.close()
            pinned: PinnedPrefix = thread.ask(thread.run_with_engine, lambda _: thread.intake.pinned(one, output))
            return pinned

    def unpin_prefix(self, prefix: PinnedPrefix) -> bool:
        """End a pin: its blocks are cached as others are. Returns whether they were pinned until now."""
        thread = self._engine_thread
        was_there: bool = thread.ask(thread.run_with_engine, lambda engine: engine.core.scheduler.cache.unpin(prefix.name))
        return was_there

    def reset_prefix_cache(self) -> None:
        """Hide all blocks computed so far from later requests, and end all pins. Running requests keep their blocks."""
        self._engine_thread.ask(self._engine_thread.run_with_engine, lambda engine: engine.core.scheduler.cache.reset())

    def stats(self) -> dict[str, Any]:
        """The engine's state and counters (requests, blocks, bytes) as plain data.

        Waits 20 ms for the end of a step; during a longer one these are the values of some milliseconds before it.
        """
        return self._engine_thread.stats()

    def explain(self, request: str | None = None) -> list[dict[str, Any]]:
        """The last 64 scheduling decisions made while blocks were short, with the numbers behind them. Plain data.

        They tell which requests waited, were passed or were preempted, at what cost, and what was evicted or swapped: see
        `Scheduler.explain`. Each has its running number `n` and the `label` of its request.

        Args:
            request: Only those that concern this request, by its id or label.
        """
        return self._look(lambda watch: watch.explain(request))

    def frame(self, full: bool = False) -> bytes:
        """The next frame of the engine's blocks and requests, as a line of JSON.

        A frame is the state between two steps: the owner of each block, the running and the waiting requests, and why. It is
        the difference to the frame of the call before, unless `full` or the first one: docs/page.md has its form. There is one
        series of frames for each engine. Texts and token ids are not in it.
        """
        return encode(self._look(lambda watch: watch.frame(full)))

    def cache_events(self) -> CacheEvents:
        """The blocks that became findable in the prefix cache, and those that did not stay so, since the last call.

        Apply the changes in the order `cleared`, `removed`, `stored`; if changes are `lost`, begin anew with
        `cache_snapshot`. Up to 65,536 changed blocks are kept between two calls. There is one series of events for each engine.
        With layers that read a part of each sequence, a hit may end before the last findable block of a prompt.

        Raises:
            ConfigError: the engine was made without `kv_events`.
        """
        return self._look(EngineWatch.cache_events).events()

    def cache_snapshot(self) -> CacheEvents:
        """All findable blocks, as events with `cleared`: the next `cache_events` are the changes since then.

        Raises ConfigError as `cache_events` does.
        """
        return CacheEvents([*self._look(EngineWatch.cache_snapshot).blocks()], cleared=True)

    def block(self, block: int, text: bool = False) -> dict[str, Any]:
        """The details of a block of the pool: plain data.

        Returns:
            "state": unmapped, free, draining, cached, in_flight, null or live. "rows": its holders, each with "id", "label",
            "row" and "position" in the row's table.
            "hits": how often requests found it. "tokens": the positions of its tokens, [first, last + 1]. "text": with `text`
            and a tokenizer, what is in it.

        Raises:
            RequestRejected: the pool has no such block.
        """
        details = self._look(lambda watch: watch.block(block))
        return with_text(details, decoder(self.tokenizer) if text else None)

    @contextmanager
    def locked_engine(self) -> Iterator[Engine]:
        """Hold the engine between two steps and yield its parts, for tools that measure or inspect. Not a stable interface.

        Within the context the engine runs no step, and none is pending on the device. The tool may change the parts between
        steps (for example `engine.core.runner.model`) and run steps with `engine.core.step`. Outputs of these do not reach the
        callers of this LLM, so the tool adds its own requests with `engine.core.add`.

        Calls of this LLM from the same thread within the context raise RuntimeError, as they would deadlock. Only `stats` does
        not: it returns earlier values.

        Raises:
            EngineClosed: the engine is closed.
        """
        with self._engine_thread.held_engine() as engine:
            yield engine

    def close(self) -> None:
        """Abort all requests and free all memory. Idempotent. Later calls raise EngineClosed.

        Raises EngineClosed in a forked child, which has no engine to close.
        """
        self._engine_thread.ask(self._engine_thread.end)
        self._engine_thread.join()  # returns at once: the thread has resolved its last waiter

    def _look(self, function: Callable[[EngineWatch], Value]) -> Value:
        """The result of `function` with the watched side of the engine, between two steps. Raises EngineClosed."""
        result: Value = self._engine_thread.ask(self._engine_thread.look, function)
        return result

    def __repr__(self) -> str:
        """The model, where and how it runs, the size of its pool and its requests."""
        return f"LLM({self.config.model.name!r}, {self._engine_thread.describe()})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._manager.is_here:
            self.close()


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A handle to an unfinished continuation, or beam search, of a stream: continuation `number` of prompt `index`."""

    request_id: str
    index: int
    number: int
    _stream: Stream = field(repr=False)  # keeps the stream alive: its collection would abort the request
    _state: RequestState = field(repr=False)

    def export(self) -> dict[str, Any]:
        """End the request here and return it as plain data for JSON. Another process continues it with `LLM.import_request`.

        The data have all tokens so far, the settings with the seed, the counters and the requested log-probabilities. On a CPU
        in float32 the following tokens are the same as they would be here. Output that no chunk has delivered yet is delivered
        by the other process only, so the chunks of both make up those of an undisturbed request. The completion here has the
        delivered output and finish reason "aborted"; the blocks are free at once. A beam search starts again from the prompt
        after the import, and finds the same.

        Raises:
            RequestRejected: the request has ended, or it has `logits_processors`, which are not plain data; nothing changes.
            EngineClosed: the engine is closed.
        """
        return self._stream._export(self._state)


class _BlockingCall:
    """A call of an `LLM`: its caller blocks for the results. Closing or collecting it aborts unfinished requests."""

    def __init__(self, llm: LLM, num_prompts: int, pending: PendingCall) -> None:
        self.num_prompts = num_prompts
        self.pending = pending
        self._llm = llm  # keeps the engine alive
        self._waiter: Future[Any] | None = None

    def check_queued(self) -> None:
        """Wait until the requests are queued. Raises RequestRejected, EngineClosed."""
        self.run(lambda: self.pending.result)

    def run(self, function: Callable[[], Any]) -> Any:
        """The result of `function` in the engine's thread, between two steps. Raises it if it is an error."""
        thread = self._llm._engine_thread
        return thread.ask(thread.run_with_engine, lambda engine: function())

    def results(self, timeout_s: float | None = None) -> Any:
        """Wait for all outputs, or a stream's next chunks: none if it is closed. Call it until `pending` is over.

        Raises RequestRejected, EngineClosed, and TimeoutError after `timeout_s`: call it again.
        """
        thread = self._llm._engine_thread
        if self.pending.result is not None:
            return result_of(self.pending.result)
        if self._waiter is None:
            thread.check_caller()
            self._llm._manager.check_process()
            waiter: Future[Any] = Future()
            thread.want(waiter, self.pending)
            self._waiter = waiter
        result = self._waiter.result(timeout_s)
        self._waiter = None
        if not result and thread.ended and not self.pending.cancelled:
            result = self.pending.collect() or thread.closed()
        return result_of(result)

    def cancel(self) -> None:
        """Abort unfinished requests soon. Idempotent; never blocks."""
        if not (self.pending.over or self.pending.cancelled):
            self._llm._engine_thread.cancel(self.pending)

    def close(self) -> None:
        """Abort unfinished requests, and wait until they have ended. Idempotent."""
        if self.pending.over or self.pending.cancelled:
            return
        self.cancel()
        try:
            with suppress(EngineClosed):
                self.run(lambda: None)
        except KeyboardInterrupt:
            log.warning("interrupted while a step runs: the requests end when it is over; if it hangs, end the process")
            raise

    __del__ = cancel


class Stream(Iterator[StreamChunk]):
    """An iterator over the chunks of requests. They advance while a caller waits; `close` aborts unfinished requests.

    The requests of a stream that is garbage-collected instead are aborted soon after: the collector does not wait.
    """

    def __init__(self, call: _BlockingCall) -> None:
        self._call = call
        self._chunks: deque[StreamChunk] = deque()
        self._waits = threading.Lock()  # for the next chunks
        call.check_queued()

    def __next__(self) -> StreamChunk:
        with OnError(self.close), self._waits:
            while not self._chunks and not (self._call.pending.over or self._call.pending.cancelled):
                self._chunks.extend(self._call.results())
            if self._chunks:
                return self._chunks.popleft()
        raise StopIteration

    @property
    def requests(self) -> tuple[RequestHandle, ...]:
        """The unfinished continuations, ordered by prompt and number; one for each beam search."""
        return tuple(
            RequestHandle(state.request.request_id, state.group.index, state.number, self, state)
            for state in self._call.pending.exportable
        )

    def outputs(self) -> list[RequestOutput]:
        """Run to the end and return the outputs in the order of the prompts. Remaining chunks are discarded."""
        for _ in self:
            pass
        return [group.output for group in self._call.pending.groups]

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""
        self._call.close()
        self._chunks.clear()

    def _export(self, state: RequestState) -> dict[str, Any]:
        """See `RequestHandle.export`."""
        unread = [chunk for chunk in self._chunks if chunk.index == state.group.index and chunk.number == state.number]

        def export() -> dict[str, Any]:
            state.put_back(unread)
            return self._call._llm._manager.export(state)

        data: dict[str, Any] = self._call.run(export)
        self._chunks = deque(chunk for chunk in self._chunks if chunk not in unread)
        return data


class OrderedOutputs(Iterator[RequestOutput]):
    """The outputs of `LLM.generate_each`. They advance while a caller waits; `close` aborts the requests that were begun.

    Prompts are taken when an output is waited for. For a collected object see `Stream`.
    """

    def __init__(
        self,
        llm: LLM,
        inputs: Iterator[tuple[Prompt, SamplingParams | None, Mapping[str, Any] | None]],
        look_ahead: int,
        priority: int,
        cache_salt: str | None,
    ) -> None:
        self._llm = llm
        self._inputs = inputs
        self._look_ahead = look_ahead
        self._priority, self._cache_salt = priority, cache_salt
        # The output of each prompt that was taken, or its call.
        self._taken: deque[tuple[Prompt, RequestOutput | _BlockingCall]] = deque()

    def __next__(self) -> RequestOutput:
        with OnError(self.close):
            self.wait()
            if not self._taken:
                raise StopIteration
            output = self._taken.popleft()[1]
            assert isinstance(output, RequestOutput)
            return output

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the next output is complete, `timeout_s` at most. Returns whether it is, or whether there is none."""
        for prompt, params, exported in islice(self._inputs, self._look_ahead - len(self._taken)):
            self._taken.append((prompt, self._start(prompt, params, exported)))
        if self._taken and isinstance(call := self._taken[0][1], _BlockingCall):
            prompt = self._taken[0][0]
            try:
                (output,) = call.results(timeout_s)
            except TimeoutError:
                return False
            except RequestRejected as error:
                output = self._refused(prompt, error)
            self._taken[0] = prompt, output
        return True

    def pending(self) -> list[RequestOutput | dict[str, Any] | None]:
        """What is known of the prompts that were taken and have not been yielded, in their order.

        Of each its output, if it is complete; or the data of its request in the form of `RequestHandle.export`, while it goes
        on; or None, if it has no token yet or cannot be continued elsewhere, as several continuations and beams.
        """
        thread, manager = self._llm._engine_thread, self._llm._manager
        calls = [call.pending for _, call in self._taken if isinstance(call, _BlockingCall)]
        copies = thread.ask(
            thread.run_with_engine,
            lambda _: {call: copy for call in calls if call.groups for copy in manager.copies(call.groups)},
        )
        engine = thread.open()
        known: list[RequestOutput | dict[str, Any] | None] = []
        for prompt, one in self._taken:
            if isinstance(one, RequestOutput):
                known.append(one)
            elif isinstance(one.pending.result, BaseException):
                known.append(self._refused(prompt, one.pending.result))
            elif one.pending.groups[0].is_finished:
                known.append(one.pending.groups[0].output)
            else:
                copy = copies[one.pending]
                known.append(None if copy is None else copy.to_dict(engine.plan.model, engine.encoder.vocab_size))
        return known

    def close(self) -> None:
        """Abort the requests that were begun. Idempotent."""
        taken, self._taken, self._inputs = self._taken, deque(), iter(())
        for _, call in taken:
            if isinstance(call, _BlockingCall):
                call.cancel()

    def _start(
        self, prompt: Prompt, params: SamplingParams | None, exported: Mapping[str, Any] | None
    ) -> RequestOutput | _BlockingCall:
        intake = self._llm._engine_thread.intake
        if exported is not None:
            try:
                call = self._llm._begin(intake.parse_exported(exported), self._priority, None)
                call.check_queued()
                return call
            except RequestRejected as error:
                log.warning("restarting a request that cannot be continued: %s", error)
        try:
            return self._llm._begin(intake.encode_one(prompt, params), self._priority, self._cache_salt)
        except RequestRejected as error:
            return self._refused(prompt, error)

    def _refused(self, prompt: Prompt, error: BaseException) -> RequestOutput:
        return refused(text_of(prompt), str(error), self._llm.tokenizer is not None)


def generate(
    model_name: str | os.PathLike[str],
    prompt: str | Sequence[str],
    max_new_tokens: int | None = None,
    device: str = "auto",
    **sampling: Any,
) -> str | list[str]:
    """The text that follows a prompt, or a list of texts for several: for a script that asks once.

    The model is loaded for this call. `LLM` keeps it loaded, takes all settings, and returns more than the text.

    Args:
        model_name: As the `model` of `LLM`: a name, a folder, or a hub id in the local cache.
        sampling: Further arguments of `SamplingParams`.

    Raises what `LLM` and its `generate` raise; RuntimeError for a request that failed.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    prompts = [one for one, _ in pair_params(prompt, params)]  # what is no prompt raises before the model is loaded
    with LLM(model_name, device=device) as llm:
        outputs = llm.generate(prompts, params)
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"the request failed: {output.error}")
    texts = [output.text for output in outputs]
    return texts[0] if isinstance(prompt, str) else texts

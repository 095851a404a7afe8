"""The embedded engine: `LLM`, for programs that generate in their own process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..scheduler.request import SamplingParams
from .config import DEFAULT_IDLE_S, EngineConfig
from .requests.inputs import Message, Prompt, check_count, paired
from .requests.manager import RequestManager
from .requests.outputs import RequestOutput, StreamChunk
from .requests.progress import Bar
from .requests.states import RequestGroup, RequestState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .build import Engine

_UNSET_PROGRESS_DELAY_S = 2.0  # shorter work shows no bar


class LLM:
    """A model and its paged KV cache, ready to generate.

    Args:
        model: A name from `configs/models.yaml` (or the file that PAGETIDE_CONFIG names; "demo" is always there), a
            folder in transformers' format, or a hub id that is in the local cache. Nothing is ever downloaded. Or a loaded
            transformers model, which stays as it is and shares its weights (leave these alone meanwhile); device and dtype are
            then its own.
        tokenizer: A name, a folder or a hub id likewise, or a loaded tokenizer; None is the model's own.
        device: "cpu", "cuda", "cuda:1"; "auto" is CUDA where there is a device.
        dtype: "float32", "bfloat16", "float16"; "auto" is the checkpoint's, except float16 on a CPU becomes float32.
        kv_memory: Bytes for the KV cache. A number, or a text like "2GiB": exactly so much. A mapping {"min", "max", "weight",
            "priority"}: it grows and shrinks between the bounds. "auto" does so too, within what `pagetide plan` shows.
        block_size: Tokens in a block; "auto" is 16, or the least from there that the `attention` asked for takes.
        max_seqs: Sequences that run at the same time.
        max_step_tokens: Tokens computed in one step. No more sequences run than this, as each gets a token a step.
        max_model_len: Longest prompt and output together; None is the model's own limit.
        max_chunk_tokens: Most tokens of one prompt in one step; None is no limit but the step's.
        prefix_caching: Keep what was computed, so that prompts which begin alike are computed once.
        prefix_cache_memory: Most memory, such as "2GiB", of cached blocks: those that no running request holds. Beyond it the
            least valuable are evicted at once, or demoted to the host tier. None: no bound. 0: requests share blocks while they
            run at the same time, and nothing stays cached when they have ended.
        prefix_hash_secret: Key of the prefix hashes, at least 16 bytes. Engines with equal secret and block size have equal
            hashes of the same tokens and `cache_salt`. None: a random one. Treat it as a key (`pagetide.cache.prefix_hash`).
        host_kv_memory: Host memory, such as "8GiB", to which what was computed is swapped out when the pool is full, instead of
            being computed again. None: none. Taken as it is needed, given back after `idle_s` without a request and by `close`.
        idle_s: Seconds after which memory goes back that no request needs, cached prefixes included.
        share: Hold a lease of the device, so that memory can move between engines; False keeps to itself.
        trust_remote_code: Run Python code that comes with the model's files; None is as the models file says (no).
        attention: What attends: "torch", "triton", "flash-attn" (in blocks of multiples of 256 tokens), "flash-attn-3",
            "flash-attn-4", "flashinfer" or "varlen" (torch's). "auto" is torch on a CPU, and on CUDA the fastest of the first
            four and "varlen" as far as they are there and suit model and block size. `stats()` says which it is.
        overlap: Begin a step, where it but continues the last one, before that one's tokens are on the host: the device does
            not wait then while they are handed out. None: on CUDA.
        cuda_graphs: On CUDA, replay decode steps from CUDA graphs captured at the start, where model and attention can be.
        self_check: On CUDA, try once for each device, driver and versions whether the elastic pool, each attention kernel, CUDA
            graphs and swaps work there, and do without those that fail, with a warning. The result is kept. False: use all.

    Raises:
        ModelNotFound, UnsupportedModel, NotEnoughMemory, ConfigError: see `pagetide.engine.errors`. Nothing stays allocated.

    May be used from several threads; whoever waits for an output drives the engine. Use as a context manager, or
    `close` it, to give the memory back at a known time.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str | Mapping[str, Any] = "auto",
        block_size: int | str = "auto",
        max_seqs: int = 256,
        max_step_tokens: int = 2048,
        max_model_len: int | None = None,
        max_chunk_tokens: int | None = None,
        prefix_caching: bool = True,
        prefix_cache_memory: int | str | None = None,
        prefix_hash_secret: bytes | None = None,
        host_kv_memory: int | str | None = None,
        idle_s: float = DEFAULT_IDLE_S,
        share: bool = True,
        trust_remote_code: bool | None = None,
        attention: str = "auto",
        overlap: bool | None = None,
        cuda_graphs: bool = True,
        self_check: bool = True,
    ) -> None:
        self.config = EngineConfig.resolve(
            model,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            kv_memory=kv_memory,
            block_size=block_size,
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            max_chunk_tokens=max_chunk_tokens,
            prefix_caching=prefix_caching,
            prefix_cache_memory=prefix_cache_memory,
            prefix_hash_secret=prefix_hash_secret,
            host_kv_memory=host_kv_memory,
            idle_s=idle_s,
            share=share,
            trust_remote_code=trust_remote_code,
            attention=attention,
            overlap=overlap,
            cuda_graphs=cuda_graphs,
            self_check=self_check,
        )
        self._manager = RequestManager(self.config)

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
        manager = self._manager
        states = manager.submit(manager.encode(prompts, sampling_params), priority, cache_salt)
        try:
            with Bar(
                total=sum(state.number == 0 for state in states), unit="prompt", leave=False, desc="generating",
                delay=_UNSET_PROGRESS_DELAY_S if progress is None else 0, disable=None if progress is None else not progress,
            ) as bar:  # fmt: skip
                for state in states:
                    while state.completion is None:
                        manager.step_for(state)
                    if state is state.answer.states[-1]:
                        bar.update()
        finally:
            manager.drop(states)
        return [state.answer.output for state in states if state.number == 0]

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
        prompts = self._manager.render(messages, template_options)
        return self.generate(prompts, sampling_params, priority=priority, cache_salt=cache_salt, progress=progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream_interval: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Stream:
        """Like `generate`, but gives what is new of each prompt as it comes, at least `stream_interval` tokens at a time.

        The requests are checked and queued by this call; they advance while the iterator is read. Closing it aborts what
        has not ended. A chunk's text ends at a whole character; the last chunk of each prompt carries its `output`.
        """
        check_count("stream_interval", stream_interval)
        asked = self._manager.encode(prompts, sampling_params)
        return Stream(self._manager, self._manager.submit(asked, priority, cache_salt, streams=True), stream_interval)

    def import_request(
        self,
        data: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        stream_interval: int = 1,
        priority: int | None = None,
    ) -> Stream:
        """Go on with what another process has exported (`RequestHandle.export`), one request or several.

        The chunks begin where those of the other process ended; the outputs have everything, as if all had been done here.

        Args:
            data: What `export` gave, perhaps through JSON. Each is an answer of its own, in this order.
            stream_interval: See `stream`.
            priority: None is what each of them had.

        Raises:
            RequestRejected: data of another version or vocabulary, data that is wrong in itself, or a request that this
                engine cannot serve; then nothing of the call was started.
        """
        check_count("stream_interval", stream_interval)
        asked = self._manager.handed_over(data)
        return Stream(self._manager, self._manager.submit(asked, priority, None, streams=True), stream_interval)

    def generate_each(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        look_ahead: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue prompts as they are taken from an iterable, which may be endless. Yields the outputs in its order.

        No more than `look_ahead` prompts are taken before the output of the first of them is (default: twice as many as may
        run at the same time). One that cannot be served has an output at its place, with "error" as its finish reason.

        Args:
            prompts: Strings or token ids, one by one.
            sampling_params: One for all, or an iterable of one each.
        """
        if look_ahead is None:
            look_ahead = 2 * self.config.max_seqs
        check_count("look_ahead", look_ahead)
        return self._manager.each(paired(prompts, sampling_params), look_ahead, priority, cache_salt)

    def render(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The token ids that `chat` would start from. Raises RequestRejected as it does."""
        (ids,) = self._manager.render([messages], template_options)
        return ids

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer, None for a model that serves token ids only. It is shared: leave its settings alone."""
        tokenizer: PreTrainedTokenizerBase | None = self._manager.open().encoder.tokenizer
        return tokenizer

    def tokenize(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The token ids that `generate` would start from. Raises RequestRejected for what has none."""
        ids: list[int] = self._manager.open().encoder.encode(prompt, sampling_params or SamplingParams()).tolist()
        return ids

    def reset_prefix_cache(self) -> None:
        """Let nothing that was computed so far be found by later requests. Those that run go on with what they have."""
        with self._manager.lock:
            self._manager.open().core.scheduler.cache.reset()

    def stats(self) -> dict[str, Any]:
        """What the engine holds and did: requests, blocks, bytes, counters. Plain data.

        Waits for nobody: while a step runs in another thread this is what was there some milliseconds before it.
        """
        return self._manager.stats()

    def explain(self) -> list[dict[str, Any]]:
        """The last 64 decisions that were made as blocks ran short, with the numbers they were made by. Plain data.

        Who waited or was passed, who was preempted and what that cost, what was evicted or swapped: see `Scheduler.explain`.
        """
        with self._manager.lock:
            return self._manager.open().core.scheduler.explain()

    @contextmanager
    def locked_engine(self) -> Iterator[Engine]:
        """Hold the engine's lock and give the engine's parts, for tools that measure or inspect. Not a stable interface.

        While the context lasts no other thread makes a step, and none is pending on the device. The tool may change the parts
        between steps (`engine.core.runner.model`, for one) and make steps of its own by `engine.core.step`. Outputs of those
        steps do not reach the callers of this LLM, so a tool that makes steps adds its own requests by `engine.core.add`.

        Calls of this LLM from within the context, in the same thread, raise RuntimeError: they would wait for themselves. Only
        `stats` does not: it says what was there before.

        Raises:
            EngineClosed.
        """
        manager = self._manager
        with manager.lock:
            engine = manager.open()
            manager.settle(engine)
            manager.lock.barred = threading.get_ident()
            try:
                yield engine
            finally:
                manager.lock.barred = None

    def close(self) -> None:
        """End what runs (as aborted), give all memory back. Idempotent; whatever is asked afterwards raises EngineClosed.

        A forked child has no engine of its own to close: there it raises EngineClosed.
        """
        self._manager.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager.is_here:
            self.close()


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A continuation of a stream, or a beam search, that has not ended: `number` of those of prompt `index`."""

    request_id: str
    index: int
    number: int
    _stream: Stream = field(repr=False)  # which would abort it, were it forgotten
    _ticket: RequestState = field(repr=False)

    def export(self) -> dict[str, Any]:
        """End the request here and return it as plain data, for JSON: another process continues it by `LLM.import_request`.

        It has all tokens so far, the settings with the seed, the counters, and the log-probabilities that were asked for. In
        float32 on a CPU the tokens that follow are those that would have followed here. What no chunk has given yet is given
        there, and not here: chunks of both together are those of an undisturbed request. Here the completion has what chunks
        gave, with "aborted" as its finish reason; the blocks are free at once. A beam search is exported from its beginning:
        there it starts anew, and finds the same.

        Raises:
            RequestRejected: the request has ended, or it has `logits_processors`, which are no plain data; nothing changes.
            EngineClosed.
        """
        return self._stream._manager.export(self._ticket)


class Stream(Iterator[StreamChunk]):
    """The chunks of some requests, as they come. Reading drives the engine; `close` aborts what has not ended.

    One that is forgotten instead leaves its requests to the next step: the garbage collector may run in the middle of
    one, in the very thread that holds the engine's lock, so nothing may be waited for there.
    """

    def __init__(self, manager: RequestManager, states: list[RequestState], interval: int) -> None:
        self._manager = manager
        self._answers: list[RequestGroup] = [state.answer for state in states if state.number == 0]
        self._tickets = states  # those whose last chunk was not given
        self._interval = interval

    def __next__(self) -> StreamChunk:
        try:
            while self._tickets:
                chunk = self._manager.next_chunk(self._tickets, self._interval)
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise
        raise StopIteration

    @property
    def requests(self) -> tuple[RequestHandle, ...]:
        """The continuations that have not ended, in the order of prompts and numbers; one for each beam search."""
        return tuple(
            RequestHandle(state.request.request_id, answer.index, state.number, self, state)
            for answer in self._answers
            for state in answer.exportable
        )

    def outputs(self) -> list[RequestOutput]:
        """Run to the end and give the outputs, in the order of the prompts; what chunks are left is passed over."""
        for _ in self:
            pass
        return [answer.output for answer in self._answers]

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        states, self._tickets = self._tickets, []
        self._manager.drop(states)

    def __del__(self) -> None:
        self._manager.forget(self._tickets)

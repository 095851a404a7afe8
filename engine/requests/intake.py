"""Converts what callers pass in to request groups and the engine's requests: encodes, checks and resolves."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...api.sampling_params import SamplingParams
from ...scheduler.request import LogitsProcessor, Request, RequestRejected
from ..shards.processors import serialized
from ..text.chat_template import NESTED
from .beams import BeamRules
from .groups import BeamGroup, ContinuationGroup
from .handover import Handover
from .inputs import Prompt, PromptInput, Prompts, checked_priority, conversations, encode_pairs, pair_params, parse_prompt
from .outputs import PinnedPrefix, RequestOutput
from .states import RequestGroup

if TYPE_CHECKING:
    from ..build import Engine  # imports torch


@dataclass(frozen=True, slots=True)
class RequestIntake:
    """Checks and encodes the inputs of an engine, and builds their requests, without queueing them.

    All methods raise RequestRejected.

    Attributes:
        numbers: Of the next requests.
    """

    engine: Engine
    numbers: Iterator[int]

    def encode(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None) -> list[PromptInput]:
        """Check and encode prompts and parameters as callers pass them in."""
        engine = self.engine
        return encode_pairs(pair_params(prompts, params), engine.encoder, engine.sampling, engine.eos_token_ids)

    def encode_one(self, prompt: Prompt, params: SamplingParams | None) -> list[PromptInput]:
        """As `encode`, for a single prompt: a list is token ids."""
        if not isinstance(prompt, str | Mapping):
            try:
                prompt = list(prompt)
            except Exception as error:  # not an iterable, or one that raises
                raise RequestRejected(f"the prompt cannot be read: {type(error).__name__}: {error}") from error
        return self.encode([prompt], params)

    def encode_pin(self, prompt: Prompt) -> list[PromptInput]:
        """As `encode_one`, for a request that computes the prompt and pins it."""
        (one,) = self.encode_one(prompt, SamplingParams(max_new_tokens=1, temperature=0, n=1, num_beams=1))
        return [one._replace(pin=f"pin {secrets.token_hex(8)}")]

    def tokenize(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of one prompt."""
        content, *_ = parse_prompt(prompt)
        ids: list[int] = self.engine.encoder.encode(content, params).tolist()
        return ids

    def pinned(self, prompt: PromptInput, output: RequestOutput) -> PinnedPrefix:
        """The pin of `prompt`, which has been computed with this `output`. Call it in the engine's thread."""
        cache = self.engine.core.scheduler.cache
        if not (num_held := cache.pins.num_held(prompt.pin)):
            why = output.error or f"its request ended as {output.finish_reason!r}, or its blocks were needed meanwhile"
            raise RequestRejected(f"the prefix of {len(prompt.token_ids):,} tokens is not pinned: {why}")
        return PinnedPrefix(prompt.pin, num_held * cache.block_size)

    def unpin(self, prompt: PromptInput) -> None:
        """End the pin of `prompt`, if there is one. Call it in the engine's thread."""
        self.engine.core.scheduler.cache.unpin(prompt.pin)

    def parse_exported(self, data: Any) -> list[PromptInput]:
        """Parse the data of one or several exported requests (`RequestHandle.export`)."""
        many = [data] if isinstance(data, Mapping) else data
        if not isinstance(many, list | tuple) or not many:
            raise RequestRejected(f"give what export gave, or a list of such, got {data!r:.80}")
        encoder = self.engine.encoder
        each = [Handover.from_dict(one, self.engine.plan.model, encoder.vocab_size) for one in many]
        # Prepared without the engine's EOS ids: their own are among their stop ids.
        return [PromptInput(one.prompt, one.prompt_token_ids, one.params, encoder.prepare(one.params), one) for one in each]

    def render(self, messages: Any, options: dict[str, Any]) -> list[list[int]]:
        """Apply the tokenizer's chat template to conversations. Returns token ids.

        `NESTED` among the options holds more options, as vLLM takes them.
        """
        nested = options.get(NESTED) or {}
        if not isinstance(nested, Mapping):
            raise RequestRejected(f"{NESTED} must map names to values, got {type(nested).__name__}")
        options = {**{name: value for name, value in options.items() if name != NESTED}, **nested}
        return [self.engine.encoder.render(conversation, options) for conversation in conversations(messages)]

    def build(
        self, index: int, prompt: PromptInput, priority: int | None, cache_salt: str | None, streams: bool,
        context: Context | None = None,
    ) -> tuple[RequestGroup, list[Request]]:  # fmt: skip
        """The group of prompt `index` of a call, and the requests to queue for it. Call it in the engine's thread.

        The call's logits processors run in `context`.
        """
        params = prompt.params
        if streams and params.num_started > (params.n or 1):
            raise RequestRejected(
                f"best_of {params.best_of} cannot be streamed with n {params.n or 1}: which of them are given is known "
                "when all have ended; use generate, or leave best_of out"
            )
        request = self._request(prompt, priority, cache_salt, context)
        self.engine.core.scheduler.check(request)
        text_stream = partial(self.engine.encoder.text_stream, prompt.token_ids, prompt.prepared.stops, params)
        group: RequestGroup
        if (params.num_beams or 1) == 1:
            requests = request.forked(params.num_started)
            group = ContinuationGroup(index, prompt, requests, text_stream, streams)
        else:
            longest = self.engine.core.scheduler.limit_of(request) - len(prompt.token_ids)
            rules = BeamRules.resolve(params, request.sampling.stop_token_ids, longest)
            sampling = replace(request.sampling, num_candidates=rules.num_candidates)
            requests = replace(request, sampling=sampling).forked(rules.num_beams)
            group = BeamGroup(index, prompt, requests, rules, text_stream, streams)
        if prompt.before is not None:
            for state in group.states:
                state.import_request(prompt.before)
        return group, requests

    def _request(self, prompt: PromptInput, priority: int | None, cache_salt: str | None, context: Context | None) -> Request:
        before = prompt.before
        salt = _salt(prompt, cache_salt) if before is None else before.cache_salt
        sampling = prompt.params.resolve(self.engine.eos_token_ids, prompt.prepared.bad_words)
        if sampling.logits_processors:
            carried = serialized if self.engine.team is not None else partial(_in_context, context)
            sampling = replace(sampling, logits_processors=tuple(map(carried, sampling.logits_processors)))
        request = Request(
            request_id=f"r{next(self.numbers)}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            priority=checked_priority(before.priority if before is not None and priority is None else priority),
            arrival=self.engine.core.clock(),
            cache_salt=_encoded(salt),
            label=prompt.label,
            retention=prompt.retention,
            pin=prompt.pin,
        )
        return request if before is None else before.request(request)


def _in_context(context: Context | None, processor: LogitsProcessor) -> LogitsProcessor:
    """`processor`, called in `context`, under its own name."""
    if context is None:
        return processor
    run: Any = partial(context.run, processor)
    run.__qualname__ = getattr(processor, "__qualname__", type(processor).__name__)
    called: LogitsProcessor = run
    return called


def _encoded(salt: str | None) -> bytes | None:
    return None if salt is None else salt.encode("utf-8", "surrogatepass")


def _salt(prompt: PromptInput, cache_salt: str | None) -> str | None:
    """The salt of a prompt: its own, or its call's. Raises RequestRejected if both are given and differ."""
    own = prompt.cache_salt
    if own is not None and cache_salt not in (None, own):
        raise RequestRejected("the prompt has another cache_salt than its call: give one of them")
    return cache_salt if own is None else own

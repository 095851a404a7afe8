"""Prepares requests in a process without an engine: checks, tokenizes and resolves them, so that any worker can run them."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..api.sampling_params import SamplingParams
from ..cache.prefix_hash import PrefixHasher
from ..engine.loading.models import resolve_model
from ..engine.requests.handover import Handover, resolved_params
from ..engine.requests.inputs import PromptInput, check_cache_salt, checked_priority
from ..engine.requests.intake import RequestIntake
from ..scheduler.request import PromptTooLong, RequestRejected
from ..server.defaults import by_prompt_end, completed, template_options
from ..server.engine_outputs import detokenized, prompt_end, token_texts
from ..server.messages import Submit
from .messages import FleetInfo, NewRequest, encode

if TYPE_CHECKING:
    from ..engine.build import Engine
    from ..engine.text.encoder import Encoder


@dataclass(frozen=True, slots=True)
class _EncodingEngine:
    """The parts of an engine that checking and encoding need."""

    encoder: Encoder
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]


class RequestPreparer:
    """Makes `NewRequest` of what callers and clients ask for. Thread-safe.

    Raises ModelNotFound and CheckpointError if the model's tokenizer is not on this machine.
    """

    def __init__(self, info: FleetInfo) -> None:
        from ..engine.loading.loader import load_tokenizer  # imports torch: a fleet that is not there is told before
        from ..engine.text.encoder import Encoder

        self.model = info.model
        spec = resolve_model(info.model.reference)
        self.tokenizer = load_tokenizer(spec)
        self._encoder = Encoder(self.tokenizer, self.model.vocab_size, self.model.bos_token_id, self.model.max_model_len)
        self.sampling = SamplingParams(**self.model.sampling)
        engine = _EncodingEngine(self._encoder, self.sampling, tuple(self.model.eos_token_ids))
        self.intake = RequestIntake(cast("Engine", engine), itertools.count())
        self._hasher = PrefixHasher(self.model.block_size, info.secret)
        self._hashing = threading.Lock()
        self._secret = info.secret

    def of_submit(self, submit: Submit) -> NewRequest:
        """The request of a server's client. Raises RequestRejected, or ValueError or TypeError for its parameters."""
        params = SamplingParams(**submit.params)
        if submit.messages is not None:
            ids = self.render(submit.messages, template_options(self.tokenizer, submit.template))
        else:
            ids = self.intake.tokenize(submit.prompt or "", params)
        temperature = self.sampling.temperature
        params = completed(submit, params, len(ids), self.model.max_model_len, temperature)
        if submit.reasoning_grammar is not None:
            params = by_prompt_end(submit, params, prompt_end(self.tokenizer, ids))
        (prompt,) = self.intake.encode([{"prompt_token_ids": ids}], params)
        request = self.of_input(prompt, submit.priority, submit.cache_salt, submit.durable_id)
        return NewRequest(
            request.request_id, request.handover, request.num_sequences, request.digests, submit.fingerprint,
            submit.tenant, request.created, params.max_new_tokens, bool(submit.fingerprint), submit.most_requests,
            submit.most_sequences,
        )  # fmt: skip

    def of_input(
        self, prompt: PromptInput, priority: int, cache_salt: str | None, request_id: str, may_exist: bool = False
    ) -> NewRequest:
        """The request of one encoded prompt. Raises RequestRejected for what only its own engine could run."""
        params = prompt.params
        if params.logits_processors:
            raise RequestRejected(
                "logits_processors are code and no plain data: a fleet cannot send them to its workers; use LLM or AsyncLLM"
            )
        check_cache_salt(cache_salt)
        self._check_length(len(prompt.token_ids))
        sampling = params.resolve(self.model.eos_token_ids, prompt.prepared.bad_words)
        own = resolved_params(params, sampling)
        salt = prompt.cache_salt if prompt.cache_salt is not None else cache_salt
        if cache_salt not in (None, salt):
            raise RequestRejected("the prompt has another cache_salt than its call: give one of them")
        if sampling.logprobs is not None and own.logprobs is None:  # best_of chooses by them
            own = replace(own, logprobs=sampling.logprobs)
        handover = Handover(
            prompt=prompt.prompt, prompt_token_ids=prompt.token_ids, token_ids=prompt.token_ids[:0], params=own, index=0,
            priority=checked_priority(priority), cache_salt=salt, num_told_tokens=0, num_told_characters=0,
            num_preemptions=0, num_cached_tokens=None, first_token_s=None, total_s=0.0,
            logprobs=None if own.logprobs is None else (),
            prompt_logprobs=None if own.prompt_logprobs is None else (),
        )  # fmt: skip
        data = handover.to_dict(self.model.name, self.model.vocab_size)
        try:
            encode([prompt.prompt, salt, data["sampling"]])
        except (ValueError, OverflowError, TypeError) as error:
            raise RequestRejected(f"the request cannot be sent to a worker: {error}") from error
        searches = (params.num_beams or 1) > 1
        return NewRequest(
            request_id=request_id,
            handover=data,
            num_sequences=int(params.num_beams or 1) if searches else params.num_started,
            digests=self.digests(prompt.token_ids, salt),
            created=time.time(),
            max_new_tokens=params.max_new_tokens,
            may_exist=may_exist,
        )

    @staticmethod
    def renamed(request: NewRequest, request_id: str) -> NewRequest:
        """The same request under a new id."""
        return msgspec.structs.replace(request, request_id=request_id, may_exist=False)

    def _check_length(self, num_prompt: int) -> None:
        longest = self.model.max_model_len
        if num_prompt >= longest:
            raise PromptTooLong(
                f"the prompt has {num_prompt:,} tokens; with a context of {longest:,} tokens it may have {longest - 1:,} at "
                "most: shorten it, or raise max_model_len where the model allows"
            )

    def digests(self, token_ids: Any, salt: str | None) -> list[int]:
        """The first 64 bits of the prefix hash of each full block."""
        key = None if salt is None else salt.encode("utf-8", "surrogatepass")
        with self._hashing:
            chain = self._hasher.chain(token_ids, key)
            digests: list[int] = chain.digests(chain.num_blocks)[:, 0].tolist()
        return digests

    def request_id(self, name: str) -> str:
        """The id of the request that a caller names so, in every process of this fleet; not to be guessed outside of it."""
        return f"req-{hashlib.blake2b(name.encode(), key=self._secret[:64], digest_size=12).hexdigest()}"

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """The prompt token ids of a conversation. Raises RequestRejected."""
        (ids,) = self.intake.render([messages], dict(options))
        return ids

    def tokenize(
        self,
        prompt: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
        texts: bool = False,
    ) -> dict[str, Any]:
        """See `EngineServer.calls`."""
        if messages is not None:
            ids = self.render(messages, template_options(self.tokenizer, template or {}))
        else:
            ids = self.intake.tokenize(prompt or "", SamplingParams(add_special_tokens=add_special_tokens))
        return {"tokens": ids, "texts": token_texts(self.tokenizer, ids) if texts else None}

    def detokenize(self, tokens: list[int]) -> str:
        """See `EngineServer.calls`."""
        return detokenized(self.tokenizer, tokens, self.model.vocab_size, self.model.max_model_len)

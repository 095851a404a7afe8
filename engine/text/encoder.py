"""Converts prompts (strings, ids and conversations) to validated int32 arrays of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...api.sampling_params import MOST_LISTED_IDS, MOST_STOP_IDS, SamplingParams
from ...scheduler.request import RequestRejected, TokenLists
from ..errors import Attempt
from ..sampling.constraints import CompiledConstraint, Constraints
from .chat_template import rendered
from .conversation import template_messages, turn_end
from .detokenizer import TextStream, special_tokens
from .prompt_length import PromptLength
from .stop_strings import StopPatterns
from .tokenizer_bounds import is_panic

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PreparedParams:
    """Data derived from a request's parameters before it is queued. The request holds it until the request ends.

    Attributes:
        constraint: The output's constraint, compiled or not; None without one.
    """

    bad_words: TokenLists = ()
    stops: StopPatterns = field(default_factory=lambda: StopPatterns(()))
    constraint: CompiledConstraint | None = None

    @property
    def ready(self) -> bool:
        """Whether there is no constraint, or it is compiled."""
        return self.constraint is None or self.constraint.ready

    def compile(self) -> None:
        """Compile the constraint, which may take seconds. Raises RequestRejected if it cannot be used."""
        if self.constraint is not None:
            self.constraint.compile()


class Encoder:
    """Converts prompts and textual request parameters to token ids of one model.

    `tokenizer` is None for a model that serves token ids only. A prompt has fewer than `max_model_len` tokens.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, bos_token_id: int | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.length = PromptLength(tokenizer, max_model_len)
        self.constraints = Constraints(tokenizer, vocab_size)

    def encode(self, prompt: str | Sequence[int], params: SamplingParams) -> TokenIds:
        """The ids of `prompt`, at least one, beginning with `start_id` if set. Otherwise an empty string becomes BOS, if the
        model has one.

        Raises:
            RequestRejected: no tokenizer for a string, a string that is not valid text, no ids, or ids outside the vocabulary.
            PromptTooLong: (a RequestRejected) the prompt is far too long.
        """
        if not isinstance(prompt, str):
            return self._checked(prompt, params.start_id)
        tokenizer = self._tokenizer("a string")
        ids = self._ids(prompt, params.add_special_tokens)
        if params.start_id is not None:
            ids = _without_bos(tokenizer, ids, prompt) if prompt else []
            return self._checked(ids, params.start_id)
        if not ids and not prompt and self.bos_token_id is not None:
            ids = [self.bos_token_id]
        if not ids:
            raise RequestRejected(f"the prompt {prompt!r:.80} has no token, and the model has no BOS to start from")
        return self._checked(ids)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """A conversation's ids by the tokenizer's chat template, up to the beginning of the answer.

        Raises:
            RequestRejected: no tokenizer, no template, messages that the template refuses, or a rendering that exceeds its
                limits (`template_bounds`).
            PromptTooLong: as `encode`, for the rendered text.
        """
        tokenizer = self._tokenizer("a conversation")
        if not (options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise RequestRejected(
                "the model's tokenizer has no chat template: use generate() with a prompt of your own, or set "
                "`tokenizer: {chat_template: ...}` for the model in the models file"
            )
        messages = template_messages(tokenizer, messages, options)
        return self._ids(rendered(tokenizer, messages, options), add_special_tokens=False)

    def prepare(self, params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> PreparedParams:
        """Check resolved parameters against this model, and derive `PreparedParams`. `eos_token_ids` are the model's
        own end ids.

        Raises:
            RequestRejected: stop strings or bad words without a tokenizer, a bad word without any token, ids outside the
                vocabulary, or more ids than allowed.
        """
        if params.stop_strings and self.tokenizer is None:
            raise RequestRejected("stop strings need a tokenizer, which this model's folder lacks: use stop_token_ids")
        stop_ids = () if params.stop_token_ids is None else params.stop_token_ids
        self._check_ids("stop_token_ids", stop_ids)
        self._check_ids("bad_words_ids", (i for ids in params.bad_words_ids or () for i in ids))
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("start_id", () if params.start_id is None else (params.start_id,))
        if not params.ignore_eos and len({*stop_ids, *eos_token_ids}) > MOST_STOP_IDS:
            raise RequestRejected(
                f"stop_token_ids and the model's own end ids must be at most {MOST_STOP_IDS:,} together, got more"
            )
        bad_words = self._bad_words(params)
        num_ids = sum(map(len, bad_words)) + sum(map(len, params.bad_words_ids or ()))
        if num_ids > MOST_LISTED_IDS:
            raise RequestRejected(
                f"bad_words and bad_words_ids must be at most {MOST_LISTED_IDS:,} token ids together, got {num_ids:,}"
            )
        constraint = params.constraint
        return PreparedParams(
            bad_words, StopPatterns(params.stop_strings), None if constraint is None else self.constraints.of(constraint)
        )

    def text_stream(self, prompt: TokenIds, stops: StopPatterns, params: SamplingParams) -> TextStream | None:
        """The stream that converts the output's ids to text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        skips, kept = params.skip_special_tokens is not False, params.kept_special_tokens or ()
        return TextStream(self.tokenizer, prompt.tolist(), stops, skips, kept)

    def all_ends(self, configured: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an output: those of the model's configuration, the tokenizer's end token, and the token that ends
        a turn in its chat template. A fine-tuned model's configuration often names its base model's end alone.
        """
        own = () if self.tokenizer is None else (getattr(self.tokenizer, "eos_token_id", None), turn_end(self.tokenizer))
        return tuple(dict.fromkeys((*configured, *(i for i in own if i is not None and 0 <= i < self.vocab_size))))

    def with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """The parameters with stop strings that are special tokens as ids: the text in which stop strings are looked for leaves
        special tokens out. Raises RequestRejected for a stop string with a special token and other text.
        """
        if not params.stop_strings or params.skip_special_tokens is False or self.tokenizer is None:
            return params
        special = special_tokens(self.tokenizer)
        ids = [special[stop.strip()] for stop in params.stop_strings if stop.strip() in special]
        others = [stop for stop in params.stop_strings if stop.strip() not in special]
        for stop in others:
            if (token := next((token for token in special if token in stop), None)) is not None:
                raise RequestRejected(
                    f"stop {stop!r:.80} has the special token {token!r} beside other text, which never stand together in the "
                    "output: give one of them, or skip_special_tokens=False"
                )
        return replace(params, stop=others or None, stop_token_ids=[*(params.stop_token_ids or ()), *ids]) if ids else params

    def _bad_words(self, params: SamplingParams) -> TokenLists:
        """The ids of each of the `bad_words`, at the beginning of a text and after a space, without duplicates."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_strings:
            if self.tokenizer is None:
                raise RequestRejected("bad_words need a tokenizer, which the model's folder lacks: use bad_words_ids")
            self.length.check_growth(word)
            for text in (word, word if word[0].isspace() else " " + word):
                ids = tuple(_ids(self.tokenizer, text, add_special_tokens=False))
                if not ids:
                    raise RequestRejected(f"the bad word {word!r} has no token in the model's vocabulary")
                found[ids] = None
        return tuple(found)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        beyond = [int(i) for i in ids if i >= self.vocab_size]
        if beyond:
            raise RequestRejected(f"{name} {beyond[:5]} are outside the vocabulary of {self.vocab_size:,}")

    def _tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestRejected(f"the model's folder has no tokenizer, so it serves token ids only, not {what}")
        return self.tokenizer

    def _checked(self, ids: Sequence[int], start_id: int | None = None) -> TokenIds:
        """The validated `ids`, after `start_id` unless it is None or already first."""
        if isinstance(ids, list | tuple):
            self.length.check_tokens(len(ids))  # before an array is made
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as error:
            raise RequestRejected(f"a prompt is a string or a flat list of token ids: {error}") from error
        if array.size == 0 and start_id is not None:
            array = np.array([start_id])
        if array.size == 0:
            raise RequestRejected("the prompt is empty: leave it out of the batch, or give a start_id ('' has the BOS)")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise RequestRejected(
                f"a prompt is a string or a flat list of integers, got {array.ndim} dimensions of {array.dtype}"
            )
        if start_id is not None and array[0] != start_id:
            array = np.concatenate([[start_id], array.astype(np.int64)])
        if array.min() < 0 or array.max() >= self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][:5].tolist()
            raise RequestRejected(f"token ids {wrong} are outside the vocabulary, which has 0 .. {self.vocab_size - 1:,}")
        return array.astype(np.int32)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokenizer's ids. Raises PromptTooLong."""
        self.length.check(text, lambda part: _ids(self.tokenizer, part, add_special_tokens=False))
        return _ids(self.tokenizer, text, add_special_tokens)


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """The tokenizer's ids. Raises RequestRejected for text that UTF-8 cannot encode: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRejected(f"a prompt must be text that UTF-8 can say: {error}") from error
    # The scheduler rejects texts that are slightly too long; the tokenizer's warning would only repeat that.
    with Attempt() as attempt:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
    raised = attempt.error
    assert raised is not None
    if is_panic(raised):
        raise RequestRejected(f"the model's tokenizer fails on this text: {raised}") from raised
    raise raised


def _without_bos(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """`ids` of `text` without the BOS that the tokenizer prepended. A BOS in the text itself stays."""
    own = _ids(tokenizer, text, add_special_tokens=False)
    added = ids[:1] == [tokenizer.bos_token_id] and ids[1 : 1 + len(own)] == own
    return ids[1:] if added else ids

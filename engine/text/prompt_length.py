"""Rejects texts that are too long for the context before tokenizing all of them.

Tokenizing a megabyte takes seconds, and memory of 200 times its size. The length is therefore checked in three stages:

1. A text of at most 65,536 characters, or of at most 8 characters per token that fits, is tokenized as a whole.

2. A text of more than `most_characters` is rejected without tokenizing: 1,024 characters per token that fits. With
longer tokens the bound is 4 times its longest token, because Unicode normalisation (NFC, NFKC) composes at most 4
characters into one.

3. Any other text is tokenized slice by slice until the count exceeds the tokens that fit. A cut splits a token into at most as
many tokens as it has characters, so twice the length of the longest token is subtracted for each slice.

Before, the normalizer alone is applied slice by slice if it could lengthen the text more than 16 times: twelve replacements of
a letter by ten of it make 10^12 characters of one.

Stage 2 rejects some texts that a tokenizer could serve: one that drops white space or maps unknown text to one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from functools import cached_property
from typing import Any

from ...scheduler.request import PromptTooLong
from .tokenizer_bounds import PARTS, growth_of

CHARACTERS_A_TOKEN = 1024  # allowed characters per token that fits
# Characters per token up to which a text is tokenized as a whole; usual: about four
_SURELY_FEW = 8
_SLICE_CHARACTERS = 1 << 16
_SLICE_TOKENS = 512  # minimum tokens in a slice, so that few of them are cut
# Times as long as it was a tokenizer may make a text; parts of usual ones can make it 2 to 12 times as long
_GROWN = 16
_NORMALISED_AT_ONCE = 1 << 20  # bytes, of a slice
_NORMALISED = 4  # most characters that Unicode normalisation composes into one


class PromptLength:
    """Checks prompts against a context of `max_model_len` tokens. `tokenizer` is None for a model without one."""

    def __init__(self, tokenizer: Any | None, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.most_tokens = max_model_len - 1
        self._tokenizer = tokenizer

    @property
    def most_characters(self) -> int:
        """The longest text that is tokenized, in characters."""
        return self.most_tokens * max(CHARACTERS_A_TOKEN, _NORMALISED * self._longest)

    def check(self, text: str, encode: Callable[[str], Sized]) -> None:
        """Raises PromptTooLong for a text that is too long. `encode` gives the tokens of a part of the text."""
        is_short = len(text) <= max(_SLICE_CHARACTERS, _SURELY_FEW * self.most_tokens)
        if not is_short and len(text) > self.most_characters:
            raise self._too_long(f"{len(text):,} characters", f"{self.most_characters:,} characters")
        self.check_growth(text)
        if is_short:
            return
        surely, step = 0, max(_SLICE_CHARACTERS, _SLICE_TOKENS * self._longest)
        for begin in range(0, len(text), step):
            surely += max(0, len(encode(text[begin : begin + step])) - 2 * self._longest)
            if surely > self.most_tokens:
                raise self._too_long(f"more than {surely:,} tokens in {len(text):,} characters", f"{self.most_tokens:,}")

    def check_growth(self, text: str) -> None:
        """Raises PromptTooLong for a text that the tokenizer would lengthen too much, before all of it is made."""
        parts, later = self._growth
        most = _GROWN * max(_SLICE_CHARACTERS, _SURELY_FEW * self.most_tokens, len(text))
        if parts * later <= _GROWN or 4 * len(text) * parts * later <= most:
            return
        assert self._tokenizer is not None, "without a tokenizer nothing grows"
        normalizer, step = self._tokenizer.backend_tokenizer.normalizer, max(1, int(_NORMALISED_AT_ONCE / 4 / parts))
        grown = 0.0
        for begin in range(0, len(text), step):
            part = text[begin : begin + step].encode("utf-8", "replace").decode()
            made = part if normalizer is None else normalizer.normalize_str(part)
            grown += len(made) * (later if later > _GROWN else 1)
            if grown > most:
                raise self._too_long(f"{len(text):,} characters, of which the tokenizer makes more than {most:,}", f"{most:,}")

    def check_tokens(self, count: int) -> None:
        """Raises PromptTooLong if a prompt of `count` tokens is too long."""
        if count > self.most_tokens:
            raise self._too_long(f"{count:,} tokens", f"{self.most_tokens:,}")

    @cached_property
    def _growth(self) -> tuple[float, float]:
        """The most bytes that the tokenizer makes of one: its normalizer, and all behind it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        first, *others = (growth_of(getattr(backend, name, None)) for name in PARTS)
        return first, math.prod(others)

    @cached_property
    def _longest(self) -> int:
        """Length of the longest token in the vocabulary: in bytes for byte-level tokenizers, else in characters."""
        tokenizer: Any = self._tokenizer
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        return max(map(len, vocabulary), default=1)

    def _too_long(self, has: str, most: str) -> PromptTooLong:
        return PromptTooLong(
            f"the prompt has {has}; with a context of {self.max_model_len:,} tokens it may have {most} at most: shorten it, or "
            "raise max_model_len where the model allows"
        )

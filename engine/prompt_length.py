"""Refuses texts that cannot fit into the context, before all of them is tokenised.

Tokenising a megabyte takes seconds, and 200 times its size of memory: a text that is far too long must not get so far. Three
looks, each only at what the one before let pass:

1. A text of no more characters than 8 times the tokens that fit, or 65,536, is tokenised as it is.
2. A text of more characters than `most_characters` is refused by its length. No known vocabulary has tokens that long; should
   one have, the bound follows its longest, times 4 for what Unicode normalisation (NFC, NFKC) makes one character of.
3. Anything between is tokenised slice by slice, until it has more tokens than fit. A cut may make more tokens of those it goes
   through, at most one of each character: so for each slice twice the longest token is taken off.

The second look is at characters alone. So a tokenizer that passes over white space, or makes one token of anything unknown, is
not given a text with more than 1,024 of these for each token that fits, although it might have served it.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import cached_property
from typing import Any

from ..scheduler.errors import PromptTooLong

CHARACTERS_A_TOKEN = 1024  # at least, that a text may have for each token that fits
_SURELY_FEW = 8  # characters for each token that fits: texts have about four
_SLICE_CHARACTERS = 1 << 16
_SLICE_TOKENS = 512  # of the longest that there are: so many a slice has at least, and few of them are cut
_NORMALISED = 4  # characters, at most, that become one


class PromptLength:
    """The longest prompt of an engine: fewer than `max_model_len` tokens of `tokenizer`, which is None where there is none."""

    def __init__(self, tokenizer: Any | None, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.most_tokens = max_model_len - 1
        self._tokenizer = tokenizer

    @property
    def most_characters(self) -> int:
        """No text of more is read."""
        return self.most_tokens * max(CHARACTERS_A_TOKEN, _NORMALISED * self._longest)

    def check(self, text: str, encode: Callable[[str], Sized]) -> None:
        """Look at a text before it is tokenised; `encode` gives the tokens of a part of it. Raises PromptTooLong."""
        if len(text) <= max(_SLICE_CHARACTERS, _SURELY_FEW * self.most_tokens):
            return
        if len(text) > self.most_characters:
            raise self._too_long(f"{len(text):,} characters", f"{self.most_characters:,} characters")
        surely, step = 0, max(_SLICE_CHARACTERS, _SLICE_TOKENS * self._longest)
        for begin in range(0, len(text), step):
            surely += max(0, len(encode(text[begin : begin + step])) - 2 * self._longest)
            if surely > self.most_tokens:
                raise self._too_long(
                    f"more than {surely:,} tokens in {len(text):,} characters", f"{self.most_tokens:,}"
                )

    def check_tokens(self, count: int) -> None:
        """Raises PromptTooLong for a prompt of so many tokens."""
        if count > self.most_tokens:
            raise self._too_long(f"{count:,} tokens", f"{self.most_tokens:,}")

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token, as the vocabulary writes it: of byte-level ones, its bytes."""
        tokenizer: Any = self._tokenizer
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        return max(map(len, vocabulary), default=1)

    def _too_long(self, has: str, most: str) -> PromptTooLong:
        return PromptTooLong(
            f"the prompt has {has}; with a context of {self.max_model_len:,} tokens it may have {most} at most: shorten it, or "
            "raise max_model_len where the model allows"
        )

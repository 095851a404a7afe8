"""Incremental detokenization: turns token ids into text that no later token can change, cut where `stop_strings.py` says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .stop_strings import StopPatterns, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # decoders' placeholder for bytes that are not, or not yet, a character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_LONG_WINDOW = 16  # pending tokens without a whole character at the end, before the oldest are dropped


class Detokenizer:
    """The text of one output, piece by piece. All pieces together equal `tokenizer.decode` of all ids.

    The text is *what follows the prompt*. The ids are decoded after a token of text, and that token's text is removed.
    A tokenizer that marks words by a leading space thus keeps the first word's space. Only if the prompt shows no text
    (only special tokens) is the output at the beginning and loses that space. `clean_up_tokenization_spaces` is always
    off, since it would change text already emitted.

    Text is held back while it may change: an unfinished character at the end, and, for a tokenizer with byte tokens (`<0xE4>`),
    a run of them until another token follows, because one bad byte makes their decoder reject the whole run. Each id is decoded
    a bounded number of times. Not safe for concurrent use.

    Args:
        tokenizer: A transformers tokenizer, which may be shared.
        prompt_ids: The prompt; only whether it shows text matters.
        kept: Special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        kept: Sequence[str] = (),
    ) -> None:
        self._vocabulary = _vocabulary(tokenizer, skip_special_tokens, frozenset(kept))
        self._anchor: tuple[int, ...] = ()
        if any(not self._vocabulary.is_silent(int(token_id)) for token_id in reversed(prompt_ids)):
            self._anchor = self._vocabulary.anchor
        self._pending: list[int] = []  # ids with text not fully emitted
        self._run = 0  # byte tokens at the end of `_pending`
        self._given = 0  # emitted characters of the text of `_pending`
        self._long = _LONG_WINDOW

    def push(self, ids: Sequence[int]) -> str:
        """Add the next ids. Returns the text that has become certain."""
        vocabulary = self._vocabulary
        usual = len(ids) == 1 and not self._pending and self._anchor  # of a stream
        if usual and (piece := vocabulary.pieces.get(ids[0])) is not None:
            return piece
        parts = []
        for token_id in map(int, ids):
            if vocabulary.is_silent(token_id):
                continue
            if not self._pending and self._anchor:
                piece = vocabulary.whole_piece(token_id)
                if piece is not None:
                    parts.append(piece)
                    continue
            self._pending.append(token_id)
            self._run = self._run + 1 if vocabulary.is_byte(token_id) else 0
        if len(self._pending) > self._run:
            parts.append(self._settle())
        return "".join(parts)

    def finish(self) -> str:
        """The remaining text, with a replacement character for an incomplete one. No `push` may follow."""
        text = self._vocabulary.text(self._anchor, self._pending)[self._given :] if self._pending else ""
        self._pending, self._run, self._given = [], 0, 0
        return text

    def _settle(self) -> str:
        """Emit the certain text of the pending ids, except their trailing run of byte tokens."""
        vocabulary, size = self._vocabulary, len(self._pending) - self._run
        text = vocabulary.text(self._anchor, self._pending[:size])
        unfinished = text.endswith(_REPLACEMENT) and not vocabulary.has_byte_tokens
        given, self._given = self._given, len(text) - unfinished
        certain = text[given : self._given]
        if not unfinished:
            del self._pending[:size]
            self._given = 0
            self._anchor = vocabulary.anchor
            self._long = _LONG_WINDOW
        elif size >= self._long:
            self._shorten()
        return certain

    def _shorten(self) -> None:
        """Drop the older half of the pending ids. All its text has been emitted.

        The rest may begin inside a character and then decodes differently at its beginning, but not at its end, because UTF-8
        resynchronizes at the next first byte. An unfinished character has at most three bytes, so its first byte is in the rest
        if that makes at least four characters.
        """
        newer = self._pending[len(self._pending) // 2 :]
        text = self._vocabulary.text(self._anchor, newer)
        if len(text) >= _LONGEST_CHARACTER and text.endswith(_REPLACEMENT):
            self._pending, self._given = newer, len(text) - 1
        self._long = 2 * len(self._pending)


class TextStream:
    """The visible text of one output: `Detokenizer`, then `StopStrings`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        stops: Sequence[str] | StopPatterns = (),
        skip_special_tokens: bool = True,
        kept: Sequence[str] = (),
    ) -> None:
        patterns = stops if isinstance(stops, StopPatterns) else StopPatterns(stops)
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens, kept)
        self._stop_strings = StopStrings(patterns)
        self.has_stops = bool(patterns.stops)
        self.stopped = False  # a stop string was found

    def push(self, ids: Sequence[int]) -> str:
        """Add the next ids. Returns the new visible text."""
        if self.stopped:
            return ""
        visible, self.stopped = self._stop_strings.push(self._detokenizer.push(ids))
        return visible

    def finish(self) -> str:
        """The visible text still held back, which may contain a stop string too. No `push` may follow."""
        if self.stopped:
            return ""
        text, self.stopped = self._stop_strings.push(self._detokenizer.finish())
        return text + self._stop_strings.flush()


class _Vocabulary:
    """A tokenizer's ids as a detokenizer needs them. Caches results per id; otherwise read-only.

    Attributes:
        anchor: One id that shows a whole text alone and can precede any other, so that others are not at the beginning; () if
            no id qualifies.
        has_byte_tokens: Whether ids like `<0xE4>` stand for single bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool, kept: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer) if skip_special_tokens else {}
        self._skip_all = skip_special_tokens and kept.isdisjoint(special)
        self._skipped = {token_id for token, token_id in special.items() if token not in kept}
        self._silent: dict[int, bool] = {}
        self._byte: dict[int, bool] = {}
        self.pieces: dict[int, str | None] = {}  # what `whole_piece` gave
        self._piecewise = _decodes_piecewise(tokenizer)
        self.anchor: tuple[int, ...] = ()
        self._anchor_length = 0
        anchor = next((i for i in range(len(tokenizer)) if self._can_stand_first(i)), None)
        if anchor is not None:
            self.anchor, self._anchor_length = (anchor,), len(self._decode([anchor]))
        self.has_byte_tokens = any(self.is_byte(i) for i in _ids_of_byte_tokens(tokenizer))

    def text(self, anchor: tuple[int, ...], ids: Sequence[int]) -> str:
        """The text of `ids` after `anchor`, which is `self.anchor` or ()."""
        return self._decode([*anchor, *ids])[self._anchor_length if anchor else 0 :]

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` skips the id: a special token to be skipped, or an id without a token."""
        silent = self._silent.get(token_id)
        if silent is None:
            nothing = self.text(self.anchor, [token_id]) == ""
            silent = nothing and (token_id in self._skipped or self.token(token_id) is None)
            self._silent[token_id] = silent
        return silent

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for a single byte, which the decoder joins with its neighbours."""
        byte = self._byte.get(token_id)
        if byte is None:
            token = self.token(token_id) or ""
            byte = _BYTE_TOKEN.fullmatch(token) is not None and token not in self.text(self.anchor, [token_id])
            self._byte[token_id] = byte
        return byte

    def whole_piece(self, token_id: int) -> str | None:
        """The text that the id, which is not silent, adds after whole characters; None if it depends on what follows."""
        if token_id in self.pieces:
            return self.pieces[token_id]
        piece: str | None = None
        if self._piecewise and not self.is_byte(token_id):
            text = self.text(self.anchor, [token_id])
            piece = None if _REPLACEMENT in text else text
        self.pieces[token_id] = piece
        return piece

    def _can_stand_first(self, token_id: int) -> bool:
        token, text = self.token(token_id), self._decode([token_id])
        if token is None or _BYTE_TOKEN.fullmatch(token) or not text.strip() or _REPLACEMENT in text:
            return False
        twice = self._decode([token_id, token_id])
        return len(twice) > len(text) and twice.startswith(text)

    def _decode(self, ids: list[int]) -> str:
        if not self._skip_all:
            ids = [token_id for token_id in ids if token_id not in self._skipped]
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_all, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def token(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None for an id without one."""
        token: str | None = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        return token


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens, which a text leaves out, longest first, and their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})  # not all tokenizers have it
    special = {token.content: i for i, token in added.items() if token.special}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    known = {token: i for token, i in special.items() if token and isinstance(i, int)}
    return dict(sorted(known.items(), key=lambda item: -len(item[0])))


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """What a token adds to a text after others, special tokens included, in UTF-8: of a part of a character, its bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = _vocabulary(tokenizer, skip_special_tokens=False, kept=frozenset())
    text = vocabulary.text(vocabulary.anchor, [token_id])
    if _REPLACEMENT not in text:
        return text.encode("utf-8", "replace")
    token = vocabulary.token(token_id) or ""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies
    return bytes(byte_of[c] for c in token) if byte_of.keys() >= set(token) else text.encode()


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool, kept: frozenset[str]) -> _Vocabulary:
    return _Vocabulary(tokenizer, skip_special_tokens, kept)


def _ids_of_byte_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Ids of tokens named `<0x00>` .. `<0xFF>`."""
    for name in (f"<0x{byte:02X}>" for byte in range(256)):
        token_id = tokenizer.convert_tokens_to_ids(name)
        # Not the unknown token.
        if isinstance(token_id, int) and tokenizer.convert_ids_to_tokens([token_id])[0] == name:
            yield token_id


def _decodes_piecewise(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each token after the first adds its own text, except bytes. True for the decoders of common models."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    fused = False
    for step in state["decoders"] if state["type"] == "Sequence" else [state]:
        kind = step["type"]
        if fused and not (kind == "Strip" and step["stop"] == 0):
            return False  # it sees the whole text
        if kind not in ("ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"):
            return False
        fused = fused or kind in ("ByteLevel", "Fuse")
    return True

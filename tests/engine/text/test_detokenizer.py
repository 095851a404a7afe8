"""Streamed text against the tokenizer's own decode, and stop strings against a search in the whole text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from byte_level import Counting, byte_level
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pagetide.engine.text.detokenizer import Detokenizer, TextStream, token_bytes
from pagetide.engine.text.stop_strings import StopPatterns, StopStrings

CORPUS = [
    "The tide comes in and the tide goes out; pages follow it. Hello, world! def f(x): return x + 1\n\n\tdone",
    "你好，世界。潮汐起落，页面随之。 今日は世界 안녕하세요 Привет мир ñandú café naïve",
    "🌊🌊 waves 👩‍👩‍👧‍👦 family 🇨🇭 flag 😀😃😄 smile",
]
SPECIALS = ["<s>", "</s>", "<|tool|>"]


def _wrap(tokenizer: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **names)


def _byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: word marks, byte tokens for what the vocabulary lacks, a decoder that strips the first space."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"]))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *(p for p in model["vocab"] if p != "<unk>"), "好", "�"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer, unk_token="<unk>")


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any = None, **names: Any) -> PreTrainedTokenizerFast:
    """Without a decoder words are joined by spaces."""
    tokenizer = Tokenizer(model(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer, unk_token="<unk>", **names)


_UNKNOWN = {"special_tokens": ["<unk>"]}
TOKENIZERS = {
    "bytes": _wrap(byte_level(CORPUS, 400)),
    "bytes_only": _wrap(byte_level(CORPUS, 0)),
    "byte_fallback": _byte_fallback(),
    "metaspace": _trained(
        models.BPE, trainers.BpeTrainer(vocab_size=250, **_UNKNOWN), pre_tokenizers.Metaspace(), decoders.Metaspace()
    ),
    "words": _trained(models.WordLevel, trainers.WordLevelTrainer(**_UNKNOWN), pre_tokenizers.Whitespace()),
    "word_piece": _trained(
        models.WordPiece, trainers.WordPieceTrainer(vocab_size=200, **_UNKNOWN), pre_tokenizers.Whitespace(),
        decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True,
    ),
}  # fmt: skip
names = st.sampled_from(sorted(TOKENIZERS))
texts = st.one_of(st.text(max_size=40), st.text(alphabet="ab 好世🌊👩‍\n\t.,é�", max_size=40), st.sampled_from(CORPUS))


def _decode(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _pieces(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """`ids` in pieces of the given sizes, over and over."""
    start = turn = 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        yield ids[start : start + size]
        start, turn = start + size, turn + 1


def _follow(
    tokenizer: Any, prompt: list[int], ids: list[int], sizes: list[int], skip: bool = True, kept: tuple[str, ...] = ()
) -> str:
    """The whole text of `ids`, pushed in pieces."""
    detokenizer, text = Detokenizer(tokenizer, prompt, skip, kept), ""
    for piece in _pieces(ids, sizes):
        text += detokenizer.push(piece)
    return text + detokenizer.finish()


@st.composite
def _cases(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """(tokenizer's name, ids, sizes of pieces): ids of a text, ids at random, or few different ones over and over."""
    name = draw(names)
    tokenizer = TOKENIZERS[name]
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any))
    if draw(st.booleans()):
        return name, tokenizer.encode(draw(texts), add_special_tokens=False), sizes
    some = st.integers(0, len(tokenizer) + 2)  # the last have no token
    if draw(st.booleans()):
        some = st.sampled_from(draw(st.lists(some, min_size=1, max_size=4)))
    return name, draw(st.lists(some, max_size=60)), sizes


@given(_cases(), st.booleans())
def test_pieces_join_to_the_decode_of_all_ids(case: tuple[str, list[int], list[int]], skip: bool) -> None:
    name, ids, sizes = case
    tokenizer = TOKENIZERS[name]
    assert _follow(tokenizer, [], ids, sizes, skip) == _decode(tokenizer, ids, skip)
    if not skip:
        return
    skipped = {*tokenizer.all_special_ids} - {tokenizer.convert_tokens_to_ids("<|tool|>")}
    kept = _follow(tokenizer, [], ids, sizes, True, ("<|tool|>", "tide"))
    assert kept == _decode(tokenizer, [i for i in ids if i not in skipped], skip=False)
    bos = [tokenizer.bos_token_id]
    assert _follow(tokenizer, bos, ids, sizes) == _decode(tokenizer, ids)  # nothing is shown before it
    prompt = tokenizer.encode("The tide", add_special_tokens=False)
    before = _decode(tokenizer, prompt)
    after = _decode(tokenizer, prompt + ids)
    assert after.startswith(before)
    assert _follow(tokenizer, prompt, ids, sizes) == after[len(before) :]


@given(_cases(), _cases())
def test_given_text_is_certain(case: tuple[str, list[int], list[int]], other: tuple[str, list[int], list[int]]) -> None:
    """Whatever comes next, the decode of everything still begins with what was given."""
    name, ids, sizes = case
    tokenizer = TOKENIZERS[name]
    detokenizer, text, pushed = Detokenizer(tokenizer, []), "", 0
    for piece in _pieces(ids, sizes):
        text += detokenizer.push(np.array(piece, np.int32))
        pushed += len(piece)
        for more in ([], ids[pushed:], other[1]):
            assert _decode(tokenizer, ids[:pushed] + more).startswith(text)


@given(st.text(max_size=30).filter(lambda text: "�" not in text), st.integers(1, 3))
def test_whole_characters_are_given_at_once(text: str, size: int) -> None:
    """With bytes as tokens: after every push, all characters that are whole."""
    tokenizer = TOKENIZERS["bytes_only"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    detokenizer, got = Detokenizer(tokenizer, []), ""
    for end in range(size, len(ids) + size, size):
        got += detokenizer.push(ids[end - size : end])
        assert got == text.encode()[:end].decode(errors="ignore")
    assert detokenizer.finish() == ""


def test_bytes_that_never_complete() -> None:
    """A run of byte tokens waits for its end."""
    tokenizer = TOKENIZERS["bytes_only"]
    wave = tokenizer.encode("🌊", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push([i]) for i in wave[:3]] == ["", "", ""]
    assert detokenizer.finish() == "�"
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push([i]) for i in [*wave[:3], *wave]] == ["", "", "", "�", "", "", "🌊"]
    tokenizer = TOKENIZERS["byte_fallback"]
    a, newline, first, mark = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xE4>", "�"])
    detokenizer = Detokenizer(tokenizer, [a])
    assert [detokenizer.push([i]) for i in (newline, a, newline, first, a)] == ["", "\na", "", "", "��a"]
    assert detokenizer.push([mark]) == "�"  # here a character like another


@pytest.mark.parametrize(
    ("name", "pattern", "size"),
    [
        ("bytes_only", b"\xe4", 1),  # first bytes only: never whole
        ("bytes_only", b"\xbd", 7),  # no first byte
        ("bytes_only", "🌊é".encode(), 3000),
        ("byte_fallback", b"\xe4", 7),
        ("byte_fallback", b"\xf0\x9f\x8c\x8aa", 1),
        ("words", b"a", 7),
    ],
)
def test_linear_cost(name: str, pattern: bytes, size: int) -> None:
    plain, letters = TOKENIZERS[name], bytes_to_unicode()
    tokenizer = Counting(plain)
    tokens = {"bytes_only": lambda b: letters[b], "byte_fallback": lambda b: f"<0x{b:02X}>", "words": lambda b: "tide"}
    ids = (plain.convert_tokens_to_ids([tokens[name](b) for b in pattern]) * 3000)[:3000]
    Detokenizer(tokenizer, [])  # what is found out once a vocabulary
    before = tokenizer.num_decoded
    assert _follow(tokenizer, [], ids, [size]) == _decode(plain, ids)
    assert tokenizer.num_decoded - before < 20 * len(ids)


def _cut(text: str, stops: list[str]) -> str | None:
    """The oracle: `text` before the stop string that is complete first, of several the longest; None if none is."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@given(
    st.text(alphabet="aab\n🌊", max_size=30),
    st.lists(st.text(alphabet="aab\n🌊", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
)
def test_stop_strings_against_a_search_in_the_whole_text(text: str, stops: list[str], sizes: list[int]) -> None:
    stream, shown, hit, fed = StopStrings(stops), "", False, 0
    for piece in _pieces(list(text), sizes):  # type: ignore[arg-type]
        new, hit = stream.push("".join(map(str, piece)))
        shown, fed = shown + new, fed + len(piece)
        cut = _cut(text[:fed], stops)
        assert hit == (cut is not None)  # at once, not a piece later
        if hit:
            assert shown == cut
            break
        held = len(text[:fed]) - len(shown)
        assert text[:fed].startswith(shown)
        assert held == max((k for s in stops for k in range(len(s)) if text[:fed].endswith(s[:k])), default=0)
    if hit:
        assert stream.push("more") == ("", True)
        assert stream.flush() == ""
    else:
        assert shown + stream.flush() == text
    if len(stops) == 1:
        assert shown == (text[: text.find(stops[0])] if stops[0] in text else shown)


class _Counted(StopPatterns):
    """Counts the prefixes that are looked at."""

    num_steps = 0

    def step(self, state: int, character: str) -> int:
        self.num_steps += 1
        return super().step(state, character)


def test_the_number_of_stop_strings_costs_nothing_for_each_character() -> None:
    few, many = (_Counted([f"{i}".rjust(200, "a") for i in range(count)]) for count in (1, 100))
    text = "a" * 199 + "bcd" * 1000
    for patterns in (few, many):
        patterns.num_steps = 0
        stream = StopStrings(patterns)
        shown = "".join(stream.push(text[i : i + 7])[0] for i in range(0, len(text), 7)) + stream.flush()
        assert shown == text
    assert 199 < few.num_steps == many.num_steps <= len(text)


@given(_cases(), st.data())
def test_stream_of_ids_to_visible_text(case: tuple[str, list[int], list[int]], data: st.DataObject) -> None:
    name, ids, sizes = case
    tokenizer = TOKENIZERS[name]
    whole = _decode(tokenizer, ids)
    stops = data.draw(st.lists(st.text(min_size=1, max_size=3), max_size=2))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 4))])
    stream, shown = TextStream(tokenizer, [], stops), ""
    assert stream.has_stops == bool(stops)
    for piece in _pieces(ids, sizes):
        shown += stream.push(piece)
        if stream.stopped:
            break
    stopped = stream.stopped
    shown += stream.finish()
    cut = _cut(whole, stops)
    assert shown == (whole if cut is None else cut)
    assert stream.stopped == (cut is not None)
    assert stream.stopped or not stopped


@given(st.sampled_from(["bytes", "bytes_only", "byte_fallback"]), texts)
def test_the_bytes_of_tokens_join_to_the_text(name: str, text: str) -> None:
    """Those of parts of characters too, as clients of log-probabilities join them."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, i) for i in ids) in (text.encode(), f" {text}".encode())
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<|tool|>")) == b"<|tool|>"

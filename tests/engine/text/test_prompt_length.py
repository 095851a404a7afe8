"""Texts that cannot fit are refused before they are tokenised, and no other is."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from byte_level import Counting, byte_level
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagetide.api.sampling_params import SamplingParams
from pagetide.engine.text import prompt_length
from pagetide.engine.text.encoder import Encoder
from pagetide.engine.text.prompt_length import PromptLength
from pagetide.engine.text.tokenizer_bounds import growth
from pagetide.scheduler.request import PromptTooLong, RequestRejected

CORPUS = [
    "the tide comes in and the tide goes out; pages follow it. Hello, world!\n\n\tdone        spaces",
    "你好，世界。 é ñ café naïve",
]


def _normalising() -> PreTrainedTokenizerFast:
    """Unigram pieces over what NFKC makes of a text; what is not known is one piece, however long it is."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " "), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def _words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "tide": 2, "##s": 3, "a": 4, "##a": 5}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


BYTE_LEVEL = PreTrainedTokenizerFast(tokenizer_object=byte_level(CORPUS * 9, 420))
TOKENIZERS = {"byte-level": BYTE_LEVEL, "normalising": _normalising(), "words": _words()}


def _encoder(max_model_len: int, name: str = "byte-level") -> tuple[Encoder, Counting]:
    tokenizer = Counting(TOKENIZERS[name])
    return Encoder(tokenizer, 1000, None, max_model_len), tokenizer


def test_what_a_normalizer_lengthens_too_much_is_refused_before_it_is_made() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("e", "e" * 16)] * 4)
    counting = Counting(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))
    encoder = Encoder(counting, 1000, None, 1024)
    assert encoder.encode("e" * 10 + " salt" * 12_000, SamplingParams()).tolist() == [0]
    with pytest.raises(
        PromptTooLong, match=r"^the prompt has 20 characters, of which the tokenizer makes more than 1,048,576;"
    ):
        encoder.encode("e" * 20, SamplingParams())
    with pytest.raises(PromptTooLong, match="makes more than"):
        encoder.prepare(SamplingParams(bad_words=["e" * 20]))


@pytest.mark.parametrize(
    ("part", "most"),
    [
        ({"type": "Replace", "pattern": {"String": "ab"}, "content": "x" * 10}, 5),
        ({"type": "Replace", "pattern": {"Regex": "a*"}, "content": "é"}, 3),
        ({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 40}, 2.0**40),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "NFC"}]}, 12),
        ({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\1\0\0\0zab\0abcdef\0").decode()}, 6),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {}}] * 7 + [{"SpecialToken": {}}], "pair": []}, 7),
    ],
)
def test_the_growth_of_parts(part: dict[str, Any], most: float) -> None:
    assert growth(part) == most


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_of_megabytes_is_not_tokenised_at_all(name: str) -> None:
    encoder, tokenizer = _encoder(1024, name)
    most = encoder.length.most_characters
    assert most == 1023 * 1024
    for text in ("tide " * 4_000_000, " " * 20_000_000, "\U0001f30a" * (most + 1)):
        with pytest.raises(PromptTooLong) as refused:
            encoder.encode(text, SamplingParams())
        assert str(refused.value) == (
            f"the prompt has {len(text):,} characters; with a context of 1,024 tokens it may have {most:,} characters at most: "
            "shorten it, or raise max_model_len where the model allows"
        )
    assert tokenizer.num_characters == 0


@pytest.mark.parametrize("max_model_len", [128, 4096, 40_000])
def test_one_below_that_is_tokenised_as_far_as_it_could_fit(max_model_len: int) -> None:
    encoder, tokenizer = _encoder(max_model_len)
    text = "the tide " * (encoder.length.most_characters // 9)
    too_long = r"the prompt has more than [\d,]+ tokens in [\d,]+ characters; with a context of"
    with pytest.raises(PromptTooLong, match=too_long):
        encoder.encode(text, SamplingParams())
    assert tokenizer.num_characters <= 65_536 * (1 + max_model_len // 8000) < len(text)


def test_one_that_may_fit_is_tokenised_once() -> None:
    encoder, tokenizer = _encoder(40_000)
    text = "the tide " * 10_000
    ids = encoder.encode(text, SamplingParams())
    assert tokenizer.num_characters == len(text) and ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    encoder, tokenizer = _encoder(128, "words")
    text = "the tide" + " " * 100_000  # beyond what texts usually have, and of few tokens
    assert len(text) > max(65_536, 8 * 127)
    assert encoder.encode(text, SamplingParams()).tolist() == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_nothing_that_fits_is_refused(name: str, data: st.DataObject) -> None:
    """With slices of a few characters, so that many are cut."""
    tokenizer = TOKENIZERS[name]
    parts = ["the tide ", "tides", " " * 9, "\n\n\t", "é", "你好", "Hello, world!", "spaces", "ababab", "ﬁ", "x" * 20]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=60)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(ids)  # what has no token is no prompt
    spare = data.draw(st.integers(0, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_length, "_SURELY_FEW", 0)
        patch.setattr(prompt_length, "_SLICE_CHARACTERS", data.draw(st.integers(16, 64)))
        patch.setattr(prompt_length, "_SLICE_TOKENS", 3)
        length = PromptLength(tokenizer, len(ids) + 1 + spare)
        length.check(text, lambda part: tokenizer.encode(part, add_special_tokens=False))


def test_the_bound_follows_longer_tokens() -> None:
    state = json.loads(TOKENIZERS["byte-level"].backend_tokenizer.to_str())
    state["model"]["vocab"]["a" * 300] = len(state["model"]["vocab"])
    long = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert PromptLength(long, 11).most_characters == 10 * 4 * 300


def test_ids_are_counted_before_they_are_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, _ = _encoder(128)
    monkeypatch.setattr("pagetide.engine.text.encoder.np.asarray", lambda *_: pytest.fail("they are an array"))
    too_long = "the prompt has 1,000 tokens; with a context of 128 tokens it may have 127 at most"
    with pytest.raises(PromptTooLong, match=too_long):
        encoder.encode([5] * 1000, SamplingParams())


def test_text_that_is_none_is_told_as_such() -> None:
    encoder, _ = _encoder(64)
    for text in ("\ud800" + "a" * 65_000 + "b" * 500, "\ud800"):
        with pytest.raises(RequestRejected, match="must be text that UTF-8 can say"):
            encoder.encode(text, SamplingParams())

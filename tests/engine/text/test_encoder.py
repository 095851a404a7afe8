"""What requests say in words, as ids: the token a prompt starts with, bad words, and ids that the model has not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from byte_level import byte_level
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pagetide.api.sampling_params import MOST_STOP_IDS, SamplingParams
from pagetide.engine.text.encoder import Encoder
from pagetide.scheduler.request import RequestRejected

TEXT = "the tide comes in and the tide goes out; pages follow it"
BOS, SEP, START = 0, 1, 2
VOCAB = 320


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose texts are put into `template`."""
    specials = ["<s>", "</s>", "<start>"]
    tokenizer = byte_level([TEXT], 300, [AddedToken(token, special=True) for token in specials])
    ids = list(zip(specials, (BOS, SEP, START), strict=True))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


PLAIN, BEGUN, ENCLOSED = (_tokenizer(template) for template in ("$A", "<s> $A", "<s> $A </s>"))


def _encoded(tokenizer: Any, prompt: Any, **settings: Any) -> list[int]:
    ids = Encoder(tokenizer, VOCAB, BOS, 512).encode(prompt, SamplingParams(**settings))
    assert ids.dtype == np.int32
    return [int(i) for i in ids]


def _ids(text: str) -> list[int]:
    return list(PLAIN.encode(text, add_special_tokens=False))


def test_a_prompt_begins_with_the_token_asked_for() -> None:
    for tokenizer, prompt, expected in (
        (PLAIN, TEXT, [START, *_ids(TEXT)]),
        (BEGUN, TEXT, [START, *_ids(TEXT)]),  # in the place of the BOS
        (ENCLOSED, TEXT, [START, *_ids(TEXT), SEP]),  # other special tokens stay
        (PLAIN, f"<s>{TEXT}", [START, BOS, *_ids(TEXT)]),  # what stands in the text was not added
        (BEGUN, f"<s>{TEXT}", [START, BOS, *_ids(TEXT)]),
        (BEGUN, f"<start>{TEXT}", [START, *_ids(TEXT)]),
        (PLAIN, "", [START]), (ENCLOSED, "", [START]), (None, [], [START]), (None, [5, 6], [START, 5, 6]),
        (None, [START, 5, 6], [START, 5, 6]), (None, np.array([5, 6], np.uint8), [START, 5, 6]),
    ):  # fmt: skip
        assert _encoded(tokenizer, prompt, start_id=START) == expected, (prompt, expected)
    assert _encoded(ENCLOSED, TEXT, start_id=START, add_special_tokens=False) == [START, *_ids(TEXT)]
    assert _encoded(ENCLOSED, TEXT) == [BOS, *_ids(TEXT), SEP]
    assert _encoded(BEGUN, TEXT, start_id=BOS) == _encoded(BEGUN, TEXT) == [BOS, *_ids(TEXT)]


def test_what_is_no_prompt_is_refused_with_it_too() -> None:
    for prompt in ([[1], [2, 3]], [1.5], ["a"], [[5]]):
        with pytest.raises(RequestRejected, match="a prompt is a string or a flat list"):
            _encoded(None, prompt, start_id=START)


def _bad_words(tokenizer: Any, words: Any) -> tuple[tuple[int, ...], ...]:
    return Encoder(tokenizer, VOCAB, BOS, 512).prepare(SamplingParams(bad_words=words)).bad_words


def test_bad_words_are_at_the_beginning_and_behind_a_space() -> None:
    both = (tuple(_ids("tide")), tuple(_ids(" tide")))
    assert both[0] != both[1]
    assert _bad_words(BEGUN, "tide") == both
    assert _bad_words(ENCLOSED, ["tide", " out", "tide", "\n"]) == (*both, tuple(_ids(" out")), tuple(_ids("\n")))
    assert _bad_words(None, None) == ()
    # Where the tokenizer marks a word's beginning itself, both are the same ids, which are given once.
    tokenizer = Tokenizer(models.WordLevel({"▁tide": 5, "<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    assert _bad_words(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ["tide"]) == ((5,),)


def test_bad_words_without_ids_are_refused() -> None:
    with pytest.raises(RequestRejected, match=r"bad_words need a tokenizer, .*: use bad_words_ids"):
        _bad_words(None, ["tide"])
    with pytest.raises(RequestRejected, match="the bad word 'b' has no token"):
        _bad_words(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))), ["b"])


def test_what_the_model_has_not_is_refused() -> None:
    encoder = Encoder(None, VOCAB, BOS, 512)
    for settings, message in (
        ({"stop_token_ids": [3, 320]}, "stop_token_ids [320] are outside the vocabulary of 320"),
        ({"bad_words_ids": [[3], [1, 400, 2]]}, "bad_words_ids [400] are outside the vocabulary of 320"),
        ({"logit_bias": {319: 1.0, 9999: 2.0}}, "logit_bias [9999] are outside the vocabulary of 320"),
        ({"start_id": 320}, "start_id [320] are outside the vocabulary of 320"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"regex": "x"}, "constrained output needs"),
    ):
        with pytest.raises(RequestRejected, match=re.escape(message)):
            encoder.prepare(SamplingParams(**settings)).compile()
    encoder.prepare(SamplingParams(stop_token_ids=[319], bad_words_ids=[[0, 319]], logit_bias={319: 1.0}, start_id=319))


def test_what_is_resolved_has_bounds_too() -> None:
    """Else a request could be handed over to an engine that refuses it."""
    encoder, ends = Encoder(BEGUN, VOCAB, BOS, 512), range(300, 303)
    own = SamplingParams(stop_token_ids=range(MOST_STOP_IDS))
    with pytest.raises(RequestRejected, match="stop_token_ids and the model's own end ids must be at most 1,024 tog"):
        Encoder(None, 10**6, None, 512).prepare(own, [2000])
    Encoder(None, 10**6, None, 512).prepare(own, [5])
    encoder.prepare(SamplingParams(stop_token_ids=[3], ignore_eos=True), ends)
    words = [f"{i} and so on, and on" for i in range(900)]
    too_many = "bad_words and bad_words_ids must be at most 16,384 token ids together, got"
    with pytest.raises(RequestRejected, match=too_many):
        encoder.prepare(SamplingParams(bad_words=words))


def test_lists_may_be_iterators_and_are_the_parameters_own() -> None:
    stops = ["a"]
    params = SamplingParams(
        stop=iter(stops), stop_token_ids=iter([3]), bad_words=iter(["b"]), bad_words_ids=iter([iter([4, 5])]),
        logits_processors=iter([len]),
    )  # fmt: skip
    stops.append("c")
    whole = params.over(SamplingParams())
    assert (whole.stop_strings, whole.stop_token_ids, whole.bad_strings) == (("a",), (3,), ("b",))
    sampling = whole.resolve()
    assert (sampling.bad_words, sampling.logits_processors) == (((4, 5),), (len,))


def test_an_output_ends_where_the_configuration_the_tokenizer_or_the_template_says() -> None:
    """As with a fine-tuned model whose configuration names only the end of its base model."""
    turns = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    tokenizer = _tokenizer("$A")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end = tokenizer.convert_tokens_to_ids("<end>")
    for template, configured, expected in (
        (None, (), (SEP,)), (None, (7, SEP), (7, SEP)), ("{{ raise_exception('no') }}", (7,), (7, SEP)),
        (turns, (7,), (7, SEP, end)), (turns.replace("m.content", "m.content | upper"), (7,), (7, SEP, end)),
        (turns.replace("<end>", ""), (7,), (7, SEP)),  # what comes next is no end
        (turns.replace("<end>", "end"), (7,), (7, SEP)),  # no special token
        (turns.replace("<end>", "{% if not loop.last %}<end>{% endif %}"), (7,), (7, SEP, end)),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + turns, (7,), (7, SEP, end)),
    ):  # fmt: skip
        tokenizer.chat_template = template
        assert Encoder(tokenizer, VOCAB, BOS, 512).all_ends(configured) == expected, template
    assert Encoder(tokenizer, SEP, BOS, 512).all_ends((0,)) == (0,)  # outside the vocabulary of the model
    assert Encoder(None, VOCAB, BOS, 512).all_ends((5,)) == (5,)


def test_stop_strings_that_are_special_tokens_are_ids() -> None:
    encoder = Encoder(_tokenizer("$A"), VOCAB, BOS, 512)
    params = SamplingParams(stop=["<start>", " </s>\n", "tide"], stop_token_ids=[9])
    found = encoder.with_special_stops(params)
    assert (found.stop, found.stop_token_ids) == (("tide",), (9, START, SEP))
    assert encoder.with_special_stops(SamplingParams(stop="<s>")).stop is None
    for kept in (SamplingParams(stop="tide"), SamplingParams(stop="</s>", skip_special_tokens=False)):
        assert encoder.with_special_stops(kept) == kept
    with pytest.raises(RequestRejected, match=r"stop 'tide</s>' has the special token '</s>' beside other text"):
        encoder.with_special_stops(SamplingParams(stop=["tide</s>"]))
    ids = np.array(_ids("the"), np.int32)
    for fields, text in (
        ({}, " tide"),
        ({"skip_special_tokens": False}, "<start> tide</s>"),
        ({"kept_special_tokens": ["</s>"]}, " tide</s>"),
    ):
        params = SamplingParams(**fields)
        stream = encoder.text_stream(ids, encoder.prepare(params).stops, params)
        assert stream is not None
        assert "".join([stream.push([START, *_ids(" tide"), SEP]), stream.finish()]) == text

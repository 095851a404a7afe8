"""`pagetide.pipeline` beside transformers' own pipeline over the same model: structure, greedy text, streams, streamers."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from families import tiny
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.pipelines.pt_utils import KeyDataset
from transformers.pipelines.text_generation import ReturnType
from transformers.utils.chat_template_utils import Chat

import pagetide
from pagetide import RequestRejected, SamplingParams
from pagetide.api.arguments import rows
from pagetide.engine.loading.generation import HARMLESS, REFUSED, SERVED, known_to_transformers
from pagetide.pipelines.arguments import HARMLESS as HARMLESS_ARGUMENTS
from pagetide.pipelines.arguments import REFUSED as REFUSED_ARGUMENTS
from pagetide.pipelines.text_generation import TextGenerationPipeline

DEMO = Path(pagetide.__file__).resolve().parents[1] / "engine" / "demo_model"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if not loop.last or add_generation_prompt %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
P, Q = "The prince looked at her and said", "It was a cold evening. "
HELLO = [{"role": "user", "content": "Who are you?"}]
TALK = [{"role": "system", "content": "Be brief."}, *HELLO]
BEGUN = [*HELLO, {"role": "assistant", "content": "I am"}]
GREEDY = {"do_sample": False}
END = 3192  # which comes as the seventh token behind P, and so ends its text


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small(config: GenerationConfig | None = None) -> PreTrainedModel:
    """The same weights each time."""
    model = tiny("llama", vocab_size=4096, num_hidden_layers=2, bos_token_id=0, max_position_embeddings=1024)
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 0, END
    model.generation_config = config or model.generation_config
    return model


def their_pipeline(config: GenerationConfig, tokenizer: Any, **options: Any) -> Any:
    return transformers.pipeline("text-generation", model=small(config), tokenizer=tokenizer, device="cpu", **options)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small()


@pytest.fixture(scope="module")
def theirs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    return their_pipeline(model.generation_config, tokenizer)  # what a test sets there counts for both


@pytest.fixture(scope="module")
def ours(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[TextGenerationPipeline]:
    with make(model, tokenizer) as pipe:
        yield pipe


def make(model: Any, tokenizer: Any, max_seqs: int = 16) -> TextGenerationPipeline:
    return pagetide.pipeline(
        "text-generation", model=model, tokenizer=tokenizer, kv_memory="4MiB", max_seqs=max_seqs, share=False
    )


def form(value: Any) -> Any:
    """Types, nesting and keys; what strings and lists of ids hold is left out."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], int):
        return "ids"
    return [form(item) for item in value] if isinstance(value, list) else type(value)


def favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Makes token 11 likelier with every token that is there."""
    scores = scores.clone()
    scores[:, 11] += input_ids.shape[1] - 8
    return scores


SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "an empty string": ("", {**GREEDY, "max_new_tokens": 5}),
    "the default of max_new_tokens": (Q, GREEDY),
    "max_length": ([P, Q], {**GREEDY, "max_length": 30}),
    "min_length": ([P, Q], {**GREEDY, "min_length": 25, "max_length": 30}),
    "min_new_tokens": (P, {**GREEDY, "min_new_tokens": 9, "max_new_tokens": 12}),
    "min_length above all": (Q, {**GREEDY, "min_length": 90, "max_new_tokens": 6}),
    "max_new_tokens None": (P, {**GREEDY, "max_new_tokens": None}),
    "temperature without sampling": (P, {**GREEDY, "temperature": 0.3, "max_new_tokens": 6}),
    "new text": ([P, Q], {**GREEDY, "return_full_text": False, "max_new_tokens": 6}),
    "full text": (P, {**GREEDY, "return_full_text": True, "max_new_tokens": 6}),
    "token ids": ([P, Q], {**GREEDY, "return_tensors": True, "max_new_tokens": 6}),
    "token ids, said otherwise": (P, {**GREEDY, "return_tensors": False, "max_new_tokens": 6}),
    "token ids of an empty string": ("", {**GREEDY, "return_tensors": True, "max_new_tokens": 6}),
    "return_type": (P, {**GREEDY, "return_type": ReturnType.NEW_TEXT, "max_new_tokens": 6}),
    "return_text": (P, {**GREEDY, "return_text": True, "max_new_tokens": 6}),
    "a prefix": ([P, Q], {**GREEDY, "prefix": "Once upon a time. ", "max_new_tokens": 6}),
    "a prefix and max_length": (P, {**GREEDY, "prefix": "Once upon a time. ", "max_length": 16}),
    "no special tokens added": (P, {**GREEDY, "add_special_tokens": False, "max_new_tokens": 6}),
    "special tokens shown": (P, {**GREEDY, "skip_special_tokens": False, "max_new_tokens": 6}),
    "spaces cleaned": ("I do n't , you ?", {**GREEDY, "clean_up_tokenization_spaces": True, "max_new_tokens": 30}),
    "truncation": (P * 9, {**GREEDY, "truncation": True, "max_new_tokens": 6, "tokenizer_encode_kwargs": {"max_length": 8}}),
    "a hole": (P * 160, {**GREEDY, "handle_long_generation": "hole", "max_new_tokens": 6}),
    "repetition_penalty": (P, {**GREEDY, "repetition_penalty": 1.7, "max_new_tokens": 12}),
    "no repetition": (P, {**GREEDY, "no_repeat_ngram_size": 2, "max_new_tokens": 12, "eos_token_id": None}),
    "bad words": (P, {**GREEDY, "bad_words_ids": [[3870], [1546, 2581], [END]], "max_new_tokens": 12}),
    "suppressed tokens": (P, {**GREEDY, "suppress_tokens": [END, 1546], "max_new_tokens": 12}),
    "a bias": (P, {**GREEDY, "sequence_bias": [[[3870], -9.0]], "max_new_tokens": 6}),
    "a bias without end": (P, {**GREEDY, "sequence_bias": {(3870,): float("-inf")}, "max_new_tokens": 6}),
    "a bias of sequences": (P, {**GREEDY, "sequence_bias": {(1546, 3870): -90.0, (2558,): -90.0}, "max_new_tokens": 6}),
    "a logits processor": (P, {**GREEDY, "logits_processor": LogitsProcessorList([favour]), "max_new_tokens": 6}),
    "allowed tokens": (P, {**GREEDY, "prefix_allowed_tokens_fn": lambda batch, ids: [5, 6, 7], "max_new_tokens": 6}),
    "several ends": ([P, Q], {**GREEDY, "eos_token_id": [3714, 1875], "max_new_tokens": 12}),
    "a stop": (P, {**GREEDY, "eos_token_id": None, "stop_sequence": "e", "max_new_tokens": 40}),
    "a generation config": (P, {"generation_config": GenerationConfig(do_sample=False, max_new_tokens=7)}),
    "generate's own harmless": (P, {**GREEDY, "use_cache": True, "max_new_tokens": 5, "batch_size": 2}),
    "a chat": (HELLO, {**GREEDY, "max_new_tokens": 6}),
    "a longer chat": (TALK, {**GREEDY, "max_new_tokens": 6, "return_full_text": False}),
    "chats": ([HELLO, TALK], {**GREEDY, "max_new_tokens": 6}),
    "a Chat": (Chat(TALK), {**GREEDY, "max_new_tokens": 6}),
    "a chat that is begun": (BEGUN, {**GREEDY, "max_new_tokens": 6}),
    "a chat begun, answered": (BEGUN, {**GREEDY, "max_new_tokens": 6, "continue_final_message": False}),
    "a chat as token ids": ([TALK], {**GREEDY, "max_new_tokens": 6, "return_tensors": True}),
    "a tuple of messages": (tuple(TALK), {**GREEDY, "max_new_tokens": 6}),
    "no prompt": ((x for x in ()), {**GREEDY, "max_new_tokens": 6}),
    "a column of chats": (KeyDataset([{"x": HELLO}, {"x": TALK}], "x"), {**GREEDY, "max_new_tokens": 6}),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:Unfeasible length", "ignore:Using the model-agnostic default")
@pytest.mark.parametrize("name", SAME)
def test_greedy_answers_are_those_of_transformers(name: str, theirs: Any, ours: TextGenerationPipeline) -> None:
    inputs, options = SAME[name]
    assert ours(inputs, **options) == theirs(inputs, **options)


SAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "the defaults": (P, {"eos_token_id": [END, 1875, *range(2, 500)]}),
    "sampling": ([P, Q], {"do_sample": True, "top_k": 5, "top_p": 0.9, "max_new_tokens": 5}),
    "a chat": (HELLO, {"max_new_tokens": 5, "min_p": 0.1}),
    "several": (P, {"num_return_sequences": 3, "max_new_tokens": 5}),
    "several of several": ([P, Q], {"num_return_sequences": 2, "max_new_tokens": 5, "return_full_text": False}),
    "several as token ids": ([P, Q], {"num_return_sequences": 2, "max_new_tokens": 5, "return_tensors": True}),
    "beams that are drawn": ([P, Q], {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}),
    "several of chats": ([HELLO, BEGUN], {"num_return_sequences": 2, "max_new_tokens": 5}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_answers_have_the_form_of_transformers(name: str, theirs: Any, ours: TextGenerationPipeline) -> None:
    inputs, options = SAMPLED[name]
    assert form(ours(inputs, **options)) == form(theirs(inputs, **options))


BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "the best of them": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
    "until there are enough": {"num_beams": 4, "early_stopping": True, "num_return_sequences": 4, "return_tensors": True},
    "until there can be none": {"num_beams": 3, "early_stopping": "never", "length_penalty": -1.0},
}


@pytest.mark.parametrize("name", BEAMS)
def test_beams_are_those_of_transformers(name: str, theirs: Any, ours: TextGenerationPipeline) -> None:
    options = {**GREEDY, "max_new_tokens": 10, "eos_token_id": [END, 1875, 707], **BEAMS[name]}
    assert ours([P, Q], **options) == theirs([P, Q], **options)


FORBIDDEN = {"bad_words_ids": [[3870], [1546, 2581]], "sequence_bias": {(2308,): -3.0}}
LAID_OVER: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # the model's, the making's, the call's
    ({}, {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}, {"max_new_tokens": 6}),
    ({}, {"do_sample": False, "max_new_tokens": 4, "return_full_text": False}, {"return_tensors": True}),
    ({}, {"max_length": 14, "do_sample": False}, {}),
    ({"max_length": 12}, {}, GREEDY),
    ({"max_new_tokens": 3, "do_sample": True, "temperature": 0.8}, {}, GREEDY),
    ({"max_new_tokens": 3, "repetition_penalty": 1.5}, {"max_new_tokens": 9, "do_sample": False}, {}),
    ({}, {"max_new_tokens": 3}, {"generation_config": GenerationConfig(do_sample=False, max_length=12)}),
    ({}, {"generation_config": GenerationConfig(do_sample=False, max_new_tokens=3)}, {"max_new_tokens": 5}),
    ({"do_sample": False}, {"generation_config": GenerationConfig(max_length=14)}, {"min_new_tokens": 5}),
    ({}, {"prefix": "Once. ", "add_special_tokens": False}, {**GREEDY, "max_length": 15}),
    ({}, {"stop_sequence": "e", "eos_token_id": None}, {**GREEDY, "max_new_tokens": 30}),
    (FORBIDDEN, {}, {**GREEDY, "max_new_tokens": 6}),
    (FORBIDDEN, {}, {**GREEDY, "max_new_tokens": 6, "bad_words_ids": None}),  # what a model forbids a call can allow
    (FORBIDDEN, {}, {**GREEDY, "max_new_tokens": 6, "bad_words_ids": None, "sequence_bias": {(5, 6): 1.0}}),
    (FORBIDDEN, {}, {**GREEDY, "max_new_tokens": 6, "bad_words_ids": [[9]]}),
]


@pytest.mark.parametrize(("of_model", "of_making", "of_call"), LAID_OVER)
def test_settings_lie_over_one_another_as_with_transformers(
    of_model: dict[str, Any], of_making: dict[str, Any], of_call: dict[str, Any],
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ours: TextGenerationPipeline,
) -> None:  # fmt: skip
    before = model.generation_config.to_diff_dict()
    model.generation_config.update(**of_model)
    try:
        theirs = their_pipeline(model.generation_config, tokenizer, **of_making)
        with pagetide.pipeline("text-generation", model=ours.llm, **of_making) as again:
            assert again([P, Q], **of_call) == theirs([P, Q], **of_call)
    finally:
        for name in of_model:
            setattr(model.generation_config, name, before.get(name))


def test_a_model_by_name_answers_as_transformers_does_from_its_folder() -> None:
    theirs = transformers.pipeline("text-generation", model=str(DEMO), dtype=torch.float32, device="cpu")
    with pagetide.pipeline(model="demo", dtype=torch.float32, device=-1, kv_memory="8MiB", share=False) as ours:
        options = {**GREEDY, "max_new_tokens": 24}
        assert ours([P, Q], **options) == theirs([P, Q], **options)
        assert (ours.task, ours.model) == ("text-generation", ours.llm)
        assert form(ours(Q, max_new_tokens=3)) == form(theirs(Q, max_new_tokens=3))
        assert ours.generation_config.top_p == 0.95


def test_iterators_among_the_arguments_hold_for_every_prompt(ours: TextGenerationPipeline) -> None:
    options = {**GREEDY, "max_new_tokens": 16}
    ids = ours(P, return_tensors=True, **options)[0]["generated_token_ids"][-2:-1]  # something that it says
    plain = ours([P, P], **options)
    banned = ours([P, P], bad_words_ids=iter([ids]), **options)
    assert banned[0] == banned[1] == ours(P, bad_words_ids=[ids], **options) != plain[0]


def test_what_the_models_own_settings_ask_for_in_vain_is_told(ours: TextGenerationPipeline, caplog: Any) -> None:
    own = ours.generation_config
    own.forced_eos_token_id = 7
    try:
        ours(P, do_sample=False, max_new_tokens=2)
    finally:
        own.forced_eos_token_id = None
    assert "forced_eos_token_id=7, which is not served and has no effect" in caplog.text


def test_a_seed_gives_what_the_engine_gives_with_it(ours: TextGenerationPipeline) -> None:
    """The pipeline's defaults are transformers': a temperature of 0.7, and the 50 likeliest."""
    params = SamplingParams(temperature=0.7, top_k=50, seed=5, max_new_tokens=40)
    (direct,) = ours.llm.generate(P, params)
    (record,) = ours(P, seed=5, max_new_tokens=40, return_tensors=True)
    assert record["generated_token_ids"] == [*direct.prompt_token_ids, *direct.token_ids]
    assert ours(P, seed=6, max_new_tokens=8) != ours(P, seed=7, max_new_tokens=8)
    assert ours([Q, P], seed=6, max_new_tokens=8)[1] == ours(P, seed=6, max_new_tokens=8)


def test_set_seed_counts_here_too(ours: TextGenerationPipeline) -> None:
    answers = []
    for seed in (3, 3, 4):
        transformers.set_seed(seed)
        answers.append(ours([P, P], max_new_tokens=12))
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][1]


def test_continuations_of_a_prompt_are_filled_up_to_one_length(ours: TextGenerationPipeline) -> None:
    ends = list(range(1, 4096, 6))
    records = ours(P, num_return_sequences=8, eos_token_id=ends, max_new_tokens=30, return_tensors=True, seed=1)
    texts = [record["generated_token_ids"] for record in records]
    assert len(set(map(len, texts))) == 1
    first_ends = [next((i for i, token in enumerate(ids) if i >= 8 and token in ends), len(ids)) for ids in texts]
    assert len(set(first_ends)) > 1
    assert all(set(ids[end + 1 :]) <= {0} for ids, end in zip(texts, first_ends, strict=True))


def test_a_stream_of_any_kind_is_answered_in_its_order(ours: TextGenerationPipeline) -> None:
    texts = [f"{Q}{i}" for i in range(9)]
    options = {**GREEDY, "max_new_tokens": 3}
    expected = ours(texts, **options)

    class MapStyle(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(texts)

        def __getitem__(self, i: int) -> str:
            return texts[i % len(texts)]  # without an end of its own

    class IterableStyle(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[str]:
            return iter(texts)

    column = KeyDataset([{"text": text} for text in texts], "text")  # type: ignore[arg-type]
    for source in (MapStyle(), IterableStyle(), column, (x for x in texts), iter(texts), map(str, texts)):
        assert list(ours(source, **options)) == expected
    assert (len(ours(MapStyle())), len(ours(column))) == (9, 9)
    answers = ours(column, **options)
    assert [next(answers), *answers] == expected
    assert list(answers) == expected, "a data set is read again"
    (chat,) = ours(TALK, **options)
    assert list(ours(([*TALK] for _ in range(2)), **options)) == [[chat]] * 2
    assert ours((message for message in TALK), **options) == [chat], "messages that are generated are one chat"


def test_a_source_is_read_no_further_ahead_than_asked(ours: TextGenerationPipeline) -> None:
    taken: list[int] = []

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1_000

        def __getitem__(self, i: int) -> dict[str, str]:
            taken.append(i)
            return {"text": f"{i}"}

    for ahead, most in ((None, 2 * 16), (3, 3), (1, 1)):
        taken.clear()
        column = KeyDataset(Rows(), "text")  # type: ignore[arg-type]
        answers = ours(column, **GREEDY, max_new_tokens=2, look_ahead=ahead)
        assert set(taken) <= {0}, "a look at its kind is all that the call takes"
        taken.clear()
        for number in range(4):
            next(answers)
            assert len(taken) <= number + most
        answers.close()
    with pytest.raises(RequestRejected, match="look_ahead"):
        next(ours(iter([P]), look_ahead=0))


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.stress)])
def test_an_endless_generator_is_served_in_order_within_bounds(model: Any, tokenizer: Any, count: int) -> None:
    """So many answers: memory flat, batches formed, and never more than the look-ahead taken from the source."""
    taken, process = 0, psutil.Process()

    def prompts() -> Iterator[str]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield f"{number % 97} {number % 89}"

    with make(model, tokenizer, max_seqs=64) as pipe:
        alone = [pipe(text, **GREEDY, max_new_tokens=2) for text in itertools.islice(prompts(), 20)]
        taken, steps, seen, most_ahead = 0, pipe.llm.stats()["steps"], [], 0
        answers = pipe(prompts(), **GREEDY, max_new_tokens=2)
        for number, records in enumerate(itertools.islice(answers, count)):
            prompt = f"{number % 97} {number % 89}"
            assert records[0]["generated_text"].startswith(prompt)
            if number < len(alone):
                assert records == alone[number]
            most_ahead = max(most_ahead, taken - number)
            if number in (count // 10, count * 11 // 20, count - 2):
                gc.collect()
                seen.append((len(gc.get_objects()), process.memory_info().rss))
        stats = pipe.llm.stats()
    assert len(seen) == 3
    assert max(objects for objects, _ in seen) - seen[0][0] < 2_000, seen
    assert max(rss for _, rss in seen) - seen[0][1] < 16 << 20
    assert most_ahead <= 2 * 64
    assert stats["steps"] - steps < 2 * count / 32, "64 at a time make two tokens each"


def test_what_fails_in_a_stream_is_raised_at_its_place(ours: TextGenerationPipeline) -> None:
    options = {**GREEDY, "max_length": 40, "max_new_tokens": None}
    good = ours(P, **options)

    def fails() -> Iterator[str]:
        yield P
        raise OSError("the disk is gone")

    for source, error, said in (
        ([P, P * 30, P], ValueError, "raise max_length"),
        ([P, 5, P], ValueError, "a prompt is a string or a chat"),
        ([P, {"text": P}], ValueError, "KeyDataset"),
        ([P, [{"role": "user"}]], ValueError, "a prompt is a string or a chat"),
        (fails(), OSError, "the disk is gone"),
    ):
        answers = ours(iter(source), **options)
        assert next(answers) == good
        with pytest.raises(error, match=said):
            next(answers)
        assert list(itertools.islice(answers, 1)) in ([], [good])  # at its end it begins anew where it can
    with pytest.raises(RequestRejected, match="context"):
        next(ours(iter([P * 200]), max_new_tokens=1))


def test_a_stream_that_is_dropped_leaves_nothing_behind(ours: TextGenerationPipeline) -> None:
    for closed in (True, False):
        answers = ours((P for _ in itertools.count()), max_new_tokens=6)
        next(answers)
        if closed:
            answers.close()
        del answers
        gc.collect()
        ours(P, max_new_tokens=1)
        stats = ours.llm.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)


class Recorder(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("inputs", [P, "", [P, Q], TALK])
def test_a_streamer_is_given_what_transformers_gives_it(inputs: Any, theirs: Any, ours: TextGenerationPipeline) -> None:
    of_theirs, of_ours = Recorder(), Recorder()
    for pipe, recorder in ((theirs, of_theirs), (ours, of_ours)):
        pipe(inputs, streamer=recorder, **GREEDY, max_new_tokens=8)
    assert of_ours.seen == of_theirs.seen


def test_a_text_iterator_streamer_is_read_while_the_pipeline_runs(ours: TextGenerationPipeline, tokenizer: Any) -> None:
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    reading, pieces, answers = threading.Event(), [], []

    def gated(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 20:  # it goes on only because somebody has read something by now
            assert reading.wait(60)
        return scores

    options = {**GREEDY, "max_new_tokens": 40, "eos_token_id": None, "logits_processor": [gated]}
    thread = threading.Thread(target=lambda: answers.extend(ours(P, streamer=streamer, **options)))
    thread.start()
    for piece in streamer:
        pieces.append(piece)
        if piece:
            reading.set()
    thread.join()
    assert P + "".join(pieces) == answers[0]["generated_text"]


def test_streamers_refuse_what_they_cannot_tell_apart(theirs: Any, ours: Any, tokenizer: Any) -> None:
    for inputs, options, said in (
        (P, {"num_return_sequences": 2}, r"batch size 1|beam|one continuation"),
        (P, {"num_beams": 2, "do_sample": False}, r"batch size 1|beam|one continuation"),
        ([P, P], {"batch_size": 2}, r"batching|one prompt"),
    ):
        for pipe in (theirs, ours):
            with pytest.raises(ValueError, match=said):
                pipe(inputs, streamer=TextStreamer(tokenizer), max_new_tokens=2, **options)


def test_a_streamer_is_ended_when_its_prompt_fails(ours: TextGenerationPipeline) -> None:
    recorder = Recorder()

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        ours(P, streamer=recorder, logits_processor=[broken], max_new_tokens=3)
    assert recorder.seen[-1] == "end"


def test_what_is_not_served_is_refused_with_a_reason(ours: Any) -> None:
    for options, said in [
        ({"max_new_token": 5}, "did you mean 'max_new_tokens'"),
        ({"quux": 1}, "no argument 'quux'$"),
        ({"typical_p": 0.5}, "typical_p=0.5 is not served"),
        ({"stopping_criteria": [print]}, "stop_strings"),
        ({"assistant_model": "demo"}, "no second model"),
        ({"return_dict_in_generate": True}, "logprobs"),
        ({"generation_config": GenerationConfig(epsilon_cutoff=0.1)}, "epsilon_cutoff"),
        ({"generation_config": {"top_k": 5}}, "GenerationConfig"),
        ({"num_return_sequences": 2, "do_sample": False}, "greedy search gives one"),
        ({"temperature": 0.0}, "do_sample=False"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_length": 3}, "raise max_length"),
        ({"num_beams": 2, "num_return_sequences": 3}, "above num_beams"),
        ({"return_full_text": True, "return_tensors": True}, "return_full_text"),
        ({"return_text": True, "return_tensors": True}, "return_text"),
        ({"stop_sequence": "a", "stop_strings": "b"}, "mean the same"),
        ({"handle_long_generation": "cut"}, "'hole'"),
        ({"logits_processor": 5}, "logits_processor"),
        ({"generate_kwargs": {"max_new_tokens": 2}, "max_new_tokens": 3}, "given twice"),
        ({"generate_kwargs": 5}, "must map names"),
        ({"tokenizer_encode_kwargs": {"return_tensors": "pt"}}, "return_tensors"),
        ({"tokenizer": object()}, "at the making"),
        ({"max_seqs": 4}, "no argument 'max_seqs': it is an argument of LLM"),
    ]:
        with pytest.raises(ValueError, match=said):
            ours(P, **options)


@pytest.mark.parametrize("inputs", [5, None, b"bytes", {"text": P}, [P, 5], [[1, 2]], [{"role": "user"}], [{}], [[]]])
def test_what_is_no_prompt_is_refused(ours: TextGenerationPipeline, inputs: Any) -> None:
    with pytest.raises(ValueError, match="the prompt is empty: leave it out" if inputs == [[]] else "string"):
        ours(inputs, max_new_tokens=1)


def test_a_making_is_refused_with_a_reason() -> None:
    for options, said in [
        ({"task": "summarization"}, "'summarization' is not served"),
        ({"model": None}, "no model was given"),
        ({"max_seq": 4}, "did you mean 'max_seqs'"),
        ({"config": "demo"}, "config is not served"),
        ({"revision": "v2"}, "nothing is downloaded"),
        ({"device": 0, "device_map": "auto"}, "cannot be given together"),
        ({"device": None, "device_map": {"a": 0, "b": 1}}, "tensor_parallel_size"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "mean the same"),
        ({"model_kwargs": {"load_in_4bit": True}}, 'write quantization="int8" or "int4"'),
        ({"model_kwargs": {"quux": True}}, "no argument 'quux'$"),
        ({"model_kwargs": {"dtype": "float32"}, "dtype": "float32"}, "given twice"),
        ({"typical_p": 0.5}, "not served"),
        ({"tokenizer": 5}, "tokenizer must be"),
        ({"tokenizer": "/nowhere"}, "no tokenizer"),
        ({"model": object()}, "a loaded transformers model"),
    ]:
        with pytest.raises((ValueError, pagetide.ModelNotFound), match=said):
            pagetide.pipeline(**{"model": "demo", "share": False, "kv_memory": "4MiB", "device": "cpu", **options})


def test_a_pipeline_over_an_engine_leaves_it_open(ours: TextGenerationPipeline) -> None:
    with pagetide.pipeline("text_generation", model=ours.llm, max_new_tokens=2, max_seqs=None, device=None, **GREEDY) as again:
        assert again(P) == ours(P, max_new_tokens=2, **GREEDY)
        assert again.llm is ours.llm
    assert ours(P, max_new_tokens=1)
    with pytest.raises(ValueError, match="made already: max_seqs, tokenizer"):
        pagetide.pipeline(model=ours.llm, max_seqs=4, tokenizer="demo")
    with pytest.raises(ValueError, match="needs one: give tokenizer"):
        make(small(), None)


def test_harmless_arguments_are_noted_once(ours: Any, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pagetide.pipelines.arguments._noted", set())
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "padding": True, "use_cache": True, **GREEDY}
    with caplog.at_level(logging.WARNING, logger="pagetide"):
        answers = [ours(P, max_new_tokens=2, **options) for _ in range(2)]
    assert answers[0] == answers[1]
    notes = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert sorted(note.split()[0] for note in notes) == ["batch_size", "num_workers", "padding", "use_cache"]


def test_every_setting_of_transformers_is_served_or_refused_by_name() -> None:
    named = SERVED | HARMLESS | REFUSED.keys()
    assert known_to_transformers() <= named
    assert not SERVED & HARMLESS and not SERVED & REFUSED.keys() and not HARMLESS & REFUSED.keys()
    assert not named & HARMLESS_ARGUMENTS.keys()


def test_a_closed_pipeline_says_so(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    pipe = make(model, tokenizer)
    stream = pipe((P for _ in itertools.count()), max_new_tokens=300, eos_token_id=None)
    pipe.close()
    pipe.close()
    for use in (lambda: pipe(P), lambda: next(stream)):
        with pytest.raises(pagetide.EngineClosed):
            use()


def test_the_table_of_names_has_the_pipeline_s_arguments() -> None:
    """configs/migrating.yaml, of which the documents are made, says what the code does."""
    for kind, names in (("ignored", HARMLESS_ARGUMENTS), ("refused", REFUSED_ARGUMENTS)):
        told = {name for row in rows() if row.calls == ("pipeline",) and row.kind == kind for name in row.names}
        assert told == names.keys()

"""Tokenizers of GGUF files give the ids of those that they were made of, and of transformers' reading of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import tiny
from gguf_files import tokenizer_metadata, write, write_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagetide.engine import demo_model
from pagetide.engine.errors import CheckpointError, UnsupportedModel
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.gguf.file import read_gguf
from pagetide.engine.loading.gguf.tokenizer import generation_of
from pagetide.engine.loading.loader import load_tokenizer
from pagetide.engine.loading.models import ModelSpec, resolve_model, resolve_tokenizer

DEMO = Path(str(demo_model.__file__)).parent
TEXTS = [
    "Call me Ishmael.", "  two  spaces\n\n\nand lines\t", "I'll go, YOU'RE 12345 late: don't!",
    "caf\u00e9 \u4e16\u754c \U0001f30a e\u0301",
    "", " ", "<|eos|> in a text", "x = {'a': [1, 2.5]}  # end\r\n", "</s><s>[INST] hi [/INST]", "HTMLParser getURLs 2024-01-02",
]  # fmt: skip


def file_of(tmp_path: Path, metadata: dict[str, Any], architecture: str = "llama") -> Path:
    return write(tmp_path / "m.gguf", {"general.architecture": architecture, **metadata}, {})


def loaded(path: Path) -> Any:
    return load_tokenizer(ModelSpec("m", path, "a test"))


def sentencepiece(tmp_path: Path, *, gemma: bool) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    """A small vocabulary by sentencepiece's rules, and the metadata of its file, which has scores in place of merges."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = spaces if gemma else normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if gemma else None
    strip = [] if gemma else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*specials, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    text = (DEMO / "heldout.txt").read_text("utf-8")
    tokenizer.train_from_iterator([text[i : i + 80] for i in range(0, 40_000, 80)], trainer)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [2 if one == "<unk>" else 3 if one in specials else 6 if one.startswith("<0x") else 1 for one in tokens]
    bos, eos = (2, 1) if gemma else (1, 2)
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [float(-i) for i in range(len(tokens))], "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos, "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        **({"tokenizer.ggml.add_space_prefix": False} if gemma else {}),
    }  # fmt: skip
    names = {"unk_token": "<unk>", "bos_token": tokens[bos], "eos_token": tokens[eos]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names), metadata


def check_same(ours: Any, right: Any, *, begins: int | None = None) -> None:
    for text in TEXTS:
        ids = right.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == right.decode(ids)
        if begins is not None:
            assert ours.encode(text) == [begins, *ids]


def test_byte_level_with_merges(tmp_path: Path) -> None:
    right = PreTrainedTokenizerFast.from_pretrained(DEMO)
    ours = loaded(file_of(tmp_path, tokenizer_metadata(DEMO)))
    check_same(ours, right, begins=0)
    assert ours.chat_template == right.chat_template and (ours.bos_token, ours.eos_token) == (right.bos_token, right.eos_token)
    assert ours.name_or_path == str(tmp_path / "m.gguf")


@pytest.mark.parametrize("gemma", [False, True])
def test_sentencepiece_with_scores(gemma: bool, tmp_path: Path) -> None:
    right, metadata = sentencepiece(tmp_path, gemma=gemma)
    ours = loaded(file_of(tmp_path, metadata, "gemma3" if gemma else "llama"))
    check_same(ours, right, begins=metadata["tokenizer.ggml.bos_token_id"])


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "gpt-4o", "tekken"], ids=lambda rule: rule)
def test_rules_by_which_text_is_split(rule: str, tmp_path: Path) -> None:
    """transformers reads the same file. It does not compose text, as Qwen's own tokenizer does."""
    of_transformers = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = tokenizer_metadata(DEMO, rule)
    ours = loaded(file_of(tmp_path, metadata))
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if ".ggml." in key}
    right, _ = of_transformers.convert_gguf_tokenizer("qwen2", {**fields, "tokenizer_type": "gpt2", "pre_tokenizer_type": rule})
    for text in TEXTS:
        pieces = ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert pieces == right.pre_tokenizer.pre_tokenize_str(text), text


def test_digits_of_smollm(tmp_path: Path) -> None:
    ours = loaded(file_of(tmp_path, tokenizer_metadata(DEMO, "smollm")))
    pieces = [piece for piece, _ in ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 1984")]
    assert pieces == ["in", "\u0120", "1", "9", "8", "4"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tokenizer.ggml.pre": "jais"},
            "splits text by the rule 'jais', which is not known here; give the model's own as --token",
        ),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of kind 'bert', and gpt2 and llama are read"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "1 of 3 tokens twice"),
        ({"tokenizer.ggml.token_type": [1]}, "4,096 tokens, 1 kinds of them"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges that are not of its tokens"),
        ({"tokenizer.ggml.bos_token_id": 5000}, "bos_token_id 5000 of 4,096 tokens"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', which is of another type"),
    ],
)
def test_tokenizers_that_are_not_whole_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        loaded(file_of(tmp_path, tokenizer_metadata(DEMO) | change))


def test_a_file_without_a_tokenizer_serves_ids(tmp_path: Path) -> None:
    assert loaded(file_of(tmp_path, {})) is None
    assert resolve_tokenizer(file_of(tmp_path, {})) == tmp_path / "m.gguf"


def test_ends_and_sampling_of_the_file(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "word", "<|eot_id|>"]
    kinds = [3, 3, 3, 3, 3, 3, 1, 1]
    base = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.bos_token_id": 0}  # fmt: skip
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    found = generation_of(read_gguf(file_of(tmp_path, {**base, **sampling})))
    assert found == {"eos_token_id": [1, 2, 4, 5], "bos_token_id": 0, "do_sample": True, "temperature": 0.5, "top_k": 20}
    plain = {**base, "tokenizer.ggml.tokens": ["a", "b", "c", "<|end|>"], "tokenizer.ggml.token_type": [1, 3, 3, 3]}
    assert generation_of(read_gguf(file_of(tmp_path, {**plain, "tokenizer.ggml.eot_token_id": 2})))["eos_token_id"] == [1, 2, 3]


def test_a_checkpoint_has_the_ends_of_the_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "general.sampling.temp": 0.25}
    write_model(tiny("qwen3"), tmp_path / "m.gguf", lambda name, shape: "F32", metadata)
    checkpoint = Checkpoint.open(resolve_model(tmp_path / "m.gguf"))
    assert checkpoint.eos_token_ids == (7, 9) and checkpoint.default_sampling.temperature == 0.25

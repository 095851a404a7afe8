"""The bundled model is complete, small, loads with transformers alone, and is as good as its card says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

FOLDER = Path(__file__).resolve().parents[2] / "engine" / "demo_model"
FILES = {
    "README.md", "config.json", "generation_config.json", "heldout.txt", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip
# Measured by the training script, plus some 3 % for other versions of torch and other CPUs.
BITS_PER_BYTE_BOUND = 1.645

AWKWARD = [
    "", " ", "\n\n\n", "a  b   c \t\r\n d", " leading and trailing ",
    "Natásha, Schérer, Œuvre, naïve", "日本語とハングル 한국어 и кириллица",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 é \u200d\u200b\ufeff",
    "\x00\x01\x7f", "don't can't 'll  !!! ??? <|not a token|> 1234567890",
    "עברית \u202eright to left\u202c ﷺ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def card_figure(name: str) -> float:
    """Of a row of the card's table: bits per byte of heldout.txt."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| (\d+\.\d+) \| (\d+\.\d+) \|$", card, re.MULTILINE)
    return next(float(excerpts) for row, _, excerpts in rows if name in row)


def test_folder_is_complete_and_fits_a_repository() -> None:
    assert {path.name for path in FOLDER.iterdir() if not path.name.startswith("__")} == FILES
    assert sum((FOLDER / name).stat().st_size for name in FILES) <= 16 * 2**20


def test_weights_are_half_precision_and_of_a_small_llama() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    parameters = 0
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.float16, name
            assert torch.isfinite(tensor).all(), name
            parameters += tensor.numel()
    assert 5e6 <= parameters <= 10e6


def test_generation_config_can_end_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    config = GenerationConfig.from_pretrained(FOLDER)
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|eos|>")
    assert config.bos_token_id == tokenizer.bos_token_id
    assert config.do_sample
    assert config.max_new_tokens == 128


def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in AWKWARD:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in ids[1:]
        assert ids[1:] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids[1:]) == text


def test_tokenizer_is_fast_and_writes_conversations_as_scenes(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert tokenizer.is_fast
    messages = [{"role": "user", "content": "Who goes?"}, {"role": "assistant", "content": "A friend."}]
    scene = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert scene == "USER:\nWho goes?\n\nASSISTANT:\nA friend.\n\nASSISTANT:\n"
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.model_max_length == config["max_position_embeddings"] == 1024


def test_bits_per_byte_on_heldout_text_is_as_the_card_says(tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    bits, size = 0.0, 0
    passages = (FOLDER / "heldout.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n%%\n")
    assert len(passages) >= 3
    for passage in passages:
        ids = tokenizer(passage, return_tensors="pt")["input_ids"]
        assert ids.shape[1] <= 1024  # one window
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1]
        bits += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")) / math.log(2)
        size += len(passage.encode())
    assert size > 6000
    assert bits / size <= BITS_PER_BYTE_BOUND
    assert bits / size < 0.97 * card_figure("5-gram")
    assert bits / size == pytest.approx(card_figure("as shipped"), rel=0.01)

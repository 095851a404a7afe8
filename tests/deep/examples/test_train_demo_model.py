"""The training program of the demo model, end to end at a tiny size: what it writes, and what it keeps apart."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkout import ROOT, loaded
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagetide import cli

BUNDLED = ROOT / "engine" / "demo_model"
TINY = "--steps 40 --vocab 300 --hidden 32 --layers 1 --heads 2 --kv-heads 1 --intermediate 64 --context 64"
WORDS = ("the", "sea", "king", "wind", "whale", "prince", "said", "that", "old", "to", "of", "and", "night", "went")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(ROOT / "examples" / "train_demo_model.py")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 20 KB of random sentences in paragraphs."""
    rng = random.Random(1)
    paragraphs = [" ".join(rng.choices(WORDS, k=rng.randint(5, 30))).capitalize() + "." for _ in range(240)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(paragraphs), "utf-8")
    return path


def test_a_run_writes_a_model_of_the_bundled_form_and_the_same_one_again(
    script: ModuleType, text: Path, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    for name in ("first", "second"):
        script.main(["--text", str(text), "--out", str(tmp_path / name), "--tokens-per-step", "256", *TINY.split()])
    torch.set_num_threads(threads)
    folder = tmp_path / "first"
    names = {path.name for path in BUNDLED.iterdir() if not path.name.startswith("__")}
    assert {path.name for path in folder.iterdir()} == names
    for name in names - {"README.md"}:
        assert (folder / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    bundled = AutoTokenizer.from_pretrained(BUNDLED)
    assert model.dtype == torch.float16
    assert (len(tokenizer), tokenizer.model_max_length) == (model.config.vocab_size, 64)
    assert tokenizer.decode(tokenizer("Œuvre 🌊")["input_ids"], skip_special_tokens=True) == "Œuvre 🌊"
    assert (tokenizer.bos_token, tokenizer.eos_token) == (bundled.bos_token, bundled.eos_token)
    assert tokenizer.chat_template == bundled.chat_template
    excerpts = (folder / "heldout.txt").read_text("utf-8").removesuffix("\n").split("\n%%\n")
    assert excerpts and all(excerpt in text.read_text("utf-8") for excerpt in excerpts)
    (figures,) = re.findall(r"\(as shipped\) \| ([\d.]+) \| ([\d.]+) \|", (folder / "README.md").read_text("utf-8"))
    untrained = script.build_model(script.parse_args(["--text", str(text), *TINY.split()]), len(tokenizer))
    assert float(figures[1]) == pytest.approx(script.bits_per_byte(model.float(), tokenizer, excerpts), abs=0.01)
    assert float(figures[1]) < 0.8 * script.bits_per_byte(untrained, tokenizer, excerpts)
    assert cli.main(["plan", str(folder), "--device", "cpu"]) == 0


def test_the_split_is_disjoint_and_loses_nothing(script: ModuleType, text: Path) -> None:
    content = text.read_text("utf-8")
    train, heldout = script.split([content, content.upper()])
    assert len(heldout) == 2 and heldout[0] in content and heldout[1] in content.upper()
    kept = [paragraph for passage in (*train, *heldout) for paragraph in passage.split("\n\n")]
    assert sorted(kept) == sorted((content + "\n\n" + content.upper()).split("\n\n"))


def test_a_text_of_one_passage_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A few words.", "utf-8")
    with pytest.raises(SystemExit, match="error: the texts are too short: at least two passages"):
        script.main(["--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()

"""The training script of the demo model: interruptions change nothing, and its baseline is a proper distribution."""

from __future__ import annotations

import importlib.util
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_demo_model.py"
SETTINGS = {
    "steps": 300,
    "vocab": 300,
    "hidden": 32,
    "layers": 1,
    "heads": 2,
    "kv-heads": 1,
    "intermediate": 64,
    "context": 64,
    "short-context": 32,
    "tokens-per-step": 128,
    "validate-every": 100,
    "checkpoint-every": 20,
    "samples": 1,
    "sample-tokens": 8,
}
WORDS = ("the", "sea", "king", "wind", "whale", "prince", "said", "that", "old", "to", "of", "and", "night", "went")
PATIENCE = 60.0


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 10 KB of random sentences in paragraphs."""
    rng = random.Random(1)
    paragraphs = [" ".join(rng.choices(WORDS, k=rng.randint(5, 30))).capitalize() + "." for _ in range(120)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


def arguments(text: Path, folder: Path) -> list[str]:
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    return ["--text", str(text), "--work", str(folder / "work"), "--out", str(folder / "out"), *settings]


def start(text: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *arguments(text, folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "the training ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.stress
def test_interrupted_training_gives_the_weights_of_an_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    whole = start(text, tmp_path / "whole")
    checkpoint = tmp_path / "parts" / "work" / "checkpoint.pt"

    part = start(text, tmp_path / "parts")
    wait_for(checkpoint.exists, part)
    part.send_signal(signal.SIGINT)
    output, _ = part.communicate(timeout=PATIENCE)
    assert part.returncode == 130
    assert "the same command continues" in output

    before = checkpoint.stat().st_mtime_ns
    part = start(text, tmp_path / "parts")
    wait_for(lambda: checkpoint.stat().st_mtime_ns != before, part)
    part.kill()
    part.communicate(timeout=PATIENCE)
    assert part.returncode == -signal.SIGKILL

    part = start(text, tmp_path / "parts")
    output, _ = part.communicate(timeout=PATIENCE)
    assert part.returncode == 0
    assert "resuming at step" in output
    whole.communicate(timeout=PATIENCE)
    assert whole.returncode == 0
    for name in ("model.safetensors", "tokenizer.json", "heldout.txt"):
        assert (tmp_path / "whole/out" / name).read_bytes() == (tmp_path / "parts/out" / name).read_bytes(), name


def test_a_run_with_other_settings_is_refused(script: ModuleType, text: Path, tmp_path: Path) -> None:
    args = script.parse_args(arguments(text, tmp_path))
    script.claim_work(args.work, script.settings_of(args, ["some text"], 400), by_minutes=False)
    args.lr = 0.5
    with pytest.raises(SystemExit, match=r"different settings.*lr is 0\.0015 there and 0\.5 here"):
        script.claim_work(args.work, script.settings_of(args, ["some text"], 400), by_minutes=False)
    args.lr = 0.0015
    with pytest.raises(SystemExit, match="text_sha256"):
        script.claim_work(args.work, script.settings_of(args, ["another text"], 400), by_minutes=False)


def test_the_split_is_disjoint_and_loses_nothing(script: ModuleType, text: Path) -> None:
    content = text.read_text(encoding="utf-8")
    split = script.split_texts([content], seed=0)
    pieces = [p for passages in (split.train, split.validation, split.heldout) for p in passages]
    paragraphs = [paragraph for piece in pieces for paragraph in piece.split("\n\n")]
    assert sorted(paragraphs) == sorted(content.split("\n\n"))
    assert split.validation
    assert split.heldout


def test_the_5gram_is_a_probability_distribution_after_any_context(script: ModuleType) -> None:
    rng = np.random.default_rng(0)
    vocab = 40
    documents = [np.concatenate([[0], rng.zipf(1.5, 60).clip(2, vocab - 1), [1]]) for _ in range(30)]
    model = script.KneserNey(documents, vocab)
    model.tune(documents[:3])
    for context in ([0], [0, 2], documents[4][:4], documents[5][:9], [0, 39, 38, 37, 36, 35]):
        total = sum(model.probabilities(np.array([*context, token]))[-1] for token in range(1, vocab))
        assert total == pytest.approx(1.0)


def test_repetition_counts_runs(script: ModuleType) -> None:
    assert script.most_repeated(list("abcdefgh")) == 1
    assert script.most_repeated(["a"] * 11) == 4
    assert script.most_repeated([]) == 0

"""Sessions with six small models of one server that has memory for two and a half: `Turns`, for a deep test and `make soak`.

PYTHONPATH=tests python -m models_in_turn [--seconds 600] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from checkout import ROOT
from safetensors.torch import load_file, save_file
from servers import ServerProcess

from pagetide import LLM, SamplingParams

NAMES = ("blue", "fin", "grey", "minke", "right", "sperm")
PINNED = "blue"
SEEDS = 2
TOKENS = 400
CLIENTS = 10
RESIDENT_S = 1.0
ENGINE = {"device": "cpu", "dtype": "float32", "kv_memory": "8MiB", "share": False, "max_seqs": 4}
DEMO = ROOT / "engine" / "demo_model"


def make_models(folder: Path) -> None:
    """Six models that write different texts."""
    for number, name in enumerate(NAMES):
        shutil.copytree(DEMO, folder / name)
        weights = {key: one.float() for key, one in load_file(folder / name / "model.safetensors").items()}
        noise = torch.Generator().manual_seed(number)
        for key, one in weights.items():
            if "norm" in key:
                one += 0.05 * torch.randn(one.shape, generator=noise)
        save_file(weights, folder / name / "model.safetensors", {"format": "pt"})


def outputs_alone(folder: Path) -> dict[str, list[str]]:
    """What each model writes, by seed, if it is alone."""
    found = {}
    for name in NAMES:
        with LLM(str(folder / name), **ENGINE) as llm:
            params = [SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=i, ignore_eos=True) for i in range(SEEDS)]
            found[name] = [one.text for one in llm.generate(["The sea"] * SEEDS, params, progress=False)]
    return found


def arguments(folder: Path) -> list[str]:
    """Of the server."""
    one = (folder / PINNED / "model.safetensors").stat().st_size
    engine = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if name != "share"]
    memory = ["--models-memory", str(int(2.5 * one)), "--min-resident-s", str(RESIDENT_S), "--pinned", PINNED]
    return ["--models-dir", str(folder), "--no-share", "--host-kv-memory", "8MiB", *engine, *memory]


class Turns:
    """Requests of several clients until `seconds` are over, each for a model that is drawn by Zipf's law.

    Attributes:
        counts: Requests, by model.
        wrong: What was not as it is for a model alone.
        departures: What `/running` said of models that left for others, by name and time.
    """

    def __init__(self, server: ServerProcess, expected: dict[str, list[str]], seconds: float, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.departures: dict[tuple[str, float], dict[str, Any]] = {}
        self._server, self._expected = server, expected
        self._until = time.monotonic() + seconds
        self._lock = threading.Lock()
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            clients = [pool.submit(self._client, seed * CLIENTS + number) for number in range(CLIENTS)]
            while not all(one.done() for one in clients):
                self._look()
                time.sleep(RESIDENT_S / 5)
            for one in clients:
                one.result()
        self._look()

    def _look(self) -> None:
        for one in httpx2.get(f"{self._server.url}/running", timeout=60).json()["running"]:
            if (left := one["unloaded_for"]) is not None:
                self.departures[one["model"], left["at"]] = left

    def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        ranks = [1 / (rank + 1) for rank in range(len(NAMES))]
        while time.monotonic() < self._until:
            (name,) = rng.choices(NAMES[::-1], ranks)  # the pinned one least
            which = rng.randrange(SEEDS)
            body = {"model": name, "prompt": "The sea", "max_tokens": TOKENS, "seed": which, "temperature": 1.0}
            try:
                text = self._text(body | {"ignore_eos": True, "stream": rng.random() < 0.5})
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            with self._lock:
                self.counts[name] += 1
                if text != self._expected[name][which]:
                    self.wrong.append(f"{name}, seed {which}: {text!r:.300}")

    def _text(self, body: dict[str, Any]) -> str:
        if body["stream"]:
            events = list(self._server.events("/v1/completions", json=body))
            assert "error" not in events[-1], events[-1]
            return "".join(choice["text"] for event in events for choice in event["choices"])
        answer = httpx2.post(f"{self._server.url}/v1/completions", json=body, timeout=300)
        return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else answer.text

    def failures(self) -> list[str]:
        """What is not as it should be: answers, a model that left within its minimum residency, a pinned one that left."""
        left = [(name, one["resident_s"]) for (name, _), one in self.departures.items()]
        early = [f"{name} left after {seconds} s" for name, seconds in left if seconds < RESIDENT_S]
        return [*self.wrong, *early, *(f"{name} is pinned, and left" for name, _ in left if name == PINNED)]

    @property
    def num_turns(self) -> int:
        """How often a busy model made way, as far as it was seen."""
        return sum(one["num_suspended"] > 0 for one in self.departures.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder / "models")
        with ServerProcess(arguments(folder / "models"), folder / "log", OMP_NUM_THREADS="1") as server:
            turns = Turns(server, outputs_alone(folder / "models"), args.seconds, args.seed)
    print(f"{turns.counts.total()} requests, {len(turns.departures)} departures, {turns.num_turns} of busy models")
    for failure in turns.failures():
        print(failure)
    return 1 if turns.failures() else 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the environments of OpenVINO GenAI and llama.cpp and their models.

    python -m benchmarks.peers.make DIR

About 25 minutes and 25 GB: llama.cpp is compiled for this processor, which needs cmake and a C++ compiler. What is complete is
kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.load import save_model, save_qwen2, save_qwen3, save_qwen3_5
from benchmarks.peers import swapping
from benchmarks.peers.protocol import ROOT

POSITIONS = 4096
TORCH = "torch==2.13.0"  # first and bounding the others: a later one may come as a build for CUDA
# Each line is one call of pip. optimum-intel wants torchvision, which it does not use here and which replaces torch.
PACKAGES = {
    "openvino": [
        [TORCH],
        [
            TORCH, "openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0",
            "transformers==5.5.4", "nncf==3.4.0", "requests", "setuptools",
        ],
        ["--no-deps", "optimum==2.3.0", "optimum-intel==2.2.0"],
    ],
    "llama_cpp": [["llama-cpp-python[server]==0.3.36", "gguf==0.19.0"]],
}  # fmt: skip


def make_environment(folder: Path, calls: list[list[str]]) -> None:
    """A virtual environment with packages. A file in it says that it is complete."""
    complete = folder / "complete"
    if complete.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
    for packages in calls:
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", *packages], env=environment, check=True)
    complete.touch()


# The types of weights that a model is served in; those of 8 and 4 bits are each engine's own forms.
MODELS = {
    "llama": ("float32", "bfloat16"), "qwen2": ("float32", "bfloat16"), "qwen3-0.6b": ("int8", "int4"),
    "qwen3-1.7b": ("int8", "int4"), "qwen3.5": ("float32",),
}  # fmt: skip
IN_TURN = {f"in-turn/{name}": ("bfloat16",) for name in swapping.MODELS}  # llama.cpp's alone


def save_models(folder: Path, layers: int | None = None, hidden: int | None = None) -> None:
    """The models in transformers' format that are not there; `layers` and `hidden` replace those of all."""
    for save, name, width, depth, seed in (
        (save_model, "llama", 512, 8, 0),
        (save_qwen2, "qwen2", 1024, 24, 0),
        (save_qwen3, "qwen3-0.6b", 1024, 28, 0),
        (save_qwen3, "qwen3-1.7b", 2048, 28, 0),
        (save_qwen3_5, "qwen3.5", 1024, 8, 0),
        *((save_qwen2, name, 1024, 24, seed) for seed, name in enumerate(IN_TURN)),
    ):
        if not (folder / name).exists():
            part = (folder / name).with_suffix(".part")
            save(part, hidden or width, layers or depth, seed, POSITIONS)
            if name in IN_TURN:  # a server writes texts
                AutoTokenizer.from_pretrained(str(ROOT / "engine" / "demo_model")).save_pretrained(part)
            part.rename(folder / name)


def write_engines(folder: Path, engines: dict[str, tuple[str, str]]) -> None:
    """Write which Python runs which module for each engine."""
    content = {name: {"python": python, "module": module} for name, (python, module) in engines.items()}
    (folder / "engines.json").write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, metavar="DIR")
    folder = parser.parse_args(argv).dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    save_models(folder / "models")
    engines = {}
    for name, calls in PACKAGES.items():
        make_environment(folder / name, calls)
        python = str(folder / name / "bin" / "python")
        for model, types in (MODELS | (IN_TURN if name == "llama_cpp" else {})).items():
            command = [python, "-m", f"benchmarks.peers.convert_{name}", str(folder / "models" / model), *types]
            subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        engines[name] = python, f"benchmarks.peers.{name}_server"
    write_engines(folder, engines)


if __name__ == "__main__":
    main()

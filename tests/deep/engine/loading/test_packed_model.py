"""The memory of a process that packs a model as it is loaded."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from stored_checkpoints import AWQ

from benchmarks.stored_weights import awq, checkpoint
from pagetide import native
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.models import ModelSpec


def saved(folder: Path, **options: Any) -> Checkpoint:
    model = tiny("qwen2", **options).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return Checkpoint.open(ModelSpec("tiny", folder, "a test"))


def where_memory_tells(test: Any) -> Any:
    """Skip a test where memory does not tell what was packed."""
    has_mark = Path("/proc/self/clear_refs").exists() and hasattr(ctypes.CDLL(None), "mallinfo2")
    test = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")(test)
    return pytest.mark.skipif(not has_mark, reason="the system keeps no high-water mark, or its heap tells nothing")(test)


PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
from pagetide import LLM

class Heap(ctypes.Structure):  # struct mallinfo2
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap

def allocated():
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd

def size(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

def mapped(file):
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = file in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total

def load(folder):
    options = json.loads(sys.argv[3])
    return LLM(folder, device="cpu", kv_memory="1MiB", max_seqs=4, max_model_len=64, share=False, **options)

load(sys.argv[1]).close()
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before, allocated_before = size("VmRSS"), allocated()
with load(sys.argv[2]) as llm:
    gc.collect()
    found = {"stays": allocated() - allocated_before, "mapped": mapped(sys.argv[2]), "peak": size("VmHWM") - before}
    found |= {"kept": mapped(".weights"), "resident": size("VmRSS") - before}
    print(json.dumps({**found, **llm.stats()}))
"""


def loaded(folder: Path, environ: dict[str, str] | None = None, **options: str) -> dict[str, Any]:
    """What the program says of the checkpoints `small` and `model` in `folder`: what stays allocated on the heap, pages of the
    file and of the disk cache that are mapped, and what was resident, at the end and at most.

    What is resident at the end tells less: free pages in the heaps of threads that read count there, and how they share the
    reading depends on what else the machine does.
    """
    command = [sys.executable, "-P", "-c", PROGRAM, str(folder / "small"), str(folder / "model"), json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@where_memory_tells
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_little_more_memory_than_stays(tmp_path: Path, dtype: str) -> None:
    """In a process of its own: 60 MiB of weights in bfloat16, a sixth of them tied. Buffers of the engine are 3 MiB."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "vocab_size": 1 << 13}
    saved(tmp_path / "small")
    whole = saved(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=4, **sizes)
    found = loaded(tmp_path, dtype=dtype)
    weights = whole.weights_bytes(dtype)
    assert weights == found["weights_bytes"] > 50 << 20
    assert weights < found["stays"] < weights + (6 << 20)
    assert found["mapped"] < 1 << 20
    assert found["peak"] < 1.15 * found["stays"] + (24 << 20)


@where_memory_tells
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_second_start_holds_packed_weights_in_the_file_alone(tmp_path: Path, quantization: str | None) -> None:
    """Also those that are merged. Before, when they are made, little is held besides."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "vocab_size": 1 << 13}
    saved(tmp_path / "small", hidden_size=256, intermediate_size=1024)
    saved(tmp_path / "model", tie_word_embeddings=False, num_hidden_layers=6, **sizes)
    environ = {"PAGETIDE_CACHE_SIZE": "1GiB", "XDG_CACHE_HOME": str(tmp_path)}
    options = {"dtype": "bfloat16"} | ({} if quantization is None else {"quantization": quantization})
    first, second = (loaded(tmp_path, environ, **options) for _ in range(2))
    weights, embedding = first["weights_bytes"], 2 * 768 << 13
    assert first["kept"] == 0 and weights < first["resident"] < weights + (24 << 20)
    assert abs(second["kept"] + embedding - weights) < 1 << 20
    assert second["stays"] < 6 << 20 and second["resident"] < weights + (16 << 20)


@where_memory_tells
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_little_more_memory_of_a_quantized_checkpoint(tmp_path: Path, dtype: str) -> None:
    """In a process of its own: three quarters of the bytes are an embedding, which is tied to the output head."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "vocab_size": 1 << 15}
    saved(tmp_path / "small")
    model = tiny("qwen2", tie_word_embeddings=True, num_hidden_layers=4, **sizes).to(torch.float16)
    model.config.dtype = torch.float16
    checkpoint(model, tmp_path / "model", AWQ | {"group_size": 128}, awq(128))
    found = loaded(tmp_path, dtype=dtype)
    weights = found["weights_bytes"]
    assert weights > 80 << 20
    assert 0.98 * weights < found["stays"] < weights + (6 << 20)
    assert found["mapped"] < 1 << 20
    # a part of the head, or a piece of a weight, is 16 MiB or more, and one that was freed may stay with the process
    assert found["peak"] < 1.15 * found["stays"] + (40 << 20)

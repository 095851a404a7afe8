"""`LLM` as a guest in another program: in a process of its own, and what its memory comes to over many runs."""

from __future__ import annotations

import functools
import gc
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from async_rig import run_threads, switched_every
from transformers.utils.logging import is_progress_bar_enabled

from pagetide import LLM, SamplingParams

MIB = 1 << 20


MANNERS = """
import json, logging, sys, threading
import torch
def settings():
    return [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), str(torch.get_default_device()), torch.initial_seed(),
            torch.get_rng_state().tolist(), torch.backends.mkldnn.enabled, torch.backends.cuda.matmul.allow_tf32]
torch.manual_seed(5)
before = settings()
import pagetide
from pagetide import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", kv_memory="1MiB") as llm:
    outputs = llm.generate(["the tide", [5, 6]], SamplingParams(max_new_tokens=5, temperature=1.0, seed=1))
    list(llm.stream("the tide", SamplingParams(max_new_tokens=5)))
    logger = logging.getLogger("pagetide")
    report = {
        "same": settings() == before,
        "tokens": [o.token_ids for o in outputs],
        "handlers": [len(logging.getLogger().handlers), len(logger.handlers), logger.level],
    }
report["threads"] = [type(thread).__name__ for thread in threading.enumerate()]
open(sys.argv[2], "w").write(json.dumps(report))
"""


def test_a_guest_in_another_program(tmp_path: Path):
    """In a fresh process: nothing printed, no torch setting and no random state changed, no log handler, no thread left."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-P", "-c", MANNERS, "demo", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    with LLM("demo", device="cpu", kv_memory=MIB) as llm:
        params = SamplingParams(max_new_tokens=5, temperature=1.0, seed=1)
        expected = [output.token_ids for output in llm.generate(["the tide", [5, 6]], params)]
    assert json.loads(file.read_text()) == {"same": True, "tokens": expected, "handlers": [0, 0, 0], "threads": ["_MainThread"]}


def test_memory_stays_where_it_is():
    """RSS over 20 runs, and over 10 engines built and closed."""
    rss = psutil.Process().memory_info
    llm = LLM("demo", device="cpu", kv_memory=2 * MIB, max_model_len=96)
    prompts = [np.random.default_rng(i).integers(2, 4096, 5 + 4 * i).tolist() for i in range(12)]
    params = [
        SamplingParams(max_new_tokens=10, temperature=float(i % 2), repetition_penalty=1.1, stop=["never", "ever"])
        for i in range(12)
    ]

    def run() -> None:
        llm.generate(prompts, params)
        chunks = llm.stream(prompts, params, stream_interval=2)
        for _ in range(9):
            next(chunks)
        chunks.close()

    for _ in range(3):
        run()
    gc.collect()
    before = rss().rss
    for _ in range(20):
        run()
    gc.collect()
    assert (rss().rss - before) / 20 <= MIB
    assert (llm.stats()["running"], llm.stats()["blocks"]["live"]) == (0, 0)
    llm.close()

    def build() -> None:
        with LLM("demo", device="cpu", kv_memory="32MiB") as other:
            other.generate([5, 6], SamplingParams(max_new_tokens=2))

    build()
    before = rss().rss
    for _ in range(10):
        build()
    assert (rss().rss - before) / 10 <= MIB


def test_engines_are_loaded_at_the_same_time_and_while_another_works(capfd):
    """Loading changes torch's default type for a while, and probing transformers' registries: no other thread sees it."""
    logger, short = logging.getLogger("transformers"), SamplingParams(max_new_tokens=3, temperature=0)

    def settings() -> tuple[Any, ...]:
        return torch.get_default_dtype(), logger.handlers[:], logger.propagate, is_progress_bar_enabled()

    def loads(dtype: str) -> None:
        for _ in range(4):
            with LLM("demo", device="cpu", kv_memory=MIB, dtype=dtype) as other:
                (output,) = other.generate([5, 6], short)
                assert dtype != "float32" or output.token_ids == expected[0][:3]

    def works() -> None:
        for _ in range(4):
            assert [output.token_ids for output in llm.generate(prompts, params)] == expected

    prompts, params = [[5, 6], [7]], SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    before = settings()
    with LLM("demo", device="cpu", kv_memory=MIB, dtype="float32") as llm, switched_every(1e-4):
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        try:
            run_threads(works, *(functools.partial(loads, dtype) for dtype in ("float32", "bfloat16", "float32")))
            assert settings() == before
            assert capfd.readouterr() == ("", "")
        finally:  # the other tests are not to suffer
            torch.set_default_dtype(before[0])
            logger.handlers[:], logger.propagate = before[1], before[2]


# The calls of vLLM's offline quick start, in their order; two lines differ from it.
QUICK_START = """
from pagetide import LLM, SamplingParams  # from vllm

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="demo")  # facebook/opt-125m
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"{prompt!r}: {generated_text!r}")
"""


def test_the_quick_start_of_vllm_runs_with_two_lines_changed(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(QUICK_START, names)
    names["llm"].close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [repr(prompt) for prompt in names["prompts"]]
    assert all(output.outputs[0].text and output.finish_reason for output in names["outputs"])

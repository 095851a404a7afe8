"""`pagetide serve FILE.gguf`: a real server over a GGUF file, with nothing beside it, answers a conversation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
from families import tiny
from gguf_files import tokenizer_metadata, write_model
from servers import ServerProcess

from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model

DEMO = Path(str(demo_model.__file__)).parent
MESSAGES = [{"role": "user", "content": "Who goes there?"}]


def kind_of(name: str, shape: tuple[int, ...]) -> str:
    return "Q6_K" if name in ("token_embd.weight", "output.weight") or "ffn_down" in name else "Q4_K"


def test_a_chat_with_a_file_shaped_as_qwen3(tmp_path: Path) -> None:
    model = tiny("qwen3", vocab_size=4096, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
    plain = write_model(model, tmp_path / "m.gguf", kind_of, tokenizer_metadata(DEMO))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, plain)
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    with LLM(plain, device="cpu", dtype="float32", kv_memory=1 << 22, share=False) as llm:
        expected = llm.chat(MESSAGES, SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].text
    alone = tmp_path / "alone"
    alone.mkdir()
    file = (tmp_path / "m.gguf").rename(alone / "m.gguf")
    options = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "4MiB", "--served-model-name", "qwen"]
    with ServerProcess([str(file), *options], tmp_path / "log", OMP_NUM_THREADS="1") as server:
        body = {"model": "qwen", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == expected, server.said
        assert answer["usage"]["prompt_tokens"] > 4


def test_the_plan_and_a_refusal_of_the_command(tmp_path: Path) -> None:
    write_model(
        tiny("qwen3", hidden_size=256, intermediate_size=256, num_attention_heads=8, head_dim=32), tmp_path / "m.gguf", kind_of
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "pagetide", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    plan = run("plan", str(tmp_path / "m.gguf"))
    assert plan.returncode == 0 and "in gguf" in plan.stdout, plan.stderr
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:-100])
    refused = run("serve", str(tmp_path / "m.gguf"))
    assert refused.returncode == 2 and "is not a complete GGUF file" in refused.stderr and "Traceback" not in refused.stderr

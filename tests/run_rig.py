"""`pagetide run` in this process over the one engine of a module: what it reads, says and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide import LLM
from pagetide.cli import main
from pagetide.engine import llm as llm_module
from pagetide.engine.loading.models import BUILT_IN_FILE

CONFIGS = BUILT_IN_FILE.parent
SHORT = ["--max-new-tokens", "6"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if polite %}Sir, {% endif %}"


@pytest.fixture(name="talker", scope="module")
def talker_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo model, with a chat template; a models file says so, and serves every test of this module."""
    models = tmp_path_factory.mktemp("models") / "models.yaml"
    folder = CONFIGS.parent / "engine" / "demo_model"
    models.write_text(json.dumps({"talk": {"path": str(folder), "tokenizer": {"chat_template": TEMPLATE}}}), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGETIDE_CONFIG", str(models))
        with LLM("talk", device="cpu", kv_memory="32MiB", max_seqs=4) as llm:
            yield llm


@pytest.fixture(name="served")
def served_fixture(talker: LLM, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of `LLM(...)`: hands out the one engine of these tests, and takes down what was asked for."""
    served = SimpleNamespace(llm=talker, told={})

    def opened(model: str, **options: Any) -> Any:
        served.told = {"model": model, **options}
        return nullcontext(served.llm)

    monkeypatch.setattr(llm_module, "LLM", opened)
    return served


@pytest.fixture(name="run")
def run_fixture(served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs the command over lines of text; tells its status, what it said, and the records."""

    def go(lines: str | list[str] | None = None, *more: str, name: str = "in.jsonl") -> SimpleNamespace:
        source, target = tmp_path / name, tmp_path / "out.jsonl"
        if lines is not None:
            source.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n", "utf-8")
        status = main(["run", "--model", "talk", "--input", str(source), "--output", str(target), *SHORT, *more])
        out, err = capsys.readouterr()
        content = target.read_bytes() if target.exists() else b""
        records = [json.loads(line) for line in content.splitlines()]
        return SimpleNamespace(status=status, out=out, err=err, content=content, records=records, path=target)

    return go

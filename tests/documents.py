"""Blocks of code in README and the documents, the commands in them, and how they run (tests/front/test_documents.py)."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagetide import cli, vram_monitor
from pagetide.engine.loading.models import BUILT_IN_FILE, CONFIG_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
# README.zh-CN.md has the blocks of README: tests/structure/test_readme.py.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<mark><!-- not run: .+? -->\s+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FOREIGN = ("# transformers\n", "# vLLM\n", "# MindFormers\n")
SETTINGS, KEYS, FLEET, MONITOR, CLIENT = "# serve.yaml", "# keys.yaml", "# fleet.yaml", "# vram-monitor.yaml", "# client\n"
SERVER = "http://127.0.0.1:8000"
EMPTY_PATHS = ("/health", "/live", "/sleep", "/unload", "/wake_up")  # answered with a status alone
LANGUAGES = {"python", "yaml", "text", ""}
RUN = ("generate", "models", "plan", "run")  # commands of pagetide that are quick
DOWNLOADED = "Qwen/Qwen3-0.6B"  # commands with it are parsed, and a client that names it is served by the demo model
PLACEHOLDER = re.compile(rf"^([A-Z]+|\$.*|{DOWNLOADED})$")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, with the place of its fence."""

    document: Path
    line: int
    language: str
    text: str
    is_marked: bool

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text("utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        yield Block(document, line, match["language"], match["text"], match["mark"] is not None)


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and not block.is_marked]


def commands(text: str) -> Iterator[str]:
    """The commands of a block: one on a line, but a line goes on after a backslash and within quotes."""
    command = ""
    for line in text.replace("\\\n", " ").splitlines():
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:  # an open quote
            command += "\n"
            continue
        if command.strip() and not command.startswith("#"):
            yield command
        command = ""
    assert not command.strip(), f"a quote is open: {command!r}"


CLIENTS = [block for block in of("python") if block.text.startswith(CLIENT)]
PYTHON = [block for block in of("python") if not block.text.startswith((*FOREIGN, CLIENT))]
FIRST_STEPS = [block for block in PYTHON if block.document.name == "getting-started.md"][:2]  # run in the quick tier
MODELS = [block for block in of("yaml") if not block.text.startswith((SETTINGS, KEYS, FLEET, MONITOR))]
ALL_COMMANDS = [(block, command) for block in of("") for command in commands(block.text)]
CURLS = [
    pytest.param(text, id=f"{block} {text}")
    for block, text in ALL_COMMANDS
    if text.startswith("curl ") and SERVER.removeprefix("http://") in text
]


def run_python(some: list[Block]) -> None:
    if any("json_schema=" in block.text for block in some):
        pytest.importorskip("llguidance")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in some:
        exec(compile("\n" * block.line + block.text, str(block.document), "exec"), names)


def parse(command: str) -> list[str]:
    """The words of a command line, if it is one that exists. Raises SystemExit or AssertionError."""
    words = shlex.split(command, comments=True)
    for end in ("&&", "|"):
        words = words[: words.index(end)] if end in words else words
    match words[0].removeprefix(".venv/bin/"), words[1:]:
        case "pagetide", arguments:
            cli._parser().parse_args(arguments)
        case "vram-monitor", arguments:
            vram_monitor.parser().parse_args(arguments)
        case "make", arguments:
            targets = [word for word in arguments if "=" not in word]
            makefile = (ROOT / "Makefile").read_text("utf-8")
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), command
        case "python" | "python3", ["-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            known = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert known or importlib.util.find_spec(module), command
        case (("git" | "pip" | "docker" | "curl" | "kill" | "source" | "hf"), _):
            pass
        case _:
            raise AssertionError(f"not a command of pagetide: {command!r}; mark output and diagrams as ```text")
    return words


QUICK_COMMANDS = [
    (block, words)
    for block, words in ((block, shlex.split(command, comments=True)) for block, command in ALL_COMMANDS)
    if words[0] == "pagetide" and words[1] in RUN and not any(PLACEHOLDER.match(word) for word in words)
]


def ask(command: str, url: str) -> str:
    """The body of the answer to a `curl` command, asked of the server at `url` instead. Raises AssertionError."""
    words = parse(command.replace(DOWNLOADED, "demo"))
    words = [word.replace(SERVER, url).replace(SERVER.removeprefix("http://"), url) for word in words]
    (target,) = (word for word in words if word.startswith(url))
    run = subprocess.run(
        [*words, "--fail", "--no-progress-meter", "--max-time", "120", "--write-out", "\n%{http_code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    body, _, status = run.stdout.rpartition("\n")
    assert (run.returncode, status) == (0, "200"), f"{command}: {run.stdout}{run.stderr}"
    assert body.strip() or target.removeprefix(url).partition("?")[0] in EMPTY_PATHS, f"{command}: nothing came"
    return body


@pytest.fixture
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the documents name, into which commands may write; and the first models file that they show."""
    shutil.copytree(BUILT_IN_FILE.parent, tmp_path / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "prompts.txt").write_text("Call me\n")
    (tmp_path / "models.yaml").write_text(MODELS[0].text, "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "models.yaml"))
    monkeypatch.chdir(tmp_path)

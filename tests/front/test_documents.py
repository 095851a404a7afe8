"""The code in README and the documents runs as it stands, and the commands there are commands.

What the language of a block says:

    python    run: in README each block by itself, in other documents one after the other
    yaml      a models file, read as PAGETIDE_CONFIG
    none      a command on each line, parsed; those of RUN are run too
    text      output or a diagram

Blocks for the server say so in their first line: YAML that begins with `# serve.yaml` or `# keys.yaml` is read as its settings
or its keys (`# fleet.yaml`: as a fleet's settings), and Python that begins with `# client` runs against a real server of the
demo model. So does every `curl` command that asks 127.0.0.1:8000.

Exceptions, which are counted: Python blocks that begin with `# transformers` or `# vLLM` show other libraries, and blocks
below `<!-- not run: why -->` need what no test has.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from servers import ServerProcess

from pagetide import cli, vram_monitor
from pagetide.engine.config import EngineConfig
from pagetide.engine.loading.models import BUILT_IN_FILE, CONFIG_VARIABLE
from pagetide.monitor import watch

ROOT = Path(__file__).resolve().parents[2]
# README.zh-CN.md has the blocks of README: tests/structure/test_readme.py.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?P<mark><!-- not run: .+? -->\s+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
FOREIGN = ("# transformers\n", "# vLLM\n")
SETTINGS, KEYS, FLEET, CLIENT = "# serve.yaml", "# keys.yaml", "# fleet.yaml", "# client\n"
SERVER = "http://127.0.0.1:8000"
EMPTY_PATHS = ("/health", "/sleep", "/wake_up")  # answered with a status alone
LANGUAGES = {"python", "yaml", "text", ""}
DEMO = BUILT_IN_FILE.parent.parent / "engine" / "demo_model"
RUN = ("generate", "models", "plan", "run")  # commands of pagetide that are quick
PLACEHOLDER = re.compile(r"^([A-Z]+|\$.*)$")


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
MODELS = [block for block in of("yaml") if not block.text.startswith((SETTINGS, KEYS, FLEET))]
ALL_COMMANDS = [(block, command) for block in of("") for command in commands(block.text)]
COMMANDS = [pytest.param(text, id=f"{block} {text.partition(' #')[0].strip()}") for block, text in ALL_COMMANDS]
CURLS = [
    pytest.param(text, id=f"{block} {text}")
    for block, text in ALL_COMMANDS
    if text.startswith("curl ") and SERVER.removeprefix("http://") in text
]


@pytest.fixture(scope="module", autouse=True)
def _one_monitor() -> Iterator[None]:
    with watch(timeout_s=60):
        yield


@pytest.fixture
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the documents name, into which commands may write; and the models file of README."""
    shutil.copytree(BUILT_IN_FILE.parent, tmp_path / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "prompts.txt").write_text("Call me\n")
    models = [block.text for block in MODELS if block.document.name == "README.md"]
    text = "\n".join(models).replace("/path/to/pagetide/engine/demo_model", str(DEMO))
    (tmp_path / "models.yaml").write_text(text, "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "models.yaml"))
    monkeypatch.chdir(tmp_path)


def run_python(some: list[Block]) -> None:
    if any("json_schema=" in block.text for block in some):
        pytest.importorskip("llguidance")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in some:
        exec(compile("\n" * block.line + block.text, str(block.document), "exec"), names)


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize("block", [block for block in PYTHON if block.document == DOCUMENTS[0]], ids=str)
def test_a_block_of_readme_runs_by_itself(block: Block) -> None:
    run_python([block])


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize(
    "document",
    sorted({block.document for block in PYTHON if block.document != DOCUMENTS[0]}),
    ids=lambda document: document.name,
)
def test_the_blocks_of_a_document_run_in_order(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python([block for block in PYTHON if block.document == document])
    assert capsys.readouterr().out


@pytest.mark.parametrize("block", MODELS, ids=str)
def test_a_models_file_is_read(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.yaml").write_text(block.text, "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "models.yaml"))
    assert cli.main(["models"]) == 0
    listed = capsys.readouterr().out
    names = re.findall(r"^(\w[\w-]*):", block.text, re.MULTILINE)
    assert names and all(name in listed for name in names)


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
        case (("git" | "pip" | "docker" | "curl" | "kill"), _):
            pass
        case _:
            raise AssertionError(f"not a command of pagetide: {command!r}; mark output and diagrams as ```text")
    return words


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_and_runs_if_it_is_quick(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = parse(command)
    if words[0] == "pagetide" and words[1] in RUN and not any(PLACEHOLDER.match(word) for word in words):
        assert cli.main(words[1:]) == 0
        assert capsys.readouterr().out


# ---- the server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    pytest.importorskip("fastapi")
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ["demo", "--device", "cpu", "--dtype", "float32", "--kv-memory", "16MiB", "--no-share"]
    with ServerProcess(arguments, log, OMP_NUM_THREADS="1") as server:
        yield server


def setting_blocks(mark: str) -> list[Block]:
    return [block for block in of("yaml") if block.text.startswith(mark)]


def parse_title(block: Block) -> None:
    """The command after the name in `# serve.yaml: pagetide serve --config serve.yaml`, if there is one."""
    _, _, command = block.text.partition("\n")[0].partition(": ")
    if command:
        parse(command)


@pytest.mark.parametrize("block", setting_blocks(SETTINGS), ids=str)
def test_settings_of_the_server_are_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from pagetide.server.config import ServeConfig
    from pagetide.server.keys import read_keys

    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text(block.text, "utf-8")
    (tmp_path / "keys.yaml").write_text(setting_blocks(KEYS)[0].text, "utf-8")
    config = ServeConfig.resolve({}, {}, tmp_path / "serve.yaml")
    read_keys(config.api_key_file, {})
    for model in config.models:
        EngineConfig.resolve(model.reference, **dict(model.engine))
    parse_title(block)


@pytest.mark.parametrize("block", setting_blocks(FLEET), ids=str)
def test_settings_of_a_fleet_are_accepted(block: Block, tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    from pagetide.fleet.config import FleetConfig

    (tmp_path / "fleet.yaml").write_text(block.text, "utf-8")
    config = FleetConfig.read(tmp_path / "fleet.yaml")
    EngineConfig.resolve("demo", **dict(config.engine))


@pytest.mark.parametrize("block", setting_blocks(KEYS), ids=str)
def test_keys_of_the_server_are_accepted(block: Block, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from pagetide.server.keys import read_keys

    (tmp_path / "keys.yaml").write_text(block.text, "utf-8")
    assert read_keys(tmp_path / "keys.yaml", {}).has_users
    parse_title(block)


@pytest.mark.parametrize("block", CLIENTS, ids=str)
def test_a_client_is_answered(block: Block, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    assert SERVER in block.text
    run_python([replace(block, text=block.text.replace(SERVER, server.url))])
    assert capsys.readouterr().out.strip()


def ask(command: str, url: str) -> str:
    """The body of the answer to a `curl` command, asked of the server at `url` instead. Raises AssertionError."""
    words = parse(command)
    words = [word.replace(SERVER, url).replace(SERVER.removeprefix("http://"), url) for word in words]
    (target,) = (word for word in words if word.startswith(url))
    run = subprocess.run(
        [*words, "--fail", "--no-progress-meter", "--max-time", "120", "--write-out", "\n%{http_code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    body, _, status = run.stdout.rpartition("\n")
    assert (run.returncode, status) == (0, "200"), f"{command}: {run.stdout}{run.stderr}"
    assert body.strip() or target.removeprefix(url).partition("?")[0] in EMPTY_PATHS, f"{command}: nothing came"
    return body


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", CURLS)
def test_a_curl_command_is_answered(command: str, server: ServerProcess) -> None:
    ask(command, server.url)


def test_blocks_that_do_not_run_are_few() -> None:
    foreign = [block for block in of("python") if block.text.startswith(FOREIGN)]
    marked = [block for block in BLOCKS if block.is_marked]
    assert (len(foreign), len(marked)) == (4, 4), "only these may be left out"
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert len(PYTHON) >= 20 and len(COMMANDS) >= 40
    assert CLIENTS and CURLS and setting_blocks(SETTINGS) and setting_blocks(KEYS)
    for block in foreign:
        compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# ---- the test tested ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("pagetide generate --no-such-option", SystemExit),
        ("vram-monitor limit", SystemExit),
        ("make no-such-target", AssertionError),
        ("python -m benchmarks.no_such", AssertionError),
        ("one more line of output", AssertionError),
    ],
)
def test_a_planted_command_is_refused(command: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        parse(command)


def test_planted_blocks_are_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("```python\n1 / 0\n```\n\n<!-- not run: no root -->\n\n```\ny\n```\n")
    broken, marked = blocks(document)
    assert (broken.text, broken.is_marked, broken.line) == ("1 / 0\n", False, 1)
    assert (marked.text, marked.is_marked, marked.line) == ("y\n", True, 7)
    with pytest.raises(ZeroDivisionError):
        run_python([broken])


def test_a_command_goes_on_within_quotes_and_after_a_backslash() -> None:
    text = "# not one\ncurl \\\n  a -d '{\n  1}'\nmake test  # it's a comment\n\nmake\n"
    assert list(commands(text)) == ["curl    a -d '{\n  1}'", "make test  # it's a comment", "make"]
    with pytest.raises(AssertionError, match="a quote is open"):
        list(commands("make 'test\n"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("path", ["v1/model", "v1/models -d '{}'"])
def test_a_planted_request_that_fails_is_seen(path: str, server: ServerProcess) -> None:
    with pytest.raises(AssertionError, match=r"40[45]"):
        ask(f"curl {SERVER}/{path}", server.url)

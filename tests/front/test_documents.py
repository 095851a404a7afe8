"""The code in README and the documents runs as it stands, and the commands there are commands.

What the language of a block says:

    python    run, those of a document one after the other
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
import re
from pathlib import Path

import documents
import pytest
from command_rig import _one_monitor  # noqa: F401
from documents import Block, _checkout, of, parse, run_python  # noqa: F401

from pagetide import cli
from pagetide.engine.config import EngineConfig
from pagetide.engine.loading.models import CONFIG_VARIABLE
from pagetide.monitor.config import MonitorConfig


@pytest.mark.usefixtures("_checkout")
def test_the_first_steps_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_python(documents.FIRST_STEPS)
    assert capsys.readouterr().out.startswith("Call me -> ")


@pytest.mark.parametrize("block", documents.MODELS, ids=str)
def test_a_models_file_is_read(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.yaml").write_text(block.text, "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "models.yaml"))
    assert cli.main(["models"]) == 0
    listed = capsys.readouterr().out
    names = re.findall(r"^(\w[\w-]*):", block.text, re.MULTILINE)
    assert names and all(name in listed for name in names)


def test_a_command_is_one() -> None:
    for block, command in documents.ALL_COMMANDS:
        try:
            parse(command)
        except (SystemExit, AssertionError) as error:
            pytest.fail(f"{block}: {command}: {error}")


def blocks_of(mark: str) -> list[Block]:
    return [block for block in of("yaml") if block.text.startswith(mark)]


def parse_title(block: Block) -> None:
    """The command after the name in `# serve.yaml: pagetide serve --config serve.yaml`, if there is one."""
    _, _, command = block.text.partition("\n")[0].partition(": ")
    if command:
        parse(command)


@pytest.mark.parametrize("block", blocks_of(documents.MONITOR), ids=str)
def test_settings_of_the_monitor_are_accepted(block: Block, tmp_path: Path) -> None:
    (tmp_path / "vram-monitor.yaml").write_text(block.text, "utf-8")
    assert len(MonitorConfig.resolve(tmp_path / "vram-monitor.yaml", {}).alerts) == block.text.count("when:")


@pytest.mark.parametrize("block", blocks_of(documents.SETTINGS), ids=str)
def test_settings_of_the_server_are_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from pagetide.server.config import ServeConfig
    from pagetide.server.keys import read_keys

    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text(block.text, "utf-8")
    (tmp_path / "keys.yaml").write_text(blocks_of(documents.KEYS)[0].text, "utf-8")
    config = ServeConfig.resolve({}, {}, tmp_path / "serve.yaml")
    read_keys(config.api_key_file, {})
    for model in config.models:
        EngineConfig.resolve(model.reference, **dict(model.engine))
    parse_title(block)
    for keys in blocks_of(documents.KEYS):
        (tmp_path / "keys.yaml").write_text(keys.text, "utf-8")
        assert read_keys(tmp_path / "keys.yaml", {}).has_users, keys
        parse_title(keys)


@pytest.mark.parametrize("block", blocks_of(documents.FLEET), ids=str)
def test_settings_of_a_fleet_are_accepted(block: Block, tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    from pagetide.fleet.config import FleetConfig

    (tmp_path / "fleet.yaml").write_text(block.text, "utf-8")
    config = FleetConfig.read(tmp_path / "fleet.yaml")
    EngineConfig.resolve("demo", **dict(config.engine))


def test_blocks_that_do_not_run_are_few() -> None:
    foreign = [block for block in of("python") if block.text.startswith(documents.FOREIGN)]
    marked = [block for block in documents.BLOCKS if block.is_marked]
    assert (len(foreign), len(marked)) == (5, 4), "only these may be left out"
    assert {block.language for block in documents.BLOCKS} <= documents.LANGUAGES
    assert len(documents.PYTHON) >= 20 and len(documents.ALL_COMMANDS) >= 40
    assert documents.CLIENTS and documents.CURLS and blocks_of(documents.SETTINGS) and blocks_of(documents.KEYS)
    for block in foreign:
        compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

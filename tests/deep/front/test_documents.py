"""The documents' longer Python, their clients and `curl` commands run; and planted mistakes in blocks are found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import documents
import pytest
from command_rig import _one_monitor  # noqa: F401
from documents import Block, _checkout, ask, blocks, commands, parse, run_python  # noqa: F401
from servers import ServerProcess

from pagetide import cli


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize("document", sorted({block.document for block in documents.PYTHON}), ids=lambda document: document.name)
def test_the_blocks_of_a_document_run_in_order(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python([block for block in documents.PYTHON if block.document == document])
    assert capsys.readouterr().out


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize(
    "document", sorted({block.document for block, _ in documents.QUICK_COMMANDS}), ids=lambda path: path.name
)
def test_a_quick_command_runs(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block, words in documents.QUICK_COMMANDS:
        if block.document == document:
            assert cli.main(words[1:]) == 0, f"{block}: {words}"
            assert capsys.readouterr().out, f"{block}: {words}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    pytest.importorskip("fastapi")
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ["demo", "--device", "cpu", "--dtype", "float32", "--kv-memory", "16MiB", "--no-share"]
    with ServerProcess(arguments, log, OMP_NUM_THREADS="1") as server:
        yield server


@pytest.mark.parametrize("block", documents.CLIENTS, ids=str)
def test_a_client_is_answered(block: Block, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    assert documents.SERVER in block.text
    run_python([replace(block, text=block.text.replace(documents.SERVER, server.url))])
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", documents.CURLS)
def test_a_curl_command_is_answered(command: str, server: ServerProcess) -> None:
    ask(command, server.url)


def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    for command in ("pagetide generate --no-such-option", "vram-monitor limit", "make no-such-target"):
        with pytest.raises((SystemExit, AssertionError)):
            parse(command)
    for command in ("python -m benchmarks.no_such", "one more line of output"):
        with pytest.raises(AssertionError):
            parse(command)
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
        ask(f"curl {documents.SERVER}/{path}", server.url)

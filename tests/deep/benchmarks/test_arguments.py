"""What benchmarks share: their options, and processes of their own."""

from __future__ import annotations

import argparse
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import arguments, elastic
from benchmarks.processes import Worker


def data_of(*given: str) -> Path | None:
    parser = argparse.ArgumentParser()
    arguments.add_data(parser, "traces", "made ones")
    data: Path | None = parser.parse_args(given).data
    return data


def test_a_folder_of_data_is_there_or_none_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "DATA", tmp_path / "data")
    assert data_of() is None
    (tmp_path / "data").mkdir()
    assert data_of() == tmp_path / "data"
    assert data_of("--data", "none") is None
    assert data_of("--data", str(tmp_path)) == tmp_path
    with pytest.raises(SystemExit):
        data_of("--data", str(tmp_path / "nothing"))
    assert f"there is no folder {tmp_path / 'nothing'}; name another, or 'none'" in capsys.readouterr().err


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elastic.main(["--only", "free,spam"])
    assert "there is no part spam; there are free, cached" in capsys.readouterr().err


def test_a_process_that_ends_too_early_is_told() -> None:
    with Worker(Connection.send, "hello", core=7) as worker:
        assert worker.receive() == "hello"
        with pytest.raises(ChildProcessError, match="ended with status 0"):
            worker.receive()

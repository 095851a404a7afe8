"""Every benchmark is a program that tells its options; the runs at tiny sizes are in tests/deep/benchmarks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch  # noqa: F401, as the benchmarks do

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MAIN = 'if __name__ == "__main__":'
PARTS = {"stand_ins"}  # a process of benchmarks.serve, without options


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    programs = {path.stem for path in FOLDER.glob("*.py") if MAIN in path.read_text("utf-8")} - PARTS
    assert len(programs) > 15
    for name in sorted(programs | {"gpu.__main__", "peers.make"}):
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"benchmarks.{name}").main(["--help"])
        assert ended.value.code == 0 and "usage:" in capsys.readouterr().out, name

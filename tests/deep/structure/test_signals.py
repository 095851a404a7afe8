"""Children of tests begin with the default for each signal, whatever the process that runs the tests ignores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

NUMBERS = [int(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)]
TOLD = f"import signal; print([signal.getsignal(n) == signal.SIG_IGN for n in {NUMBERS}])"


def test_a_child_ignores_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False, False, False]\n"


def test_where_the_tests_were_started_so_that_they_ignore_signals() -> None:
    test = f"{Path(__file__)}::{test_a_child_ignores_nothing.__name__}"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier=deep", test]
    ignoring = f"trap '' {' '.join(map(str, NUMBERS))}; exec \"$@\""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(["sh", "-c", ignoring, "sh", *command], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

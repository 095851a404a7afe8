"""The live view of the real command in a terminal: it follows monitors, and sends recalls and limits to a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broker_rig import Process, processes, short_folder, test_device
from monitors import MonitorProcess, run, wait_until
from terminals import Terminal, terminal

MIB = 1 << 20
VIEW = "import sys; from pagetide.vram_monitor import main; sys.exit(main(sys.argv[1:]))"
CAPACITY = 512 * MIB


@contextmanager
def view(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    """The live view of the monitor in `directory`, in a terminal of 80 x 24 cells; q ends it."""
    with terminal(VIEW, "--runtime-dir", str(directory), "-i", "0.05", *arguments, env=env) as shown:
        shown.wait_until(lambda: "processes" in shown.text or shown.process.poll() is not None)
        yield shown
        shown.type(b"q")
        assert shown.status() == 0


def table(shown: Terminal) -> str:
    """The screen without the line of keys."""
    return "\n".join(line for line in shown.text.splitlines() if "q quit" not in line)


@contextmanager
def engine(directory: Path) -> Iterator[Process]:
    """An engine that holds 8 MiB more than its base."""
    with processes() as start:
        wait_until((directory / "broker.sock").exists)
        holder = start(
            "engine", directory / "broker.sock", "holder", 0, 64 * MIB, MIB, test_device(CAPACITY).uuid
        ).start()
        holder.tell(f"ask {8 * MIB}")
        wait_until(lambda: holder.tell("state")["held"] == 8 * MIB)
        yield holder


def test_the_view_attaches_detaches_and_attaches_again() -> None:
    with short_folder() as folder:
        monitor = MonitorProcess(folder / "run", "--capacity", str(CAPACITY))
        with view(folder / "run") as shown:
            shown.wait_until(lambda: "no monitor, read directly" in shown.text)
            for _ in range(2):
                with monitor:
                    shown.wait_until(lambda: f"monitor {monitor.pid} " in shown.text)
                    with engine(folder / "run"):
                        shown.wait_until(lambda: "not held" in shown.text and "holder" in shown.text)
                    monitor.end()
                    shown.wait_until(lambda: "no monitor, read directly" in shown.text and "leases" not in table(shown))
                    assert "silent" not in shown.text
            with monitor:
                shown.wait_until(lambda: f"monitor {monitor.pid} " in shown.text)
                monitor.kill()
                shown.wait_until(lambda: "no monitor, read directly" in shown.text)


def test_a_recall_and_a_limit_are_confirmed_and_their_results_shown() -> None:
    with (
        short_folder() as folder,
        MonitorProcess(folder / "run", "--capacity", str(CAPACITY)) as monitor,
        engine(folder / "run") as holder,
        view(folder / "run") as shown,
    ):
        pid = holder.pid
        shown.wait_until(lambda: "holder" in shown.text)
        shown.type(b"R2MiB\r")
        shown.wait_until(lambda: f"recall 2.00 MiB from 'holder' (pid {pid})? y or n" in shown.text)
        assert holder.tell("state")["held"] == 8 * MIB
        shown.type(b"n")
        shown.wait_until(lambda: "nothing was sent" in shown.text)
        shown.type(b"R2MiB\ry")
        shown.wait_until(lambda: re.search(rf"holder \(pid {pid}\) is to be at .* within", shown.text))
        wait_until(lambda: holder.tell("state")["held"] == 6 * MIB)
        shown.type(b"L1\r")
        shown.wait_until(lambda: f"limit 'holder' (pid {pid}) to 1 byte? y or n" in shown.text)
        shown.type(b"y")  # less than the minimum: the broker refuses
        shown.wait_until(lambda: "its max cannot be 1 byte" in shown.text)
        shown.type(b"L90MiB\ry")
        shown.wait_until(lambda: f"holder (pid {pid}) is limited to 90.00 MiB" in shown.text)
        assert '"max_bytes": 94371840' in run("leases", "--json", "--runtime-dir", monitor.directory).stdout


def test_without_a_monitor_nothing_is_sent(tmp_path: Path) -> None:
    with view(tmp_path / "run") as shown:
        shown.type(b"R")
        shown.wait_until(lambda: "nothing to recall: no monitor is attached" in shown.text)
    with view(tmp_path / "run", "--source", "host") as shown:
        shown.wait_until(lambda: "host · read directly" in shown.text)
        shown.type(b"L")
        shown.wait_until(lambda: "nothing to limit: no monitor is attached" in shown.text)


def test_help_filter_and_hidden_processes(tmp_path: Path) -> None:
    with view(tmp_path / "run", "--min-memory", "1TiB") as shown:
        shown.wait_until(lambda: re.search(r"\d+ below 1 TiB hidden", shown.text))
        shown.type(b"a")
        shown.wait_until(lambda: "hidden" not in shown.text and "COMMAND" in shown.text)
        shown.type(f"/{shown.process.pid}".encode())
        shown.wait_until(lambda: "matching" in shown.text)
        shown.type(b"\r?")
        shown.wait_until(lambda: "filter processes and leases" in shown.text)
        shown.type(b"\x1b")  # the key alone: nothing follows
        shown.wait_until(lambda: "COMMAND" in shown.text and "matching" in shown.text)
        shown.type(b"\x1b")
        shown.wait_until(lambda: "matching" not in shown.text)


def test_the_linux_console_without_colours_gets_ascii(tmp_path: Path) -> None:
    with view(tmp_path / "run", env={"TERM": "linux", "NO_COLOR": "1"}) as shown:
        shown.wait_until(lambda: "? help" in shown.text)
        assert shown.text.isascii()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--intervall", "3"), "unrecognized arguments: --intervall; did you mean --interval?"),
        (("--once", "--min-memry=3"), "unrecognized arguments: --min-memry=3; did you mean --min-memory?"),
        (("serve", "--headrom=2GiB"), "did you mean --headroom?"),
        (("recal", "demo", "1"), "did you mean recall?"),
    ],
)
def test_unknown_options_and_commands_get_the_nearest(arguments: tuple[str, ...], said: str) -> None:
    refused = run(*arguments)
    assert refused.returncode == 2 and said in refused.stderr, refused.stderr


def test_a_missing_package_is_a_sentence(tmp_path: Path) -> None:
    package = "rich"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError(name={package!r})")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "pagetide.vram_monitor", "--once", "--source", "host"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip
    said = f"vram-monitor: this needs the package {package}, which is missing: pip install {package}\n"
    assert (refused.returncode, refused.stderr) == (2, said)


def test_min_memory_filters_what_is_printed() -> None:
    def listed(*arguments: str) -> str:
        shown = run("--json", "--source", "host", *arguments)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    assert '"pid"' in listed() and '"pid"' in listed("--min-memory", "0")
    assert '"pid"' not in listed("--min-memory", "1TiB")
    assert "below 1 TiB hidden" in run("--once", "--source", "host", "--min-memory", "1TiB").stdout
    refused = run("--once", "--source", "host", "--min-memory", "much")
    assert refused.returncode == 2 and refused.stderr.startswith("vram-monitor: --min-memory: cannot read 'much'")

"""The command `vram-monitor`: once, as JSON, live in a terminal, recording; bad input is a sentence and status 2.

The live view follows monitors, and sends recalls and limits to a real broker.
"""

from __future__ import annotations

import grp
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broker_rig import Process, processes, short_folder, test_device
from monitors import MonitorProcess, command, run, run_here, wait_until, without
from terminals import Terminal, terminal

from pagetide.common.recording import FrameRecording, FrameWriter

HOST = ("--source", "host")


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", str(tmp_path / "run"))


def test_once_shows_the_host_and_json_is_one_object(tmp_path: Path) -> None:
    shown = run("--once", *HOST)
    assert shown.returncode == 0 and shown.stderr == ""
    assert "host" in shown.stdout and "GiB" in shown.stdout and "\x1b" not in shown.stdout
    (device,) = json.loads(run_here("--json", *HOST).stdout)["devices"]
    memory = device["memory"]
    assert device["kind"] == "host" and memory["used_bytes"] + memory["free_bytes"] == memory["total_bytes"]
    assert memory["stale"] is False and memory["polls"] >= 1
    assert not (tmp_path / "run").exists(), "looking makes nothing"


def test_json_with_an_interval_is_a_line_each(tmp_path: Path) -> None:
    watcher = subprocess.Popen(command("--json", "-i", "0.02", *HOST), stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    lines = [json.loads(watcher.stdout.readline()) for _ in range(3)]
    watcher.stdout.close()  # the reader has seen enough
    assert watcher.wait(30) == 141
    assert all(line["devices"] for line in lines)


def test_with_a_monitor_running_it_is_asked(tmp_path: Path) -> None:
    with MonitorProcess(tmp_path / "run") as monitor:
        assert json.loads(run_here("--json").stdout)["monitor_pid"] == monitor.pid
        assert json.loads(run_here("--json", *HOST).stdout)["monitor_pid"] != monitor.pid


def test_a_test_device_with_members(tmp_path: Path) -> None:
    shown = run_here("--json", *HOST, "--capacity", "2GiB", "--members", str(os.getpid()))
    (device,) = json.loads(shown.stdout)["devices"]
    assert device["memory"]["total_bytes"] == 2 << 30
    assert [process["pid"] for process in device["processes"]] == [os.getpid()]


def test_what_was_recorded_can_be_played(tmp_path: Path) -> None:
    file = tmp_path / "tape.jsonl.gz"
    recorded = run("record", file, "--duration", "0.5", "--interval", "0.2", *HOST)
    assert recorded.returncode == 0, recorded.stderr
    with FrameRecording(file, "devices") as recording, (tmp_path / "long").open("wb") as longer:
        writer = FrameWriter(longer.write, "devices", recording.header)
        for frame in recording.frames():
            writer.put(frame.line, frame.time_s, frame.full)
        # A slow machine asks for the first figures after half a second.
        writer.put(b'{"time":%.3f,"full":false}' % (recording.ended + 3600), recording.ended + 3600, False)
        writer.close()
    played = json.loads(run_here("--json", "--source", f"replay:{tmp_path / 'long'}").stdout)
    assert played["devices"][0]["kind"] == "host" and played["devices"][0]["memory"]["total_bytes"]
    (tmp_path / "torn").write_bytes(file.read_bytes()[:70])
    refused = run_here("--once", "--source", f"replay:{tmp_path / 'torn'}")
    assert refused.returncode == 2 and "/torn" in refused.stderr and refused.stderr.count("\n") == 1


BAD = [
    (("--once", *HOST, "-o", "7"), "no device 7; those that exist: host"),
    (("--once", *HOST, "-i", "0"), "interval must be a number of seconds from"),
    (("--once", "--source", "moon"), "auto"),
    (("--once", "--source", "replay:nowhere"), "nowhere"),
    (("--once", "--source", "nvml", "--capacity", "1GiB"), "capacity"),
    (("--once", *HOST, "--capacity", "1GiB", "--members", "x"), "a process id"),
    (("serve", *HOST, "--interval", "-1"), "interval must be a number of seconds from"),
    (("serve", *HOST, "--devices", "0,9"), "no device 0, 9; those that exist: host"),
    (("serve", *HOST, "--config", "nowhere.yaml"), "nowhere.yaml: No such file or directory; check the path"),
    (("serve", *HOST, "--runtime-dir", "/proc/nothing"), "/proc/nothing cannot be used"),
    (("serve", *HOST, "--metrics-port", "99999"), "a port from"),
    (("serve", *HOST, "--metrics-port", "0", "--metrics-address", "192.0.2.1"), "192.0.2.1"),
    (("serve", *HOST, "--capacity", "64MiB", "--headroom", "128MiB"), "headroom (128.00 MiB) leaves nothing of the"),
    (("serve", *HOST, "--group", "no such group"), "no group"),
    (("record", "/proc/nothing/tape", *HOST), "/proc/nothing/tape"),
    (("record", "tape", "--duration", "-1", *HOST), "--duration must be"),
    (("--source", "moon", "serve"), "'moon'"),  # what is said before a command counts for it
    (("--runtime-dir", "/proc/nothing", "serve", *HOST), "/proc/nothing"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_a_sentence_and_status_2(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    refused = run_here(*arguments) if arguments[0] == "--once" else run(*arguments)
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr and "Traceback" not in refused.stderr
    assert refused.stderr.startswith("vram-monitor: ") and refused.stderr.rstrip("\n").count("\n") <= 1, refused.stderr


def test_help_and_version_say_the_same_name() -> None:
    assert {"serve", "record"} <= set(run_here("--help").stdout.split())
    assert run_here("--version").stdout.startswith("vram-monitor ")


def test_it_starts_without_torch() -> None:
    code = "import sys; import pagetide.vram_monitor; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == "set()"


def test_nvml_without_a_driver_is_a_sentence() -> None:
    refused = run("--once", "--source", "nvml", env={"LD_LIBRARY_PATH": ""})
    if refused.returncode == 0:
        pytest.skip("this machine has a driver")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_devices_may_be_named_with_commas_or_spaces() -> None:
    for named in (("-o", "host,host"), ("-o", "host", "host")):
        assert len(json.loads(run_here(*named, "--json", *HOST).stdout)["devices"]) == 1


def test_a_closed_output_is_no_traceback() -> None:
    script = " ".join(map(str, command("-1", *HOST))) + " >&-"
    ended = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr


def test_under_nohup_a_recording_goes_on(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl.gz"
    recorder = subprocess.Popen(
        ["nohup", *command("record", tape, "--duration", "1.5", "--interval", "0.02", *HOST)], stderr=subprocess.DEVNULL
    )
    wait_until(lambda: tape.exists() and tape.stat().st_size > 200)
    recorder.send_signal(signal.SIGHUP)
    assert recorder.wait(60) == 0
    with FrameRecording(tape, "devices") as recording:
        assert recording.ended > recording.began


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root starts processes of several users")
def test_the_bounds_for_users_are_those_that_were_set() -> None:
    group = grp.getgrgid(65534)
    with short_folder() as folder, processes() as start:
        folder.chmod(0o755)
        arguments = ("--capacity", "64MiB", "--group", group.gr_name, "--user-engines", "2", "--user-share", "50%")
        with MonitorProcess(folder / "run", *arguments) as monitor:
            wait_until((folder / "run" / "broker.sock").exists)
            user = start("user", folder / "run" / "broker.sock", test_device(64 << 20).uuid, 4321, group.gr_gid).start()
            said = user.tell("33554432")
            assert "one user may be promised 30.00 MiB, 50% of the 60.00 MiB that can be leased" in said
            assert [user.tell("1048576") for _ in range(2)] == ["granted"] * 2
            assert "one user may have 2: end some" in user.tell("0")
            (lease, *_) = json.loads(run_here("leases", "--json", "--runtime-dir", monitor.directory).stdout)
            assert (lease["user"], lease["min_bytes"]) == ("4321", 1 << 20)


def test_it_may_open_the_files_that_all_leases_take() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    program = """
import resource
from pagetide import vram_monitor
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for _ in range(2):
    vram_monitor._allow_descriptors()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
vram_monitor._allow_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    command = [sys.executable, "-P", "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split() == [str(most)] * 2 + ["300"]
    assert "may open 300 files at most, and one engine takes three: raise the hard limit" in shown.stderr


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
        uuid = test_device(CAPACITY).uuid
        holder = start("engine", directory / "broker.sock", "holder", 0, 64 * MIB, MIB, uuid).start()
        holder.tell(f"ask {8 * MIB}")
        wait_until(lambda: holder.tell("state")["held"] == 8 * MIB)
        yield holder


def test_the_view_attaches_detaches_and_attaches_again() -> None:
    with short_folder() as folder:
        monitor = MonitorProcess(folder / "run", "--capacity", str(CAPACITY))
        with view(folder / "run") as shown:
            shown.wait_until(lambda: "no monitor, read directly" in shown.text)
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
        shown.wait_until(lambda: re.search(rf"holder \(pid {pid}\) must shrink to .* within", shown.text))
        wait_until(lambda: holder.tell("state")["held"] == 6 * MIB)
        shown.type(b"L1\r")
        shown.wait_until(lambda: f"limit 'holder' (pid {pid}) to 1 byte? y or n" in shown.text)
        shown.type(b"y")  # less than the minimum: the broker refuses
        shown.wait_until(lambda: "its max cannot be 1 byte" in shown.text)
        shown.type(b"L90MiB\ry")
        shown.wait_until(lambda: f"holder (pid {pid}) is limited to 90.00 MiB" in shown.text)
        assert '"max_bytes": 94371840' in run_here("leases", "--json", "--runtime-dir", monitor.directory).stdout


def test_without_a_monitor_nothing_is_sent(tmp_path: Path) -> None:
    with view(tmp_path / "run") as shown:
        shown.type(b"R")
        shown.wait_until(lambda: "nothing to recall: no monitor is attached" in shown.text)
    with view(tmp_path / "run", "--source", "host") as shown:
        shown.wait_until(lambda: "host · read directly" in shown.text)
        shown.type(b"L")
        shown.wait_until(lambda: "nothing to limit: no monitor is attached" in shown.text)


def test_small_processes_are_hidden_until_all_are_asked_for_and_the_linux_console_gets_ascii(tmp_path: Path) -> None:
    with view(tmp_path / "run", "--min-memory", "1TiB", env={"TERM": "linux", "NO_COLOR": "1"}) as shown:
        shown.wait_until(lambda: re.search(r"\d+ below 1 TiB hidden", shown.text) and "? help" in shown.text)
        assert shown.text.isascii()
        shown.type(b"a")
        shown.wait_until(lambda: "hidden" not in shown.text and "COMMAND" in shown.text)


def test_unknown_options_and_commands_get_the_nearest() -> None:
    for arguments, said in (
        (("--intervall", "3"), "unknown flag --intervall: did you mean --interval?"),
        (("--once", "--min-memry=3"), "unknown flag --min-memry: did you mean --min-memory?"),
        (("serve", "--headrom=2GiB"), "did you mean --headroom?"),
        (("recal", "demo", "1"), "did you mean recall?"),
    ):
        refused = run_here(*arguments)
        assert refused.returncode == 2 and said in refused.stderr, refused.stderr


def test_a_missing_package_is_a_sentence(tmp_path: Path) -> None:
    refused = run("--once", "--source", "host", env=without(tmp_path, "rich", "raise ModuleNotFoundError(name='rich')"))
    said = "vram-monitor: the package rich is missing: pip install rich\n"
    assert (refused.returncode, refused.stderr) == (2, said)


def test_min_memory_filters_what_is_printed() -> None:
    def listed(*arguments: str) -> str:
        shown = run_here("--json", "--source", "host", *arguments)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    assert '"pid"' in listed() and '"pid"' in listed("--min-memory", "0")
    assert '"pid"' not in listed("--min-memory", "1TiB")
    assert "below 1 TiB hidden" in run_here("--once", "--source", "host", "--min-memory", "1TiB").stdout
    refused = run_here("--once", "--source", "host", "--min-memory", "much")
    assert refused.returncode == 2 and refused.stderr.startswith("vram-monitor: --min-memory: cannot read 'much'")

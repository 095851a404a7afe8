"""Child processes: what they inherit, how they end, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import psutil
import pytest

from pagetide.common.child_process import ChildProcess
from pagetide.common.frames import ChannelClosed

BEGIN = """
import os, signal, subprocess, sys, time
from pagetide.common.child_process import ChildProcess, parent_channel, parent_socket
from pagetide.common.frames import PickleChannel, ChannelClosed
"""
ECHO = f"""{BEGIN}
channel = PickleChannel(parent_socket())
try:
    while True:
        channel.send(eval(channel.receive()))
except ChannelClosed:
    sys.exit(7)
"""


def asked(child: ChildProcess, expression: str) -> object:
    child.send(expression)
    return child.receive()


def test_a_child_answers_inherits_what_it_was_given_and_ends_with_its_socket() -> None:
    with tempfile.TemporaryFile() as file:
        shared = file.fileno()
        with ChildProcess(("-c", ECHO), fds=(shared,), environ={"TIDE": "high"}, cwd="/") as child:
            assert asked(child, "os.getpid(), os.getsid(0), os.getcwd()") == (child.pid, child.pid, "/")
            assert asked(child, "os.environ['TIDE'], os.environ['PATH']") == ("high", os.environ["PATH"])
            assert asked(child, f"os.write({shared}, b'tide'), sys.stdin.read()") == (4, "")
            # Its own children get no socket: 0 to 2, and what lists them.
            assert asked(child, "subprocess.run('ls /proc/self/fd', shell=True, stdout=-1).stdout.split()[3:]") == [b"3"]
            assert os.pread(shared, 10, 0) == b"tide" and child.status is None
            child.socket.close()
            assert child.wait(60) == 7 == child.status and child.ending() == "ended with status 7"


def test_a_child_has_the_signals_of_a_program_whatever_its_parent_ignores_or_blocks() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with ChildProcess(("-c", ECHO)) as child:
            child.kill(signal.SIGINT)
            assert asked(child, "signal.pthread_sigmask(signal.SIG_BLOCK, ())") == set()
            child.kill(signal.SIGTERM)
            with pytest.raises(ChildProcessError, match=rf"^a child \(process {child.pid}\) was killed by SIGTERM$"):
                child.receive()
            child.send("to nobody")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("import sys; print('printed'); sys.exit('a last word')", "ended with status 1: a last word"),
        ("import os; os.write(2, b'x' * 100_000 + b'\\nlast\\n\\n'); os.abort()", "was killed by SIGABRT: last"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
def test_a_child_that_dies_says_why(program: str, ending: str) -> None:
    with ChildProcess(("-I", "-S", "-c", program), captures=True) as child:
        with pytest.raises(ChannelClosed):
            child.channel.receive()
        assert child.ending() == ending
        assert child.ending("other words") == f"{ending.partition(':')[0]}: other words"


def test_a_child_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        ChildProcess(("-c", ""), captures=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_is_stopped_and_does_not_read_is_killed() -> None:
    child = ChildProcess(("-I", "-S", "-c", "import os, time; os.write(0, bytes(8)); time.sleep(1e6)"))
    assert child.socket.recv(8) == bytes(8)
    child.kill(signal.SIGSTOP)
    child.close(grace_s=0.05)
    assert child.status == -signal.SIGKILL
    child.close()


PARENT = f"""{BEGIN}
child = ChildProcess(("-c", '''{BEGIN}
parent_channel().send("up")
time.sleep(1e6)
'''))
assert child.receive() == "up"
print(child.pid, flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, 0])
def test_a_child_dies_with_its_parent_though_it_does_not_read(sent: int) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PARENT, str(int(sent))], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -sent
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=60)


def test_a_child_whose_parent_was_gone_before_it_began_ends() -> None:
    with ChildProcess(("-c", f"{BEGIN}\nos.read(0, 1)\nparent_channel()\ntime.sleep(1e6)")) as child:
        child.socket.close()
        assert child.wait(60) == 1


def test_a_parent_without_standard_streams_has_children() -> None:
    program = f"""{BEGIN}
os.closerange(0, 3)
child = ChildProcess(("-c", {ECHO!r}), captures=True)
child.send("os.write(1, b'tide') + os.write(2, b'!')")
assert (child.receive(), child.said) == (5, "tide!")
"""
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0

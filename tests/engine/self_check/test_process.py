"""Parts in processes of their own: one that crashes, hangs, is killed or talks nonsense costs its part and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

from pagetide.common.child_process import ChildProcess
from pagetide.common.frames import PickleChannel
from pagetide.engine.self_check.check import _in_processes
from pagetide.engine.self_check.process import Timeouts, try_parts
from pagetide.engine.self_check.report import FAILED, PARTS, PASSED, UNTRIED, PartOutcome

IDENTITY = {"device": "GPU-1", "sources": "abc"}
BABBLE = "a frame of 7,956,009,416,840,277,827 bytes, and 68,719,476,736 are the most: b'Compiling... done\\n'"
# What a child does for each part, by its name; `{before}` is done first of all.
PROGRAM = """
import json, os, pickle, signal, struct, sys, time
request = json.loads(sys.argv[1])
def tell(message):
    data = pickle.dumps(message)
    os.write(0, struct.pack("<Q", len(data)) + data)
def passes(part):
    tell({"part": part, "state": "passed", "reason": None, "seconds": 0.5, "at": 3.0})
def fails(part):
    tell({"part": part, "state": "failed", "reason": "wrong bytes", "seconds": 0.5, "at": 3.0})
    sys.exit(0)
def crashes(part):
    os.kill(os.getpid(), signal.SIGSEGV)
def aborts(part):
    os.write(2, b"terminate called\\nCUDA error: device-side assert triggered\\n\\n")
    os.abort()
def is_killed(part):
    os.kill(os.getpid(), signal.SIGKILL)
def hangs(part):
    time.sleep(1000)
def ends(part):
    sys.exit("a library called exit")
def babbles(part):
    os.write(0, b"Compiling... done\\n")
    hangs(part)
def misleads(part):
    tell({"part": part, "state": "excellent", "reason": None, "seconds": 0.5, "at": 3.0})
def stumbles(part):
    try:
        os.close(os.open(request["folder"] + "/" + part, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        passes(part)
    else:
        crashes(part)
%s
tell({"identity": request["identity"]})
for part in request["parts"]:
    globals()[part.rpartition("-")[2]](part)
"""


class Children:
    """Starts them, and says what each was asked for."""

    def __init__(self, folder: Path, before: str = "", identity: dict[str, str] = IDENTITY) -> None:
        self.asked: list[tuple[list[str], list[str]]] = []
        self._folder = folder
        self._program = PROGRAM % before
        self._identity = identity

    def __call__(self, parts: Sequence[str], failed: Collection[str]) -> list[str]:
        self.asked.append((list(parts), list(failed)))
        request = {"parts": list(parts), "identity": self._identity, "folder": str(self._folder)}
        return ["-I", "-S", "-c", self._program, json.dumps(request)]


def try_in(children: Children, *parts: str, **bounds: float) -> list[tuple[str, str, str | None]]:
    found = try_parts(parts, children, IDENTITY, Timeouts(**bounds), clock=lambda: 9.0)
    return [(one.part, one.state, one.reason) for one in found]


def test_all_parts_are_tried_in_one_process_and_told_as_they_were(tmp_path: Path) -> None:
    children = Children(tmp_path)
    found = try_parts(["a-passes", "b-passes"], children, IDENTITY)
    assert found == [PartOutcome(part, PASSED, None, 0.5, 3.0) for part in ("a-passes", "b-passes")]
    assert len(children.asked) == 1


@pytest.mark.parametrize(
    ("how", "state", "reason"),
    [
        ("fails", FAILED, "wrong bytes"),
        ("crashes", FAILED, "its process was killed by SIGSEGV"),
        ("aborts", FAILED, "its process was killed by SIGABRT: CUDA error: device-side assert triggered"),
        ("ends", FAILED, "its process ended with status 1: a library called exit"),
        ("is_killed", UNTRIED, "its process was killed by SIGKILL"),
        ("babbles", UNTRIED, f"its process gave no outcome: {BABBLE}"),
    ],
)
def test_a_part_that_fails_is_tried_twice_and_the_others_go_on_in_another_process(
    tmp_path: Path, how: str, state: str, reason: str
) -> None:
    children, bad = Children(tmp_path), f"b-{how}"
    rest = ["c-passes", "d-passes"]
    found = [("a-passes", PASSED, None), (bad, state, reason), *((part, PASSED, None) for part in rest)]
    assert try_in(children, "a-passes", bad, *rest) == found
    first, again, others = (["a-passes", bad, *rest], []), ([bad, *rest], []), (rest, [bad] if state == FAILED else [])
    assert children.asked == ([first, again, others] if state == FAILED else [first, others])


def test_a_part_that_stumbles_once_has_passed(tmp_path: Path) -> None:
    children = Children(tmp_path)
    assert [state for _, state, _ in try_in(children, "a-stumbles", "b-passes", "c-stumbles")] == [PASSED] * 3
    assert len(children.asked) == 3


def test_a_part_that_hangs_fails_when_its_time_is_over(tmp_path: Path) -> None:
    """When all time is over nothing more is said of any part."""
    found = try_in(Children(tmp_path), "a-hangs", "b-passes", part_s=0.3)
    assert found == [("a-hangs", FAILED, "it did not end within 0.3 s"), ("b-passes", PASSED, None)]
    found = try_in(Children(tmp_path), "a-hangs", "b-passes", total_s=0.3)
    assert [(part, state) for part, state, _ in found] == [("a-hangs", UNTRIED), ("b-passes", UNTRIED)]


def test_a_part_that_failed_and_cannot_be_tried_again_has_failed(tmp_path: Path) -> None:
    once = "os.close(os.open(request['folder'] + '/once', os.O_CREAT | os.O_EXCL))"
    (first, second) = try_in(Children(tmp_path, once), "a-crashes", "b-passes")
    assert first == ("a-crashes", FAILED, "its process was killed by SIGSEGV")
    assert second[:2] == ("b-passes", UNTRIED) and "FileExistsError" in str(second[2])


@pytest.mark.parametrize(
    ("before", "bounds", "reason"),
    [
        ("sys.exit('no module named torch')", {}, "its process ended with status 1: no module named torch"),
        ("crashes('')", {}, "its process was killed by SIGSEGV"),
        ("hangs('')", {"ready_s": 0.3}, "its process was not ready in time"),
        ("babbles('')", {}, f"its process said {BABBLE}"),
    ],
)
def test_a_process_that_does_not_come_up_tells_nothing_of_any_part(
    tmp_path: Path, before: str, bounds: dict[str, float], reason: str
) -> None:
    children = Children(tmp_path, before)
    found = [(part, UNTRIED, reason) for part in ("a-passes", "b-passes")]
    assert try_in(children, "a-passes", "b-passes", **bounds) == found and len(children.asked) == 1


def test_other_devices_no_interpreter_and_outcomes_that_are_none_tell_nothing(tmp_path: Path) -> None:
    other = Children(tmp_path, identity={**IDENTITY, "device": "GPU-2"})
    assert try_in(other, "a-passes") == [("a-passes", UNTRIED, "its process sees another device, or other versions")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", "/no/such/python")
        (outcome,) = try_parts(["a"], other, IDENTITY)
    assert outcome.state == UNTRIED and str(outcome.reason).startswith("no process could be started: ")
    reason = "its process gave no outcome: 'excellent' is no state of a part"
    found = try_in(Children(tmp_path), "a-misleads", "b-passes")
    assert found == [("a-misleads", UNTRIED, reason), ("b-passes", PASSED, None)]


def test_an_interrupt_ends_the_process_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PickleChannel] = []
    receive = PickleChannel.receive

    def interrupted(self: PickleChannel, timeout_s: float) -> object:
        if asked:
            raise KeyboardInterrupt
        asked.append(self)
        return receive(self, timeout_s)

    ended: list[int | None] = []
    close = ChildProcess.close
    monkeypatch.setattr(PickleChannel, "receive", interrupted)
    monkeypatch.setattr(ChildProcess, "close", lambda self: (close(self), ended.append(self.status))[0])
    with pytest.raises(KeyboardInterrupt):
        try_in(Children(tmp_path), "a-hangs")
    assert ended == [-signal.SIGKILL]


def test_the_real_process_answers_beside_what_libraries_print() -> None:
    """Over host memory: all that is missing of the real one is the device."""
    program = """
import json, sys
from pagetide.common.child_process import parent_channel
from pagetide.engine.self_check import child
request = json.loads(sys.argv[1])
answers = parent_channel()
print("a library's banner", flush=True)
sys.path.insert(0, request["tests"])
from host_seams import seams
answers.send({"identity": request["identity"]})
child.serve(request["parts"], seams, answers)
"""
    tests = str(Path(__file__).resolve().parents[2])

    def command(parts: Sequence[str], failed: Collection[str]) -> list[str]:
        request = {"parts": list(parts), "identity": IDENTITY, "tests": tests}
        return ["-c", program, json.dumps(request)]

    found = try_parts(["pool", "swaps"], command, IDENTITY)
    assert [(one.part, one.state) for one in found] == [("pool", PASSED), ("swaps", PASSED)]
    assert found[0].at > 0 and found[1].seconds > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here: tests/gpu/test_cuda.py")
def test_the_real_command_says_why_it_cannot_try_anything_here() -> None:
    found = _in_processes(0, [], PARTS, IDENTITY)
    assert [(one.part, one.state) for one in found] == [(part, UNTRIED) for part in PARTS]
    (reason,) = {str(one.reason) for one in found}
    assert re.match(r"its process ended with status 1: (AssertionError|RuntimeError): .*(CUDA|NVIDIA)", reason), reason


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    try_in(Children(tmp_path), "a-crashes", "b-passes", "c-hangs", part_s=0.2)
    assert len(os.listdir("/proc/self/fd")) == before

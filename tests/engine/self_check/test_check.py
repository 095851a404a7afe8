"""Which parts are tried, what is kept of it for how long, and what is said; the cache's folder in every state."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
import torch

from pagetide.engine.self_check import cache as caching
from pagetide.engine.self_check import check as checking
from pagetide.engine.self_check.cache import Cache, cache_dir
from pagetide.engine.self_check.check import FAILURES_HOLD_S, at_start, say, self_check
from pagetide.engine.self_check.identity import cuda_devices, driver_version, identity_of, versions
from pagetide.engine.self_check.report import ABSENT, FAILED, PARTS, PASSED, UNTRIED, CheckReport, PartOutcome, in_order

IDENTITY = {"device": "GPU-1", "name": "NVIDIA H200", "driver": "580.82.07", "versions": {"torch": "2.13.0"}}
NOW = 1_000_000.0


class Rig:
    """A device whose parts are as `states` says; parts that were tried are in `tried`."""

    def __init__(self, folder: Path) -> None:
        self.cache = Cache(folder)
        self.states = dict.fromkeys(PARTS, PASSED)
        self.identity: dict[str, Any] = dict(IDENTITY)
        self.now = NOW
        self.tried: list[str] = []

    def attempt(self, parts: Sequence[str], identity: Mapping[str, Any]) -> list[PartOutcome]:
        assert identity == self.identity
        self.tried += parts
        states = [(part, self.states[part]) for part in parts]
        return [PartOutcome(part, s, None if s == PASSED else f"no {part}", 0.1, self.now) for part, s in states]

    def check(self, **options: Any) -> CheckReport:
        self.tried.clear()
        return self_check(
            3, cache=self.cache, identify=lambda index: self.identity, attempt=self.attempt, clock=lambda: self.now, **options
        )


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "self-check")


def test_a_first_start_tries_everything_and_the_next_one_nothing(rig: Rig) -> None:
    rig.states["varlen"] = ABSENT
    first = rig.check()
    assert (first.device, first.state, first.cached, first.kept) == ("cuda:3", PASSED, False, True)
    assert rig.tried == list(PARTS)
    second = rig.check()
    assert second == replace(first, cached=True)
    assert rig.tried == []
    assert Path(second.file).is_file()


def test_another_device_driver_or_version_is_checked_anew(rig: Rig) -> None:
    rig.check()
    for changed in ({"device": "GPU-2"}, {"driver": "590.1"}, {"versions": {"torch": "2.14.0"}}):
        rig.identity = IDENTITY | changed
        assert rig.check().cached is False
        assert rig.tried == list(PARTS), changed
    rig.identity = dict(IDENTITY)
    assert rig.check().cached is True


def test_a_failure_is_believed_for_a_day_and_a_pass_for_good(rig: Rig) -> None:
    rig.states |= {"graphs": FAILED, "varlen": ABSENT}
    assert rig.check().faults == {"graphs": "no graphs"}
    rig.now += FAILURES_HOLD_S - 1
    assert rig.check().faults == {"graphs": "no graphs"}
    assert rig.tried == []
    rig.now += 2
    rig.states["graphs"] = PASSED
    assert rig.check().faults == {}
    assert rig.tried == ["varlen", "graphs"]  # what was not there may have been missing for the same reason
    rig.now += 1e9
    assert (rig.check().state, rig.tried) == (PASSED, [])
    rig.states |= {"pool": FAILED, "varlen": PASSED}
    rig.check(again=True)
    rig.now -= 3600  # the clock was set back: a failure from the future would be believed for ever
    rig.check()
    assert rig.tried == ["pool"]


def test_what_could_not_be_tried_is_tried_the_next_time_and_is_no_fault(rig: Rig) -> None:
    rig.states |= {"swaps": UNTRIED, "triton": UNTRIED}
    report = rig.check()
    assert (report.state, report.faults) == (UNTRIED, {})
    rig.states |= {"swaps": PASSED}
    assert [one.part for one in rig.check().of(UNTRIED)] == ["triton"]
    assert rig.tried == ["triton", "swaps"]


def test_again_tries_everything_and_only_looking_tries_nothing(rig: Rig) -> None:
    assert rig.check(tries=False).outcomes == ()
    assert rig.tried == []
    rig.states["pool"] = FAILED
    told = rig.check().to_dict()
    assert json.loads(json.dumps(told)) == told and list(told["parts"]) == list(PARTS)
    assert told["parts"]["pool"] == {"state": FAILED, "reason": "no pool", "seconds": 0.1, "at": NOW}
    assert (told["state"], told["cached"], told["file"]) == (FAILED, False, str(rig.cache.file(IDENTITY)))
    rig.states["pool"] = PASSED
    assert rig.check(tries=False).faults == {"pool": "no pool"}
    assert rig.check(again=True).faults == {}
    assert rig.tried == list(PARTS)
    assert rig.check().faults == {}


def test_each_part_that_is_off_is_warned_of_by_name_each_time(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def said(**options: Any) -> list[str]:
        caplog.clear()
        say(rig.check(**options))
        return caplog.messages

    rig.states |= {"graphs": FAILED, "triton": FAILED}
    caplog.set_level(logging.WARNING, "pagetide")
    for _ in range(2):
        triton, graphs = said()
        assert "cuda:3 (NVIDIA H200, driver 580.82.07): triton failed and is disabled: no triton" in triton
        assert "Without it attention is by another kernel" in triton
        assert "Without it decode steps are launched kernel by kernel" in graphs
        assert "pagetide doctor --refresh" in graphs
    rig.states |= dict.fromkeys(PARTS, UNTRIED)
    (warning,) = said(again=True)
    assert f"{', '.join(PARTS)} could not be tried" in warning
    rig.states |= dict.fromkeys(PARTS, PASSED)
    caplog.set_level(logging.INFO, "pagetide")
    assert "all available parts work" in "\n".join(said())
    assert said() == [], "it is said once"


def test_a_check_that_raises_itself_stops_no_engine(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    report = at_start(3, Mock(side_effect=OSError("the sources cannot be read")))
    assert (report.state, report.faults, report.to_dict()["file"]) == (UNTRIED, {}, None)
    assert "the self-check of cuda:3 raised" in caplog.text
    rig.states["pool"] = FAILED
    assert at_start(3, lambda index: rig.check()).faults == {"pool": "no pool"}
    assert "pool failed and is disabled" in caplog.text


def test_what_is_known_to_fail_is_not_used_to_try_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.states |= {"pool": FAILED, "swaps": UNTRIED}
    rig.check()
    requests: list[dict[str, Any]] = []

    def noting(parts: Sequence[str], command: Any, identity: Mapping[str, Any]) -> list[PartOutcome]:
        requests.append(json.loads(command(parts, ["triton"])[-1]))
        return rig.attempt(parts, identity)

    monkeypatch.setattr(checking, "try_parts", noting)
    self_check(3, cache=rig.cache, identify=lambda index: rig.identity, clock=lambda: rig.now)
    assert requests == [{"device": 3, "parts": ["swaps"], "failed": ["pool", "triton"]}]


def test_the_folder_is_where_the_xdg_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert str(cache_dir({"XDG_CACHE_HOME": "/var/cache/me"})) == "/var/cache/me/pagetide/self-check"
    for ignored in ({"XDG_CACHE_HOME": "relative"}, {"XDG_CACHE_HOME": ""}, {}):
        assert str(cache_dir(ignored)) == "/h/.cache/pagetide/self-check"


def test_a_damaged_file_counts_as_none_and_is_replaced(rig: Rig) -> None:
    file = Path(rig.check().file)
    whole = file.read_text()
    for damaged in (
        "", whole[: len(whole) // 2], "[]", "null", whole.replace("GPU-1", "GPU-7"), "\udc80",
        whole.replace('"passed"', '"perhaps"', 1), whole.replace('"seconds"', '"minutes"', 1),
        whole.replace('"state": "passed"', '"state": null', 1),
    ):  # fmt: skip
        file.write_bytes(damaged.encode(errors="surrogateescape"))
        assert rig.check().state == PASSED
        assert rig.tried == list(PARTS), damaged
        assert rig.check().cached is True

    kept = [PartOutcome("teleport", FAILED, "no", 0.0, NOW), PartOutcome("pool", PASSED, None, 0.0, NOW)]
    rig.cache.write(IDENTITY, kept)  # of a release with a part that is no more
    report = rig.check()
    assert [one.part for one in report.outcomes] == list(PARTS)
    assert rig.tried == list(PARTS[1:])


def test_a_folder_that_cannot_be_written_keeps_nothing_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    rig = Rig(tmp_path / "file" / "self-check")
    report = rig.check()
    assert (report.state, report.kept, report.to_dict()["file"]) == (PASSED, False, None)
    assert "cannot be saved, so the next start repeats the self-check" in caplog.text
    rig.check()
    assert rig.tried == list(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # without a home
    assert Rig(cache_dir({})).check().kept is False
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is written beside the program"


def test_a_write_that_fails_leaves_the_old_result_and_no_rest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(rig.check().file)
    before = file.read_text()
    monkeypatch.setattr(caching.os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    assert rig.check(again=True).kept is False
    assert file.read_text() == before
    assert os.listdir(file.parent) == [file.name]


def test_several_processes_at_once_leave_one_whole_result(rig: Rig) -> None:
    outcomes = [PartOutcome(part, PASSED, None, 0.0, NOW) for part in PARTS]
    kept = (in_order(outcomes), in_order(outcomes[:2]))
    with ThreadPoolExecutor(4) as threads:
        writes = [threads.submit(rig.cache.write, IDENTITY, kept[i % 2]) for i in range(40)]
        rig.cache.write(IDENTITY, kept[0])
        for _ in range(200):
            assert tuple(rig.cache.read(IDENTITY)) in kept
        for write in writes:
            write.result()
    assert os.listdir(rig.cache.file(IDENTITY).parent) == [rig.cache.file(IDENTITY).name]


def test_the_drivers_version_is_what_the_kernel_says(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("")
    assert driver_version(file) is None
    line = "NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder)"
    file.write_text(f"NVRM version: {line}\nGCC version:  gcc version 13.3.0\n")
    assert driver_version(file) == "580.82.07"


def test_an_identity_is_plain_data_of_device_driver_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    has = SimpleNamespace(name="NVIDIA H200", uuid=UUID(int=7), major=9, minor=0, total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    identity = identity_of(1)
    assert json.loads(json.dumps(identity)) == identity == identity_of(1)
    assert (identity["device"], identity["name"], identity["capability"]) == (str(UUID(int=7)), "NVIDIA H200", "9.0")
    assert identity["versions"]["torch"] == torch.__version__
    assert re.fullmatch("[0-9a-f]{16}", identity["sources"])
    assert versions(["pytest", "no-such-thing"]) == {"pytest": pytest.__version__, "no-such-thing": None}
    assert cuda_devices() == [
        {"device": f"cuda:{i}", "name": "NVIDIA H200", "capability": "9.0", "total_bytes": 139 << 30} for i in range(2)
    ]
    del has.uuid  # of a torch that does not tell it
    assert identity_of(1)["device"] == "NVIDIA H200 1"

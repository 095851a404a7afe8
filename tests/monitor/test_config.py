"""monitor/config.py: what may be said in YAML and by flags, and how the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.errors import ConfigInvalid


def from_yaml(tmp_path: Path, text: str, **flags: Any) -> MonitorConfig:
    file = tmp_path / "monitor.yaml"
    file.write_text(text)
    return MonitorConfig.resolve(file, flags)


def test_without_anything_the_defaults_hold() -> None:
    assert MonitorConfig.resolve(None, {}) == MonitorConfig()


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "# nothing\n") == MonitorConfig()


def test_every_key_can_be_said(tmp_path: Path) -> None:
    text = """
source: host
devices: [0, "0:1", GPU-1234]
interval: 50ms
detail_interval: 2
metrics_port: 9400
metrics_address: 0.0.0.0
runtime_dir: /run/x
group: video
capacity: 2GiB
members: [17, 18]
headroom: 512MiB
user_engines: 8
user_share: 50%
log_level: DEBUG
"""
    assert from_yaml(tmp_path, text) == MonitorConfig(
        "host",
        ("0", "0:1", "GPU-1234"),
        0.05,
        2.0,
        9400,
        "0.0.0.0",
        Path("/run/x"),
        "video",
        2 << 30,
        (17, 18),
        512 << 20,
        8,
        0.5,
        "debug",
    )


def test_flags_go_before_the_file_and_are_texts(tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path, "interval: 1\nmetrics_port: 1\n", interval="0.5", devices="0,1", members="3, 4", metrics_port=None
    )
    assert (config.interval, config.devices, config.members, config.metrics_port) == (0.5, ("0", "1"), (3, 4), 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("intervall: 1", "unknown key 'intervall'; did you mean interval?"),
        ("metric-port: 1", "did you mean metrics_port?"),
        ("zzz: 1", "known are source, devices"),
        ("1: 2", "unknown key 1"),
        ("- a", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("interval: 0", "interval must be between 0.001 and 3600 seconds, got 0"),
        ("interval: -1s", "interval must be a number of seconds"),
        ("interval: -1", "got -1"),
        ("interval: .nan", "number of seconds"),
        ("interval: .inf", "number of seconds"),
        ("interval: true", "number of seconds"),
        ("interval: fast", "such as 0.02 or 20ms, got 'fast'"),
        ("interval: [1]", "number of seconds"),
        ("metrics_port: 70000", "a port between 0 and 65535, got 70000"),
        ("metrics_port: http", "got 'http'"),
        ("metrics_port: true", "a port"),
        ("members: [0]", "a process id between 1"),
        ("members: {a: 1}", "must be a list"),
        ("devices: 1.5", "must be a list"),
        ("capacity: 2 parsecs", "capacity: cannot read"),
        ("user_engines: 0", "user_engines must be a number of engines between 1 and 100000, got 0"),
        ("user_share: 0", "user_share must be a share above 0 and at most 1, such as 0.9 or 90%, got 0"),
        ("user_share: 1.01", "got 1.01"),
        ("user_share: 101%", "got '101%'"),
        ("user_share: half", "got 'half'"),
        ("user_share: .nan", "got nan"),
        ("user_share: true", "got True"),
        ("user_share: [1]", "must be a share"),
        ("log_level: loud", "one of debug, info, warning, error, got 'loud'"),
        ("source: 7", "source must be a text, got 7"),
        ("group: ''", "group must be a text"),
        ("capacity: 64MiB\nheadroom: 128MiB", "headroom (128.00 MiB) leaves nothing of the capacity (64.00 MiB)"),
        ("capacity: 64MiB\nheadroom: 64MiB", "headroom (64.00 MiB) leaves nothing of the capacity (64.00 MiB)"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        from_yaml(tmp_path, text)
    assert said in str(caught.value)


@pytest.mark.parametrize(("written", "share"), [(1, 1.0), ("0.25", 0.25), ("25 %", 0.25), ("100%", 1.0)])
def test_a_share_is_a_number_or_a_percentage(tmp_path: Path, written: Any, share: float) -> None:
    assert from_yaml(tmp_path, f"user_share: {written}").user_share == share
    assert MonitorConfig.resolve(None, {"user_share": str(written)}).user_share == share


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="No such file"):
        MonitorConfig.resolve(tmp_path / "none.yaml", {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigInvalid, match=r"not valid YAML: .*utf-8"):
        MonitorConfig.resolve(tmp_path / "binary", {})


def test_one_device_may_stand_without_a_list(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "devices: 1\nmembers: 5\n").devices == ("1",)


@pytest.mark.parametrize(
    "text",
    [
        "runtime_dir: ~nobody-of-that-name/x",
        'runtime_dir: "a\\0b"',
        "interval: 1" + "0" * 400,
        "interval: " + "[" * 3000,
        "capacity: 1" + "0" * 5000,
        "capacity: 100000000TiB",
        "capacity: " + "9" * 400 + ".5G",
        "members: [1" + "0" * 5000 + "]",
    ],
    ids=lambda text: text[:24],
)
def test_absurd_values_are_sentences_too(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigInvalid):
        from_yaml(tmp_path, text)

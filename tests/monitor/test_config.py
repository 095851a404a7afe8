"""monitor/config.py: what may be said in YAML and by flags, and how the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.errors import ConfigInvalid


def from_yaml(tmp_path: Path, text: str, **flags: Any) -> MonitorConfig:
    path = tmp_path / "settings.yaml"
    path.write_text(text, "utf-8")
    return MonitorConfig.resolve(path, flags)


def test_what_is_not_said_has_its_default_and_short_forms_are_read(tmp_path: Path) -> None:
    assert MonitorConfig.resolve(None, {}) == from_yaml(tmp_path, "# nothing\n") == MonitorConfig()
    assert from_yaml(tmp_path, "devices: 1\nmembers: 5\n").devices == ("1",)
    for written, share in ((1, 1.0), ("0.25", 0.25), ("25 %", 0.25), ("100%", 1.0)):
        assert from_yaml(tmp_path, f"user_share: {written}").user_share == share
        assert MonitorConfig.resolve(None, {"user_share": str(written)}).user_share == share


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
        source="host", devices=("0", "0:1", "GPU-1234"), interval=0.05, detail_interval=2.0, metrics_port=9400,
        metrics_address="0.0.0.0", runtime_dir=Path("/run/x"), group="video", capacity=2 << 30, members=(17, 18),
        headroom=512 << 20, user_engines=8, user_share=0.5, log_level="debug",
    )  # fmt: skip


def test_flags_go_before_the_file_and_are_texts(tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path, "interval: 1\nmetrics_port: 1\n", interval="0.5", devices="0,1", members="3, 4", metrics_port=None
    )
    assert (config.interval, config.devices, config.members, config.metrics_port) == (0.5, ("0", "1"), (3, 4), 1)


def test_what_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for text, said in {
        "intervall: 1": "yaml:1: unknown setting 'intervall'; did you mean interval?", "zzz: 1": "known are source, devices",
        "1: 2": "settings.yaml:1: a key must be text, got '1'", "- a": "got list", "a: [": "not valid YAML",
        "interval: 0": "settings.yaml:1: interval must be a number of seconds from 0.001 to 3,600, got 0",
        "interval: fast": "interval must be a number of seconds from 0.001 to 3,600, got 'fast'",
        **dict.fromkeys(("interval: .nan", "interval: true", "interval: [1]"), "number of seconds"),
        "metrics_port: 70000": "a port from 0 to 65,535, got 70000", "metrics_port: http": "got 'http'",
        "metrics_port: true": "a port", "members: [0]": "a process id from 1 to 2,147,483,", "devices: 1.5": "must be a list",
        "capacity: 2 parsecs": "capacity: cannot read",
        "user_engines: 0": "user_engines must be a number of engines from 1 to 100,000, got 0",
        "user_share: 0": "user_share must be a share above 0 and at most 1, such as 0.9 or 90%, got 0",
        "user_share: 1.01": "got 1.01", "user_share: half": "got 'half'", "user_share: .nan": "got nan",
        "user_share: true": "got True", "user_share: [1]": "must be a share",
        "log_level: loud": "one of debug, info, warning, error, got 'loud'",
        "source: 7": "source must be a text, got 7", "group: ''": "group must be a text",
        "token_file: /tmp/token": "no port is served; set metrics_port too",
        "capacity: 64MiB\nheadroom: 64MiB": "headroom (64.00 MiB) leaves nothing of the capacity (64.00 MiB)",
        **dict.fromkeys((  # absurd ones, refused by whatever they come to first
            "runtime_dir: ~nobody-of-that-name/x", 'runtime_dir: "a\\0b"', "interval: 1" + "0" * 400,
            "interval: " + "[" * 3000, "capacity: 1" + "0" * 5000, "capacity: 100000000TiB",
            "capacity: " + "9" * 400 + ".5G", "members: [1" + "0" * 5000 + "]",
        ), ""),
    }.items():  # fmt: skip
        with pytest.raises(ConfigInvalid) as caught:
            from_yaml(tmp_path, text)
        assert said in str(caught.value)

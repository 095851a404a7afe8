"""monitor/config.py and yaml_file.py: what may be said in YAML and by flags, and how the rest is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.errors import ConfigInvalid
from pagetide.monitor.yaml_file import InvalidYaml, parse_yaml, read_yaml


def from_yaml(tmp_path: Path, text: str, **flags: Any) -> MonitorConfig:
    return MonitorConfig.resolve(written(tmp_path, text), flags)


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
        "intervall: 1": "unknown key 'intervall'; did you mean interval?", "zzz: 1": "known are source, devices",
        "1: 2": "unknown key 1", "- a": "must be a mapping", "a: [": "not valid YAML",
        "interval: 0": "interval must be between 0.001 and 3600 seconds, got 0",
        "interval: fast": "interval must be a number of seconds, such as 0.02 or 20ms, got 'fast'",
        **dict.fromkeys(("interval: .nan", "interval: true", "interval: [1]"), "number of seconds"),
        "metrics_port: 70000": "a port between 0 and 65535, got 70000", "metrics_port: http": "got 'http'",
        "metrics_port: true": "a port", "members: [0]": "a process id between 1", "devices: 1.5": "must be a list",
        "capacity: 2 parsecs": "capacity: cannot read",
        "user_engines: 0": "user_engines must be a number of engines between 1 and 100000, got 0",
        "user_share: 0": "user_share must be a share above 0 and at most 1, such as 0.9 or 90%, got 0",
        "user_share: 1.01": "got 1.01", "user_share: half": "got 'half'", "user_share: .nan": "got nan",
        "user_share: true": "got True", "user_share: [1]": "must be a share",
        "log_level: loud": "one of debug, info, warning, error, got 'loud'",
        "source: 7": "source must be a text, got 7", "group: ''": "group must be a text",
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


def laughs(levels: int, fold: int = 10, merge: bool = False) -> str:
    """A few lines that stand for `fold ** levels` values."""
    first = "a0: &a0 {k: v}" if merge else "a0: &a0 [v]"
    lines = [first]
    for i in range(1, levels + 1):
        aliases = ", ".join([f"*a{i - 1}"] * fold)
        lines.append(f"a{i}: &a{i} {{<<: [{aliases}]}}" if merge else f"a{i}: &a{i} [{aliases}]")
    return "\n".join(lines)


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, "utf-8")
    return path


def test_values_and_the_lines_of_their_keys(tmp_path: Path) -> None:
    node, content = read_yaml(written(tmp_path, "# of a test\na: &a [1, 2]\nb: {c: *a, d: 2026-01-02}\n"))
    assert content == yaml.safe_load("a: [1, 2]\nb: {c: [1, 2], d: 2026-01-02}")
    assert isinstance(node, yaml.MappingNode)
    assert [key.start_mark.line for key, _ in node.value] == [1, 2]
    assert read_yaml(written(tmp_path, "# nothing")) == (None, None)
    assert parse_yaml("[1, a]") == [1, "a"] and parse_yaml("") is None


def test_only_small_regular_files_of_text_are_read(tmp_path: Path) -> None:
    """A FIFO without a writer would be waited for, a device may have no end, a file may be larger than the memory."""
    pipe, large = tmp_path / "pipe", written(tmp_path, "")
    os.mkfifo(pipe)
    os.truncate(large, 1 << 40)
    too_much = "more than 1 MiB, which is too much for settings"
    for file, said in ((pipe, "not a regular file"), (Path("/dev/zero"), "not a regular file"), (large, too_much)):
        with pytest.raises(InvalidYaml, match=f"^{file}: {said}"):
            read_yaml(file)
    with pytest.raises(IsADirectoryError):
        read_yaml(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigInvalid, match=r"not valid YAML: .*utf-8"):
        MonitorConfig.resolve(tmp_path / "binary", {})


@pytest.mark.parametrize("merge", [False, True])
def test_aliases_of_aliases_are_refused_before_they_are_followed(tmp_path: Path, merge: bool) -> None:
    """Twelve lines for 10 ** 12 values."""
    path = written(tmp_path, laughs(12, merge=merge))
    with pytest.raises(
        InvalidYaml, match=rf"{path}:\d+: not valid YAML: it stands for more than 100,000 values, as al"
    ):
        read_yaml(path)
    with pytest.raises(InvalidYaml, match="more than 100,000 values"):
        parse_yaml(path.read_text())
    with pytest.raises(ConfigInvalid, match=r"the configuration .*more than 100,000 values"):
        MonitorConfig.resolve(path, {})


def test_what_is_no_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    for text, said in {
        "a: &a [*a]": "settings.yaml:1: not valid YAML: an alias stands within what it repeats",
        "b: 1\na: &a {<<: *a}": "settings.yaml:2: not valid YAML: an alias stands within what it repeats",
        "a: *b": "settings.yaml:1: not valid YAML: found undefined alias",
        "--- 1\n--- 2": "not valid YAML: but found another document",
        "[" * 5000: "not valid YAML: maximum recursion depth exceeded",
        "a: 2026-13-99": "not valid YAML: month must be in 1..12",
        "a: !!python/object:os.system {}": "could not determine a constructor",
    }.items():
        with pytest.raises(InvalidYaml) as refused:
            read_yaml(written(tmp_path, text))
        assert said in str(refused.value)

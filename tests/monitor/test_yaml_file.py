"""YAML files of settings: lines, sizes, and aliases that stand for more than there is memory for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from pagetide.monitor import yaml_file
from pagetide.monitor.config import ConfigInvalid, MonitorConfig
from pagetide.monitor.yaml_file import InvalidYaml, parse_yaml, read_yaml


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


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A FIFO without a writer would be waited for, and a device may have no end."""
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InvalidYaml, match=f"^{file}: not a regular file"):
            read_yaml(file)
    with pytest.raises(IsADirectoryError):
        read_yaml(tmp_path)


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


def test_each_node_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    count = yaml_file._count

    def counted(node: yaml.Node, known: dict[int, int]) -> int:
        nonlocal calls
        calls += 1
        return count(node, known)

    monkeypatch.setattr(yaml_file, "_count", counted)
    _, content = read_yaml(written(tmp_path, laughs(4, fold=9)))
    assert len(content) == 5
    assert calls == 1 + 5 * 2 + 1 + 4 * 9  # the document; keys and lists; the one value; the aliases


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "settings.yaml:1: not valid YAML: an alias stands within what it repeats"),
        ("b: 1\na: &a {<<: *a}", "settings.yaml:2: not valid YAML: an alias stands within what it repeats"),
        ("a: [", "settings.yaml:1: not valid YAML"),
        ("a: *b", "settings.yaml:1: not valid YAML: found undefined alias"),
        ("--- 1\n--- 2", "not valid YAML: but found another document"),
        ("[" * 5000, "not valid YAML: maximum recursion depth exceeded"),
        ("a: 2026-13-99", "not valid YAML: month must be in 1..12"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidYaml) as refused:
        read_yaml(written(tmp_path, text))
    assert said in str(refused.value)


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.touch()
    os.truncate(file, 1 << 40)  # more than there is memory
    with pytest.raises(InvalidYaml, match=f"^{file}: more than 1 MiB, which is too much for settings"):
        read_yaml(file)

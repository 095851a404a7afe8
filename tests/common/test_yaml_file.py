"""YAML files that others wrote: checked, with the lines of their keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from pagetide.common.yaml_file import InvalidYaml, parse_yaml, read_yaml


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
    with pytest.raises(InvalidYaml, match=r"not valid YAML: .*utf-8"):
        read_yaml(tmp_path / "binary")


@pytest.mark.parametrize("merge", [False, True])
def test_aliases_of_aliases_are_refused_before_they_are_followed(tmp_path: Path, merge: bool) -> None:
    """Twelve lines for 10 ** 12 values."""
    path = written(tmp_path, laughs(12, merge=merge))
    with pytest.raises(InvalidYaml, match=rf"{path}:\d+: not valid YAML: it stands for more than 100,000 values, as al"):
        read_yaml(path)
    with pytest.raises(InvalidYaml, match="more than 100,000 values"):
        parse_yaml(path.read_text())


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

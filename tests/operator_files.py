"""What is checked of all files for operators: queries of Prometheus, dashboards of Grafana, units of systemd."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def labels_in(expression: str) -> set[str]:
    """Labels in matchers and in the lists of on, by, without, ignoring, group_left and group_right."""
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*[\"%]", expression)
    listed = re.findall(r"\b(?:on|by|without|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {*matched, *(label.strip() for names in listed for label in names.split(","))}


def targets_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The queries of a dashboard."""
    return [target for panel in board["panels"] for target in panel.get("targets", ())]


def check_layout(panels: list[dict[str, Any]]) -> None:
    """Panels begin with a row, do not overlap, and have ids and titles of their own."""
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert panels[0]["type"] == "row"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)


def check_data_source(board: dict[str, Any]) -> None:
    """Everything asks the data source that the user chose."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    chosen, *others = board["templating"]["list"]
    assert (chosen["name"], chosen["type"], chosen["query"]) == ("datasource", "datasource", "prometheus")
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(thing["datasource"] == source for thing in [*others, *panels, *targets_of(board)])


def promtool(*arguments: str, folder: Path) -> None:
    """Run promtool, which has to agree."""
    run = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def promtool_reads(expressions: Iterable[str], folder: Path) -> None:
    """Every query is one, as promtool sees it."""
    rules = [
        {"record": f"query:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(expressions)
    ]
    (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", folder=folder)


def unit_settings(unit: Path) -> dict[str, str]:
    """Key -> value of a unit whose keys come once each, which is asserted."""
    pairs = re.findall(r"^(\w+)=(.*)$", unit.read_text("utf-8"), re.MULTILINE)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def unit_command(unit: Path) -> list[str]:
    """The words of the command that a unit starts."""
    return shlex.split(unit_settings(unit)["ExecStart"])


def check_with_systemd(unit: Path, name: str, manager: str, folder: Path) -> None:
    """systemd has nothing to say of a unit whose program would be there."""
    text = unit.read_text("utf-8").replace(unit_settings(unit)["ExecStart"], "/bin/true")
    path = folder / f"{name}.service"
    path.write_text(text)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    verify = ["systemd-analyze", manager, "verify", str(path)]
    run = subprocess.run(verify, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in (run.stdout + run.stderr).splitlines() if str(path) in line or name in line]
    assert (run.returncode, said) == (0, [])

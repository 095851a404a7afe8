"""What is checked of all files for operators: queries of Prometheus, dashboards of Grafana, units of systemd."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

Exported = Mapping[str, Collection[str]]  # metric -> labels
TARGET_LABELS = {"job", "instance"}  # Prometheus adds them
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def labels_in(expression: str) -> set[str]:
    """Labels in matchers and in the lists of on, by, without, ignoring, group_left and group_right."""
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*[\"%]", expression)
    listed = re.findall(r"\b(?:on|by|without|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {*matched, *(label.strip() for names in listed for label in names.split(","))}


@dataclass(frozen=True)
class OperatorFiles:
    """A folder of files for operators.

    Attributes:
        metric: A pattern of the metrics' names in queries.
        durations: A pattern of how long alerts wait.
    """

    folder: Path
    metric: str
    durations: str

    def load(self, name: str) -> Any:
        text = (self.folder / name).read_text("utf-8")
        return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)

    @property
    def board(self) -> dict[str, Any]:
        """The dashboard."""
        found: dict[str, Any] = self.load("grafana-dashboard.json")
        return found

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [rule for group in self.load("alerts.yml")["groups"] for rule in group["rules"]]

    @property
    def targets(self) -> list[dict[str, Any]]:
        """The queries of the dashboard."""
        return targets_of(self.board)

    def metrics_in(self, expression: str) -> set[str]:
        return set(re.findall(rf"\b(?:{self.metric}|up)\b", expression))

    def labels_of(self, expression: str, exported: Exported) -> set[str]:
        """The labels of all metrics in a query."""
        return TARGET_LABELS.union(*(exported.get(name, ()) for name in self.metrics_in(expression)))

    def unknown_in(self, expression: str, exported: Exported) -> set[str]:
        """Names in a query that are neither a metric that is exported nor a label of one in the query."""
        labels = labels_in(expression) - self.labels_of(expression, exported)
        return (self.metrics_in(expression) - exported.keys()) | labels

    def check_alerts(self, exported: Exported) -> None:
        """Alerts ask for what is exported and say what is wrong."""
        for rule in self.alerts:
            name, expression = rule["alert"], rule["expr"]
            assert self.metrics_in(expression) and self.unknown_in(expression, exported) == set(), name
            assert rule["labels"]["severity"] in ("critical", "warning"), name
            assert re.fullmatch(self.durations, rule["for"]), f"a flicker is no alarm: {name}"
            text = rule["annotations"]["summary"] + rule["annotations"]["description"]
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= self.labels_of(expression, exported), name
            assert not re.search(r"\$value\s*}}", text), f"a bare number is for no person: {name}"

    def check_alerts_are_documented_and_tested(self, document: str, never_quiet: frozenset[str] = frozenset()) -> None:
        names = {rule["alert"] for rule in self.alerts}
        assert len(names) == len(self.alerts)
        rows = re.findall(r"^\| `((?:Pagetide|Vram)\w+)` \| (\w+) \| (\w+) \|", document, re.MULTILINE)
        assert rows == [(rule["alert"], rule["labels"]["severity"], rule["for"]) for rule in self.alerts]
        tests = [case for test in self.load("alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
        assert {case["alertname"] for case in tests if case.get("exp_alerts")} == names
        quiet = {case["alertname"] for case in tests if not case.get("exp_alerts")}
        assert names >= quiet >= names - never_quiet

    def check_job(self, port: int) -> None:
        """One port and one job are meant everywhere."""
        config = self.load("prometheus.yml")
        (job,) = config["scrape_configs"]
        assert config["rule_files"] == ["alerts.yml"]
        assert [one for static in job["static_configs"] for one in static["targets"]] == [f"127.0.0.1:{port}"]
        queries = [one["expr"] for one in (*self.alerts, *self.targets)]
        assert {name for query in queries for name in re.findall(r'job="([^"]*)"', query)} == {job["job_name"]}

    def check_board(self, exported: Exported, variables: set[str]) -> set[str]:
        """The dashboard is laid out in rows and asks for what is exported. Returns the metrics that it shows."""
        check_layout(self.board["panels"])
        check_data_source(self.board)
        for target in self.targets:
            expression = target["expr"]
            assert self.unknown_in(expression, exported) == set(), expression
            shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            assert shown <= self.labels_of(expression, exported), expression
            assert set(re.findall(r"\$(\w+)", expression)) <= {*variables, "__rate_interval"}, expression
        return set().union(*(self.metrics_in(target["expr"]) for target in self.targets))

    def check_with_promtool(self, folder: Path) -> None:
        """promtool accepts the files, and can read every query of the dashboard."""
        promtool("check", "config", "prometheus.yml", folder=self.folder)
        for what in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
            promtool(*what, folder=self.folder)
        promtool_reads([target["expr"] for target in self.targets], folder)


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
        {"record": f"query:{number}", "expr": text.replace("$__rate_interval", "1m")} for number, text in enumerate(expressions)
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

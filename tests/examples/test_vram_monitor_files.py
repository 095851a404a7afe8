"""The files in examples/vram-monitor: they parse, agree with each other and with the code, name nothing that is not there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_files import (
    check_data_source,
    check_layout,
    check_with_systemd,
    labels_in,
    needs_promtool,
    needs_systemd,
    promtool,
    promtool_reads,
    targets_of,
    unit_command,
    unit_settings,
)  # fmt: skip
from prometheus_client import CollectorRegistry, ProcessCollector

from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.metrics import METRICS
from pagetide.vram_monitor import parser

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "vram-monitor"
DOCUMENT = (ROOT / "docs" / "monitor.md").read_text("utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

# What `vram-monitor serve` takes: in the YAML file, and on the command line.
KEYS = frozenset(field.name for field in dataclasses.fields(MonitorConfig))
(COMMANDS,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
OPTIONS = frozenset(COMMANDS.choices["serve"]._option_string_actions)

MACHINE_UNIT, USER_UNIT = "vram-monitor.service", "vram-monitor.user.service"
SEVERITIES = {"critical", "warning"}
TARGET_LABELS = {"job", "instance"}  # Prometheus adds them


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


# ---- what there is to name ----------------------------------------------------------------------


def exported() -> dict[str, frozenset[str]]:
    """Metric -> labels, of everything on the page and of what Prometheus itself knows of a target."""
    of_process = {
        sample.name: frozenset(sample.labels)
        for family in ProcessCollector(registry=CollectorRegistry()).collect()
        for sample in family.samples
    }
    return of_process | {metric.name: frozenset(metric.labels) for metric in METRICS} | {"up": frozenset()}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vram_\w+|process_\w+|up)\b", expression))


def unknown_in(expression: str) -> set[str]:
    """Names in a query that are neither a metric that is exported nor a label of one in the query."""
    there, used = exported(), metrics_in(expression)
    known = TARGET_LABELS.union(*(there.get(name, ()) for name in used))
    return (used - there.keys()) | (labels_in(expression) - known)


def test_unknown_names_are_seen() -> None:
    assert unknown_in("vram_device_up == 0") == set()
    assert unknown_in("rate(vram_poll_total[5m])") == {"vram_poll_total"}
    assert unknown_in('vram_device_up{gpu="0"}') == {"gpu"}
    assert unknown_in("sum by (uuid, host) (vram_device_up)") == {"host"}
    assert unknown_in("vram_device_up * on (uuid) group_left (index) vram_device_info") == set()
    assert unknown_in("vram_device_up * on (uuid) group_left (serial) vram_device_info") == {"serial"}


# ---- alert rules --------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_says_what_is_wrong(rule: dict[str, Any]) -> None:
    assert unknown_in(rule["expr"]) == set()
    assert metrics_in(rule["expr"])
    assert rule["labels"]["severity"] in SEVERITIES
    assert re.fullmatch(r"\d+[sm]", rule["for"]), "a flicker is no alarm"
    summary, description = rule["annotations"]["summary"], rule["annotations"]["description"]
    known = TARGET_LABELS.union(*(exported()[name] for name in metrics_in(rule["expr"])))
    assert set(re.findall(r"\$labels\.(\w+)", summary + description)) <= known
    assert unknown_in(description) == set()  # it may hold a query
    if "$value" in summary + description:
        assert not re.search(r"\$value\s*}}", summary + description), "a bare number is for no person"


def test_alerts_are_documented_and_tested_each_of_them() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert re.findall(r"^\| `(Vram\w+)` \| (\w+) \| (\w+) \|", DOCUMENT, re.MULTILINE) == [
        (rule["alert"], rule["labels"]["severity"], rule["for"]) for rule in alerts()
    ]
    tests = [case for test in load("alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tests if case.get("exp_alerts")} == set(names)
    assert {case["alertname"] for case in tests if not case.get("exp_alerts")} >= set(names) - {"VramPollsFail"}


def test_the_rules_look_for_the_job_that_prometheus_scrapes() -> None:
    (job,) = load("prometheus.yml")["scrape_configs"]
    queries = [rule["expr"] for rule in alerts()] + [target["expr"] for target in dashboard_targets()]
    jobs = {name for query in queries for name in re.findall(r'job="([^"]*)"', query)}
    assert jobs == {job["job_name"]}
    assert load("prometheus.yml")["rule_files"] == ["alerts.yml"]


@needs_promtool
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")]
)  # fmt: skip
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    promtool(*arguments, folder=FOLDER)


# ---- the dashboard ------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text("utf-8"))
    return board


def dashboard_targets() -> list[dict[str, Any]]:
    return targets_of(dashboard())


def test_the_dashboard_asks_for_what_is_exported() -> None:
    board = dashboard()
    for target in dashboard_targets():
        assert unknown_in(target["expr"]) == set(), target["expr"]
        shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        assert shown <= TARGET_LABELS.union(*(exported()[name] for name in metrics_in(target["expr"])))
        assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"uuid", "__rate_interval"}
    (uuid,) = (variable for variable in board["templating"]["list"] if variable["name"] == "uuid")
    assert uuid["definition"] == uuid["query"]["query"] == "label_values(vram_device_info, uuid)"


def test_all_of_the_dashboard_asks_the_data_source_that_the_user_chose() -> None:
    check_data_source(dashboard())
    assert [variable["name"] for variable in dashboard()["templating"]["list"]] == ["datasource", "uuid"]


def test_every_metric_of_a_device_is_on_the_dashboard() -> None:
    """But those that say the same as another one that is."""
    shown = set().union(*(metrics_in(target["expr"]) for target in dashboard_targets()))
    assert {metric.name for metric in METRICS} - shown == {
        "vram_memory_stale",
        "vram_detail_up",
        "vram_detail_age_seconds",
    }


def test_the_panels_are_laid_out_in_rows_without_overlap() -> None:
    check_layout(dashboard()["panels"])


@needs_promtool
def test_promtool_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    promtool_reads([target["expr"] for target in dashboard_targets()], tmp_path)


# ---- the sample configuration -------------------------------------------------------------------


def test_the_sample_configuration_is_accepted_and_shows_every_key() -> None:
    text = (FOLDER / "vram-monitor.yaml").read_text("utf-8")
    shown = re.findall(r"^(?:# )?([a-z_]+):(?: |$)", text, re.MULTILINE)
    assert len(set(shown)) == len(shown)
    assert set(shown) == KEYS
    sample, default = MonitorConfig.resolve(FOLDER / "vram-monitor.yaml", {}), MonitorConfig()
    changed = {key for key in KEYS if getattr(sample, key) != getattr(default, key)}
    assert changed == {"group", "metrics_port"}
    assert default.metrics_port is None, "a comment in the sample says so"


def test_what_is_commented_out_in_the_sample_is_valid_too(tmp_path: Path) -> None:
    text = (FOLDER / "vram-monitor.yaml").read_text("utf-8")
    (tmp_path / "all.yaml").write_text(re.sub(r"^# (?=[a-z_]+: )", "", text, flags=re.MULTILINE))
    config = MonitorConfig.resolve(tmp_path / "all.yaml", {})
    assert all(getattr(config, key) not in (None, ()) for key in KEYS - {"devices"})


def test_one_port_is_meant_everywhere() -> None:
    port = load("vram-monitor.yaml")["metrics_port"]
    (job,) = load("prometheus.yml")["scrape_configs"]
    assert [target for static in job["static_configs"] for target in static["targets"]] == [f"127.0.0.1:{port}"]
    assert command(USER_UNIT)[2:] == ["--metrics-port", str(port)]
    assert f"127.0.0.1:{port}/metrics" in DOCUMENT


# ---- systemd ------------------------------------------------------------------------------------


def settings(unit: str) -> dict[str, str]:
    return unit_settings(FOLDER / unit)


def command(unit: str) -> list[str]:
    return unit_command(FOLDER / unit)


@pytest.mark.parametrize("unit", [MACHINE_UNIT, USER_UNIT])
def test_a_unit_starts_the_monitor_with_options_that_exist(unit: str) -> None:
    program, verb, *arguments = command(unit)
    assert program.startswith(("/", "%h/"))
    assert (program.rpartition("/")[2], verb) == ("vram-monitor", "serve")
    assert "vram-monitor" in PYPROJECT["project"]["scripts"]
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    assert set(options) <= OPTIONS
    assert len(arguments) == 2 * len(options)


@pytest.mark.parametrize("unit", [MACHINE_UNIT, USER_UNIT])
def test_a_unit_gives_the_directory_reloads_and_restarts(unit: str) -> None:
    unit_settings = settings(unit)
    assert unit_settings["Type"] == "exec"
    assert unit_settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert (unit_settings["Restart"], unit_settings["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert unit_settings["RuntimeDirectory"] == "pagetide"
    assert unit_settings["RuntimeDirectoryMode"] == ("0750" if unit == MACHINE_UNIT else "0700")
    assert unit_settings["RuntimeDirectoryPreserve"] == "yes"


def test_the_group_of_the_unit_is_the_one_that_may_read() -> None:
    assert settings(MACHINE_UNIT)["Group"] == load("vram-monitor.yaml")["group"]


@pytest.mark.parametrize("unit", [MACHINE_UNIT, USER_UNIT])
def test_a_unit_hides_nothing_that_the_monitor_reads(unit: str) -> None:
    """The driver's device files, other users' processes, the network, and the machine's own memory."""
    hiding = {
        "PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProtectProc", "ProcSubset", "PrivateUsers",
        "PrivatePIDs", "PrivateNetwork", "MemoryMax", "MemoryHigh", "RootDirectory", "DynamicUser",
    }  # fmt: skip
    assert not hiding & settings(unit).keys()


@needs_systemd
@pytest.mark.parametrize(("unit", "manager"), [(MACHINE_UNIT, "--system"), (USER_UNIT, "--user")])
def test_systemd_has_nothing_to_say(tmp_path: Path, unit: str, manager: str) -> None:
    check_with_systemd(FOLDER / unit, "vram-monitor", manager, tmp_path)


# ---- compose ------------------------------------------------------------------------------------


def test_the_containers_are_given_files_that_exist() -> None:
    services = load("compose.yaml")["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount.startswith("./")]
    assert {Path(mount.split(":")[0]).name for mount in mounts} == {
        "vram-monitor.yaml",
        "prometheus.yml",
        "alerts.yml",
        "grafana-dashboard.json",
    }
    assert all((FOLDER / mount.split(":")[0]).is_file() and mount.endswith(":ro") for mount in mounts)


def test_the_monitors_container_sees_the_machine() -> None:
    monitor = load("compose.yaml")["services"]["vram-monitor"]
    assert monitor["pid"] == "host"
    assert "/run/pagetide:/run/pagetide" in monitor["volumes"]
    (device,) = monitor["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", "all")
    assert "utility" in device["capabilities"]
    assert "limits" not in monitor["deploy"]["resources"]
    assert monitor["command"][:2] == ["serve", "--config"]
    assert f"./vram-monitor.yaml:{monitor['command'][2]}:ro" in monitor["volumes"]


def test_every_container_listens_to_this_machine_alone() -> None:
    services = load("compose.yaml")["services"]
    assert {service["network_mode"] for service in services.values()} == {"host"}
    assert not any("ports" in service for service in services.values())
    assert load("vram-monitor.yaml")["metrics_address"] == "127.0.0.1"
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    configs = load("compose.yaml")["configs"]
    (source,) = yaml.safe_load(configs["datasource"]["content"])["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    (provider,) = yaml.safe_load(configs["dashboards"]["content"])["providers"]
    assert (
        f"./grafana-dashboard.json:{provider['options']['path']}/vram-monitor.json:ro" in services["grafana"]["volumes"]
    )


def test_the_monitors_image_is_built_from_the_container_file_for_the_group() -> None:
    build = load("compose.yaml")["services"]["vram-monitor"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    text = (ROOT / build["dockerfile"]).read_text()
    assert f"AS {build['target']}\n" in text
    assert all(f"\nARG {name}=" in text for name in build["args"])

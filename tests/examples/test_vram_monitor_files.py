"""The files in examples/vram-monitor: they parse, agree with each other and with the code, name nothing that is not there."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from operator_files import OperatorFiles, check_with_systemd, needs_promtool, needs_systemd, unit_command, unit_settings
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
FILES = OperatorFiles(FOLDER, r"vram_\w+|process_\w+", r"\d+[sm]")
load = FILES.load


def exported() -> dict[str, frozenset[str]]:
    """Metric -> labels, of everything on the page and of what Prometheus itself knows of a target."""
    families = ProcessCollector(registry=CollectorRegistry()).collect()
    of_process = {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}
    return of_process | {metric.name: frozenset(metric.labels) for metric in METRICS} | {"up": frozenset()}


def test_an_alert_asks_for_what_is_exported_and_says_what_is_wrong() -> None:
    FILES.check_alerts(exported())
    for rule in FILES.alerts:  # a description may hold a query
        assert FILES.unknown_in(rule["annotations"]["description"], exported()) == set(), rule["alert"]


def test_alerts_are_documented_and_tested_each_of_them() -> None:
    FILES.check_alerts_are_documented_and_tested(DOCUMENT, frozenset({"VramPollsFail"}))


@needs_promtool
def test_promtool_agrees(tmp_path: Path) -> None:
    FILES.check_with_promtool(tmp_path)


def test_the_dashboard_asks_for_what_is_exported_and_shows_all_of_it() -> None:
    """But what says the same as another metric that is shown."""
    shown = FILES.check_board(exported(), {"uuid"})
    same = {"vram_memory_stale", "vram_detail_up", "vram_detail_age_seconds"}
    assert {metric.name for metric in METRICS} - shown == same
    _, uuid = FILES.board["templating"]["list"]
    assert uuid["name"] == "uuid"
    assert uuid["definition"] == uuid["query"]["query"] == "label_values(vram_device_info, uuid)"


def test_the_sample_configuration_is_accepted_and_shows_every_key(tmp_path: Path) -> None:
    text = (FOLDER / "vram-monitor.yaml").read_text("utf-8")
    shown = re.findall(r"^(?:# )?([a-z_]+):(?: |$)", text, re.MULTILINE)
    assert len(set(shown)) == len(shown)
    assert set(shown) == KEYS
    sample, default = MonitorConfig.resolve(FOLDER / "vram-monitor.yaml", {}), MonitorConfig()
    changed = {key for key in KEYS if getattr(sample, key) != getattr(default, key)}
    assert changed == {"group", "metrics_port"}
    assert default.metrics_port is None, "a comment in the sample says so"
    # What is commented out in it is valid too.
    (tmp_path / "all.yaml").write_text(re.sub(r"^# (?=[a-z_]+: )", "", text, flags=re.MULTILINE))
    config = MonitorConfig.resolve(tmp_path / "all.yaml", {})
    assert all(getattr(config, key) not in (None, ()) for key in KEYS - {"devices"})


def test_one_port_is_meant_everywhere() -> None:
    port = load("vram-monitor.yaml")["metrics_port"]
    FILES.check_job(port)
    assert unit_command(FOLDER / USER_UNIT)[2:] == ["--metrics-port", str(port)]
    assert f"127.0.0.1:{port}/metrics" in DOCUMENT


# What would hide the driver's device files, other users' processes, the network, or the machine's own memory.
HIDING = {
    "PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "ProtectProc", "ProcSubset", "PrivateUsers",
    "PrivatePIDs", "PrivateNetwork", "MemoryMax", "MemoryHigh", "RootDirectory", "DynamicUser",
}  # fmt: skip


@pytest.mark.parametrize("unit", [MACHINE_UNIT, USER_UNIT])
def test_a_unit_starts_the_monitor_and_hides_nothing_from_it(unit: str) -> None:
    program, verb, *arguments = unit_command(FOLDER / unit)
    assert program.startswith(("/", "%h/"))
    assert (program.rpartition("/")[2], verb) == ("vram-monitor", "serve")
    assert "vram-monitor" in PYPROJECT["project"]["scripts"]
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    assert set(options) <= OPTIONS and len(arguments) == 2 * len(options)
    settings = unit_settings(FOLDER / unit)
    expected = {
        "Type": "exec", "ExecReload": "/bin/kill -HUP $MAINPID", "Restart": "on-failure", "RestartPreventExitStatus": "2",
        "RuntimeDirectory": "pagetide", "RuntimeDirectoryPreserve": "yes",
        "RuntimeDirectoryMode": "0750" if unit == MACHINE_UNIT else "0700",
    }  # fmt: skip
    assert settings.items() >= expected.items() and not HIDING & settings.keys()
    assert unit == USER_UNIT or settings["Group"] == load("vram-monitor.yaml")["group"], "the one that may read"


@needs_systemd
@pytest.mark.parametrize(("unit", "manager"), [(MACHINE_UNIT, "--system"), (USER_UNIT, "--user")])
def test_systemd_has_nothing_to_say(tmp_path: Path, unit: str, manager: str) -> None:
    check_with_systemd(FOLDER / unit, "vram-monitor", manager, tmp_path)


def test_the_containers_are_given_files_that_exist_and_the_monitors_sees_the_machine() -> None:
    services = load("compose.yaml")["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount.startswith("./")]
    files = {"vram-monitor.yaml", "prometheus.yml", "alerts.yml", "grafana-dashboard.json"}
    assert {Path(mount.split(":")[0]).name for mount in mounts} == files
    assert all((FOLDER / mount.split(":")[0]).is_file() and mount.endswith(":ro") for mount in mounts)
    monitor = services["vram-monitor"]
    assert monitor["pid"] == "host" and "/run/pagetide:/run/pagetide" in monitor["volumes"]
    (device,) = monitor["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", "all") and "utility" in device["capabilities"]
    assert "limits" not in monitor["deploy"]["resources"]
    assert monitor["command"][:2] == ["serve", "--config"]
    assert f"./vram-monitor.yaml:{monitor['command'][2]}:ro" in monitor["volumes"]
    build = monitor["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    text = (ROOT / build["dockerfile"]).read_text()
    assert f"AS {build['target']}\n" in text and all(f"\nARG {name}=" in text for name in build["args"])


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
    board = f"./grafana-dashboard.json:{provider['options']['path']}/vram-monitor.json:ro"
    assert board in services["grafana"]["volumes"]

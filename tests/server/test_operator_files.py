"""The files in examples/serve: they are accepted, agree with each other, and name nothing that a real server does not have."""

from __future__ import annotations

import json
import re
from dataclasses import fields
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
from servers import WITH_EVERYTHING, ServerProcess

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from pagetide import cli  # noqa: E402
from pagetide.engine.config import EngineConfig  # noqa: E402
from pagetide.server.config import ENGINE_SETTINGS, NAMES, ServeConfig  # noqa: E402
from pagetide.server.engine_client import KILL_AFTER_S  # noqa: E402
from pagetide.server.keys import read_keys  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "serve"
UNIT = FOLDER / "pagetide-serve.service"
DOCUMENT = (ROOT / "docs" / "serve.md").read_text("utf-8")
TARGET_LABELS = {"job", "instance"}  # Prometheus adds them
UNSEEN = {  # not on the page of a server that is well, and not on the dashboard either
    "pagetide_build_info", "pagetide_engine_info",
}  # fmt: skip


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text("utf-8"))
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Metric -> labels, of the page of a real server that has answered and refused."""
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(WITH_EVERYTHING, log, OMP_NUM_THREADS="1") as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json={"prompt": "The sea", "max_tokens": 4}, timeout=120).status_code == 200
        assert httpx.post(url, json={"prompt": "The sea", "n": 0}).status_code == 400
        page = httpx.get(f"{server.url}/metrics").text
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:\w+|pagetide_\w+|http_\w+|process_\w+|up)\b", expression))


def unknown_in(expression: str, exported: dict[str, set[str]]) -> set[str]:
    """Names in a query that are neither a metric that is exported nor a label of one in the query."""
    used = metrics_in(expression)
    known = TARGET_LABELS.union(*(exported.get(name, ()) for name in used))
    return (used - exported.keys()) | (labels_in(expression) - known)


def test_unknown_names_are_seen() -> None:
    exported = {"vllm:num_requests_running": {"model_name"}, "up": set[str]()}
    assert unknown_in('max by (job, model_name) (vllm:num_requests_running{model_name="m"})', exported) == set()
    assert unknown_in("vllm:num_request_running", exported) == {"vllm:num_request_running"}
    assert unknown_in('vllm:num_requests_running{model="m"}', exported) == {"model"}


# ---- alerts and the dashboard -------------------------------------------------------------------


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_says_what_is_wrong(
    rule: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    assert metrics_in(rule["expr"]) and unknown_in(rule["expr"], exported) == set()
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"\d+m", rule["for"]), "a flicker is no alarm"
    text = rule["annotations"]["summary"] + rule["annotations"]["description"]
    known = TARGET_LABELS.union(*(exported[name] for name in metrics_in(rule["expr"])))
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= known
    assert metrics_in(text) <= {name.removesuffix("_count") for name in exported if name.endswith("_count")}
    assert not re.search(r"\$value\s*}}", text), "a bare number is for no person"


def test_alerts_are_documented_and_tested_each_of_them() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert re.findall(r"^\| `(Pagetide\w+)` \| (\w+) \| (\w+) \|", DOCUMENT, re.MULTILINE) == [
        (rule["alert"], rule["labels"]["severity"], rule["for"]) for rule in alerts()
    ]
    tests = [case for test in load("alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tests if case.get("exp_alerts")} == set(names)
    assert {case["alertname"] for case in tests if not case.get("exp_alerts")} == set(names)


def test_one_port_and_one_job_are_meant_everywhere() -> None:
    (job,) = load("prometheus.yml")["scrape_configs"]
    assert load("prometheus.yml")["rule_files"] == ["alerts.yml"]
    assert [target for static in job["static_configs"] for target in static["targets"]] == [
        f"127.0.0.1:{load('serve.yaml')['port']}"
    ]
    queries = [rule["expr"] for rule in alerts()] + [target["expr"] for target in targets_of(board())]
    assert {name for query in queries for name in re.findall(r'job="([^"]*)"', query)} == {job["job_name"]}
    assert load("serve.yaml")["open_metrics"], "Prometheus has no key"


def test_the_dashboard_asks_for_what_is_exported(exported: dict[str, set[str]]) -> None:
    for target in targets_of(board()):
        assert unknown_in(target["expr"], exported) == set(), target["expr"]
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= TARGET_LABELS.union(*(exported[name] for name in metrics_in(target["expr"])))
        assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"instance", "model_name", "__rate_interval"}
    for variable in board()["templating"]["list"][1:]:
        metric, label = re.findall(r"label_values\((\w+).*, (\w+)\)", variable["definition"])[0]
        assert metric in exported and label == variable["name"] and variable["query"]["query"] == variable["definition"]


def test_every_metric_of_pagetide_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = set().union(*(metrics_in(target["expr"]) for target in targets_of(board())))
    assert {name for name in exported if name.startswith("pagetide_")} - shown == UNSEEN


def test_the_dashboard_is_laid_out_in_rows() -> None:
    check_data_source(board())
    check_layout(board()["panels"])


@needs_promtool
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")]
)  # fmt: skip
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    promtool(*arguments, folder=FOLDER)


@needs_promtool
def test_promtool_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    promtool_reads([target["expr"] for target in targets_of(board())], tmp_path)


# ---- settings and keys --------------------------------------------------------------------------


def test_the_settings_are_accepted_and_show_every_key(tmp_path: Path) -> None:
    text = (FOLDER / "serve.yaml").read_text("utf-8")
    keys = {field.name for field in fields(ServeConfig)}
    shown = re.findall(r"^(?:# )?([a-z_]+):(?: |$)", text, re.MULTILINE)
    assert len(set(shown)) == len(shown) and set(shown) == keys | set(ENGINE_SETTINGS) | set(NAMES)
    sample, default = ServeConfig.resolve({}, {}, FOLDER / "serve.yaml"), ServeConfig()
    changed = {key for key in keys if getattr(sample, key) != getattr(default, key)}
    assert changed == {"host", "api_key_file", "open_metrics", "models"}
    for model in sample.models:
        EngineConfig.resolve(model.reference, **dict(model.engine))
    (tmp_path / "all.yaml").write_text(re.sub(r"^# (?=(?!model:)[a-z_]+: )", "", text, flags=re.MULTILINE))
    whole = ServeConfig.resolve({}, {}, tmp_path / "all.yaml")
    assert all(getattr(whole, key) not in (None, ()) for key in keys)
    for model in whole.models:
        assert set(ENGINE_SETTINGS) <= set(model.engine)
        EngineConfig.resolve(model.reference, **dict(model.engine) | {"device": "cpu"})


def test_the_keys_are_accepted_and_let_the_server_be_reached() -> None:
    keys = read_keys(FOLDER / "keys.yaml", {})
    assert keys.has_users and keys.has_admin
    key = keys.find("Bearer " + load("keys.yaml")["batch"]["key"])
    assert key is not None and (key.max_requests, key.max_blocks, key.tokens_per_minute) == (32, 4096, 200_000)
    assert not ServeConfig.resolve({}, {}, FOLDER / "serve.yaml").is_loopback


# ---- systemd ------------------------------------------------------------------------------------


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|min)", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "min": 60}[unit]


def test_the_unit_starts_the_server_with_the_settings_of_the_example() -> None:
    program, *arguments = unit_command(UNIT)
    assert program == "/opt/pagetide/bin/pagetide"
    assert str(cli._parser().parse_args(arguments).config) == "/etc/pagetide/serve.yaml"
    assert load("serve.yaml")["api_key_file"] == "/etc/pagetide/keys.yaml"


def test_the_unit_waits_for_the_models_and_for_the_requests() -> None:
    """The engines drain by the server's word: a SIGTERM to all processes would end them, with their requests."""
    settings = unit_settings(UNIT)
    assert (settings["Type"], settings["NotifyAccess"], settings["KillMode"]) == ("notify", "main", "mixed")
    assert seconds(settings["TimeoutStartSec"]) >= 600
    drain_s = ServeConfig.resolve({}, {}, FOLDER / "serve.yaml").drain_timeout
    assert drain_s + KILL_AFTER_S < seconds(settings["TimeoutStopSec"]) <= drain_s + KILL_AFTER_S + 10
    assert (settings["Restart"], settings["RestartPreventExitStatus"]) == ("on-failure", "2")


def test_the_unit_hides_nothing_that_an_engine_needs() -> None:
    """The driver's device files, compiled kernels, its own pids, the network."""
    hiding = {
        "PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute", "PrivateUsers",
        "PrivatePIDs", "PrivateNetwork", "IPAddressDeny", "RootDirectory", "DynamicUser", "MemoryMax", "MemoryHigh",
    }  # fmt: skip
    assert not hiding & unit_settings(UNIT).keys()
    monitor = unit_settings(ROOT / "examples" / "vram-monitor" / "vram-monitor.service")
    same = {name for name in monitor if name.startswith(("Protect", "Restrict", "SystemCall", "NoNew", "Capability"))}
    same -= {"RestartPreventExitStatus"}
    assert {name: unit_settings(UNIT).get(name) for name in same} == {name: monitor[name] for name in same}
    assert unit_settings(UNIT)["Group"] == monitor["Group"], "its members may lease"


@needs_systemd
def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    check_with_systemd(UNIT, "pagetide-serve", "--system", tmp_path)

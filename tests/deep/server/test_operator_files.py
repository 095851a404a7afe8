"""The files in examples/serve: they are accepted, agree with each other, and name nothing that a real server does not have."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import httpx2 as httpx
import pytest
from operator_files import OperatorFiles, check_with_systemd, needs_promtool, needs_systemd, unit_command, unit_settings
from prometheus_client.parser import text_string_to_metric_families
from servers import WITH_EVERYTHING, ServerProcess

from pagetide import cli
from pagetide.engine.config import EngineConfig
from pagetide.server.config import ModelNames, ServeConfig
from pagetide.server.engine_client import KILL_AFTER_S
from pagetide.server.keys import read_keys

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "serve"
UNIT = FOLDER / "pagetide-serve.service"
DOCUMENT = (ROOT / "docs" / "serve.md").read_text("utf-8")
FILES = OperatorFiles(FOLDER, r"vllm:\w+|pagetide_\w+|http_\w+|process_\w+", r"\d+m")
load = FILES.load
UNSEEN = {
    # not on the page of a server that is well, and not on the dashboard either
    "pagetide_build_info",
    "pagetide_engine_info",
}


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


def test_an_alert_asks_for_what_is_exported_and_says_what_is_wrong(exported: dict[str, set[str]]) -> None:
    FILES.check_alerts(exported)
    counted = {metric.removesuffix("_count") for metric in exported if metric.endswith("_count")}
    for rule in FILES.alerts:
        text = rule["annotations"]["summary"] + rule["annotations"]["description"]
        assert FILES.metrics_in(text) <= counted, rule["alert"]


def test_alerts_are_documented_and_tested_each_of_them() -> None:
    FILES.check_alerts_are_documented_and_tested(DOCUMENT)


def test_one_port_and_one_job_are_meant_everywhere() -> None:
    FILES.check_job(load("serve.yaml")["port"])
    assert load("serve.yaml")["open_metrics"], "Prometheus has no key"


def test_the_dashboard_asks_for_what_is_exported_and_shows_every_metric(exported: dict[str, set[str]]) -> None:
    shown = FILES.check_board(exported, {"instance", "model_name"})
    for variable in FILES.board["templating"]["list"][1:]:
        metric, label = re.findall(r"label_values\((\w+).*, (\w+)\)", variable["definition"])[0]
        assert metric in exported and label == variable["name"] and variable["query"]["query"] == variable["definition"]
    assert {name for name in exported if name.startswith("pagetide_")} - shown == UNSEEN


@needs_promtool
def test_promtool_agrees(tmp_path: Path) -> None:
    FILES.check_with_promtool(tmp_path)


def test_the_settings_are_accepted_and_show_every_key(tmp_path: Path) -> None:
    text = (FOLDER / "serve.yaml").read_text("utf-8")
    keys = {field.name for field in fields(ServeConfig)}
    shown = re.findall(r"^(?:# )?([a-z_]+):(?: |$)", text, re.MULTILINE)
    assert len(set(shown)) == len(shown) and set(shown) == {*ModelNames.__annotations__, *keys, "max_seqs", "kv_memory"}
    sample, default = ServeConfig.resolve({}, {}, FOLDER / "serve.yaml"), ServeConfig()
    changed = {key for key in keys if getattr(sample, key) != getattr(default, key)}
    assert changed == {"host", "api_key_file", "open_metrics", "models"}
    for model in sample.models:
        EngineConfig.resolve(model.reference, **dict(model.engine))
    text = re.sub(r"^# (?=(?!model:|ssl_)[a-z_]+: )", "", text, flags=re.MULTILINE)  # there are no files of certificates
    (tiny := tmp_path / "models" / "tiny").parent.mkdir()
    tiny.symlink_to(Path(__file__).parents[3] / "engine" / "demo_model")
    (file := tmp_path / "all.yaml").write_text(text.replace("/srv/models", str(tiny.parent)))
    whole = ServeConfig.resolve({}, {}, file)
    assert {key for key in keys if getattr(whole, key) in (None, ())} == {"ssl_certfile", "ssl_keyfile"}
    for model in whole.models:
        assert {"max_seqs", "kv_memory"} <= set(model.engine)
        EngineConfig.resolve(model.reference, **dict(model.engine) | {"device": "cpu"})


def test_the_keys_are_accepted_and_let_the_server_be_reached() -> None:
    keys = read_keys(FOLDER / "keys.yaml", {})
    assert keys.has_users and keys.has_admin
    key = keys.find("Bearer " + load("keys.yaml")["batch"]["key"])
    assert key is not None and (key.max_requests, key.max_blocks, key.tokens_per_minute) == (32, 4096, 200_000)
    assert not ServeConfig.resolve({}, {}, FOLDER / "serve.yaml").is_loopback


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

"""Settings of the server: flags before the environment, the environment before the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

from pagetide.server.config import ServeConfig, ServeConfigInvalid
from pagetide.server.models import ModelOptions

DEMO = [ModelOptions("demo", "demo")]


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("host: 127.0.0.3\nport: 1\nmax-queue: 1\ndrain_timeout: 1.5\ncors_origin: [http://a]\n")
    config = ServeConfig.resolve(
        {"port": 3, "host": None},
        {"PAGETIDE_PORT": "2", "PAGETIDE_MAX_QUEUE": "2", "PAGETIDE_OPEN_METRICS": "yes"},
        file,
        DEMO,
    )
    assert (config.host, config.port, config.max_queue, config.drain_timeout) == ("127.0.0.3", 3, 2, 1.5)
    assert (config.open_metrics, config.cors_origin, config.url) == (True, ("http://a",), "http://127.0.0.3:3")
    assert (
        config.is_loopback
        and not ServeConfig(host="0.0.0.0").is_loopback
        and ServeConfig(host="::1").url == ServeConfig(host="::").url == "http://[::1]:8000"
        and ServeConfig(host="0.0.0.0").url == "http://127.0.0.1:8000"
    )


def test_lists_in_a_variable_are_separated_by_commas() -> None:
    config = ServeConfig.resolve({}, {"PAGETIDE_FORWARDED_ALLOW_IPS": "127.0.0.1,10.0.0.0/8, ::1"}, models=DEMO)
    assert config.forwarded_allow_ips == ("127.0.0.1", "10.0.0.0/8", "::1")
    assert ServeConfig.resolve({"forwarded_allow_ips": "*"}, {}, models=DEMO).forwarded_allow_ips == ("*",)


def test_models_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "models:\n- demo\n- {model: demo, name: small, kv_memory: {max: 16MiB}, tool_call_parser: hermes}\n"
    )
    config = ServeConfig.resolve({}, {}, file, engine={"device": "cpu"})
    assert [(model.name, model.reference, dict(model.engine)) for model in config.models] == [
        ("demo", "demo", {"device": "cpu"}),
        ("small", "demo", {"device": "cpu", "kv_memory": {"max": "16MiB"}}),
    ]
    assert [model.tool_parser for model in config.models] == [None, "hermes"]
    assert ServeConfig.resolve({}, {}, file, DEMO).models == tuple(DEMO)  # the command line's instead


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("porf: 1", {}, "unknown setting 'porf'; did you mean port?"),
        ("port: many", {}, "port must be a value of type int, got 'many'"),
        ("{}", {"PAGETIDE_PORT": "x"}, "PAGETIDE_PORT must be"),
        ("port: 70000", {}, "from 0 to 65535"),
        ("ssl_certfile: a.pem", {}, "both --ssl-certfile and --ssl-keyfile"),
        ("open_metrics: maybe", {}, "type bool, got 'maybe'"),
        ("tool_call_parser: xml", {}, "one of hermes, llama3, mistral, none"),
        ("- a", {}, "must map settings"),
        ("models: demo", {}, "a list was expected"),
        ("models: [{name: a}]", {}, "a mapping with `model:`"),
        ("models: [demo, demo]", {}, "two models are named 'demo'"),
        ("max_queue: -1", {}, "max_queue"),
        ("forwarded_allow_ips: proxy.example", {}, "got 'proxy.example'"),
    ],
)
def test_wrong_settings(tmp_path: Path, text: str, environ: dict[str, str], message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    models: list[Any] = [] if text.startswith("models") else DEMO
    with pytest.raises(ServeConfigInvalid, match=message.replace("[", r"\[").replace("?", r"\?")):
        ServeConfig.resolve({}, environ, file, models)


def test_no_model() -> None:
    with pytest.raises(ServeConfigInvalid, match="no model was named"):
        ServeConfig.resolve({}, {})

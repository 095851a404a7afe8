"""Settings of the server: flags before the environment, the environment before the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagetide.cli import _parser
from pagetide.server.config import ENGINE_SETTINGS, ModelOptions, ServeConfig, ServeConfigInvalid
from pagetide.server.residency import Residency

DEMO = [ModelOptions("demo", "demo")]


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("host: ' 127.0.0.3 '\nport: 1\nmax-queue: 1\ndrain_timeout: 1.5\ncors_origin: 'http://a, '\n")
    environ = {"PAGETIDE_PORT": "2", "PAGETIDE_MAX_QUEUE": "2", "PAGETIDE_OPEN_METRICS": " yes\n", "PAGETIDE_HOST": " "}
    config = ServeConfig.resolve({"port": 3, "host": None}, environ, file, DEMO)
    assert (config.host, config.port, config.max_queue, config.drain_timeout) == ("127.0.0.3", 3, 2, 1.5)
    assert (config.open_metrics, config.cors_origin, config.url) == (True, ("http://a",), "http://127.0.0.3:3")
    assert config.is_loopback and not ServeConfig(host="0.0.0.0").is_loopback
    assert ServeConfig(host="::1").url == ServeConfig(host="::").url == "http://[::1]:8000"
    assert ServeConfig(host="0.0.0.0").url == "http://127.0.0.1:8000"


def test_lists_in_a_variable_are_separated_by_commas() -> None:
    config = ServeConfig.resolve({}, {"PAGETIDE_FORWARDED_ALLOW_IPS": "\ufeff127.0.0.1,10.0.0.0/8, ::1"}, models=DEMO)
    assert config.forwarded_allow_ips == ("127.0.0.1", "10.0.0.0/8", "::1")
    assert ServeConfig.resolve({"forwarded_allow_ips": "*"}, {}, models=DEMO).forwarded_allow_ips == ("*",)


def engines(config: ServeConfig) -> dict[str, dict[str, Any]]:
    return {model.name: dict(model.engine) for model in config.models}


def test_engine_settings_by_flag_variable_entry_and_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-seqs: 1\nmax_step_tokens: 1\nidle_s: 1\ndtype: float16\nchat_template: top\nresponse_format: hermes\n"
        "models:\n- a\n- {model: b, max_seqs: 2, max-step-tokens: 2, idle_s: 2, chat_template: own, response_format: plain}\n"
    )
    of_file = {"max_seqs": 1, "max_step_tokens": 1, "idle_s": 1, "dtype": "float16"}
    of_entry = {"max_seqs": 2, "max_step_tokens": 2, "idle_s": 2, "dtype": "float16"}
    config = ServeConfig.resolve({}, {}, file)
    assert engines(config) == {"a": of_file, "b": of_entry}
    assert [(one.chat_template, one.response_format) for one in config.models] == [("top", "hermes"), ("own", "plain")]
    given = {"MAX_SEQS": "3", "MAX_STEP_TOKENS": "3", "SHARE": "no", "BLOCK_SIZE": "auto"}
    environ = {f"PAGETIDE_{name}": value for name, value in given.items()}
    over = {"max_seqs": 3, "max_step_tokens": 4, "share": False, "block_size": "auto"}
    config = ServeConfig.resolve({"response_format": "llama3", "max_step_tokens": 4}, environ, file)
    assert engines(config) == {"a": of_file | over, "b": of_entry | over}
    assert [one.response_format for one in config.models] == ["llama3", "llama3"]
    assert engines(ServeConfig.resolve({"max_step_tokens": 4}, environ, file, DEMO)) == {"demo": of_file | over}
    with pytest.raises(ServeConfigInvalid, match=r"PAGETIDE_BLOCK_SIZE: block_size must be an integer .*, or auto, got 'big'"):
        ServeConfig.resolve({}, {"PAGETIDE_BLOCK_SIZE": "big"}, None, DEMO)


def test_an_entry_may_merge_another_and_say_more(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("models:\n- &one {model: a, max_seqs: 2, idle_s: 1}\n- {<<: *one, name: b, max_seqs: 3}\n")
    assert engines(ServeConfig.resolve({}, {}, file)) == {"a": {"max_seqs": 2, "idle_s": 1}, "b": {"max_seqs": 3, "idle_s": 1}}


def test_entries_say_when_a_model_is_loaded_and_go_before_the_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"models_dir: {tmp_path / 'models'}\nkeep_alive: 2m\npinned: [b]\npreload: d\nmodels:\n- demo\n"
        "- {model: demo, name: a, keep_alive: 1m}\n"
        "- {model: demo, name: c, pinned: true}\n- {model: demo, name: d, keep-alive: -1}"
    )
    wanted = {
        "demo": Residency(), "a": Residency(60, False, False), "c": Residency(120, True, False),
        "d": Residency(-1, False, True), "b": Residency(120, True, False),
    }  # fmt: skip
    assert {one.name: one.residency for one in ServeConfig.resolve({}, {}, file).models} == wanted
    flag = ServeConfig.resolve({"keep_alive": 7}, {}, file)
    assert [one.residency.keep_alive_s for one in flag.models] == [-1, 7, 7, 7, 7]
    file.write_text("models: [{model: demo, keep_alive: -2}]")
    with pytest.raises(ServeConfigInvalid, match=r"serve\.yaml:1: keep_alive must be a number of at least -1, got -2"):
        ServeConfig.resolve({}, {}, file)


def test_every_flag_of_the_engine_is_a_setting() -> None:
    action = next(one for one in _parser()._actions if one.choices)
    groups = {group.title: group for group in dict(action.choices or {})["serve"]._action_groups}
    assert {one.dest for one in groups["engine"]._group_actions} == set(ENGINE_SETTINGS)


def test_names_of_models(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nserved_model_name: [one]\n")
    both = {"PAGETIDE_MODEL": "a, hub/b", "PAGETIDE_SERVED_MODEL_NAME": "x,y"}

    def named(given: dict[str, Any], environ: dict[str, str], models: Sequence[ModelOptions] = ()) -> list[Any]:
        return [(one.name, one.reference) for one in ServeConfig.resolve(given, environ, file, models).models]

    assert named({}, {}) == [("one", "demo")]
    assert named({}, both) == [("x", "a"), ("y", "hub/b")]
    one = {"PAGETIDE_SERVED_MODEL_NAME": "x"}
    assert named({"served_model_name": ["z"]}, one, [ModelOptions("c", "c")]) == [("z", "c")]
    with pytest.raises(ServeConfigInvalid, match="2 models, but 1 served_model_name: give one for each"):
        named({}, {"PAGETIDE_MODEL": "a,b"})


def test_variables_that_look_like_settings_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    others = ["SEEDS", "SERVICE_HOST", "CONFIG", "SERVE_CONFIG", "API_KEY", "RUNTIME_DIR", "GID", "STRESS_S"]
    environ = {f"PAGETIDE_{name}": "1" for name in [*others, "MAX_QUEUE", "MAX_SEQ", "SERVED_MODEL_NAMES"]}
    ServeConfig.resolve({"served_model_name": ["a"]}, environ, None, DEMO)
    assert [record.getMessage() for record in caplog.records] == [
        "unknown variable PAGETIDE_MAX_SEQ; did you mean PAGETIDE_MAX_SEQS?",
        "unknown variable PAGETIDE_SERVED_MODEL_NAMES; did you mean PAGETIDE_SERVED_MODEL_NAME?",
    ]


def test_wrong_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "serve.yaml"
    for name, block in (("cert.pem", "CERTIFICATE"), ("key.pem", "EC PRIVATE KEY")):
        (tmp_path / name).write_text(f"-----BEGIN {block}-----\nAAAA\n-----END {block}-----\n")
    for text, environ, message in (
        ("porf: 1", {}, "serve.yaml:1: unknown setting 'porf'; did you mean port?"),
        *(
            (f"port: {one}", {}, "yaml:1: port must be a port from 0 to 65,535, got")
            for one in ("many", "true", "80.9", ".inf")
        ),
        ("{}", {"PAGETIDE_PORT": "x"}, "PAGETIDE_PORT: port must be a port from 0 to 65,535, got 'x'"),
        ("port: 70000", {}, "from 0 to 65,535, got 70000"),
        ("ssl_certfile: a.pem", {}, "both --ssl-certfile and --ssl-keyfile"),
        ("{ssl_certfile: /none.pem, ssl_keyfile: /}", {}, "ssl_certfile: /none.pem: No such file or directory; check"),
        ("{ssl_certfile: key.pem, ssl_keyfile: cert.pem}", {}, "ssl_certfile: key.pem is not PEM with a certificate: no line"),
        ("{ssl_certfile: cert.pem, ssl_keyfile: serve.yaml}", {}, "ssl_keyfile: serve.yaml is not PEM with a private key: no"),
        ("{ssl_certfile: cert.pem, ssl_keyfile: key.pem}", {}, "TLS cannot use cert.pem with the key in key.pem: "),
        ("open_metrics: maybe", {}, "open_metrics must be true or false, got 'maybe'"),
        ("response_format: xml", {}, "one of deepseek-v3, "),
        ("- a", {}, "must map settings"),
        ("models: demo", {}, "a list was expected"),
        ("models: [{name: a}]", {}, "a mapping with `model:`"),
        ("models: [{model: a, max_sqs: 4}]", {}, "serve.yaml:1: unknown setting 'max_sqs'; did you mean max_seqs?"),
        ("gpu_memory_utilization: 0.5", {}, "unknown setting 'gpu_memory_utilization'; use kv_memory instead ("),
        ("models: [demo, demo]", {}, "two models are named 'demo'"),
        ('models: [{model: demo, name: "a\\udcff"}]', {}, "the name 'a\\udcff' is not UTF-8"),
        ("max_queue: -1", {}, "max_queue must be an integer of at least 0, got -1"),
        ("max-queue: 1\nmax_queue: 2", {}, "serve.yaml:2: max_queue appears twice, first at"),
        ("models: [{model: a, max_seqs: 1, max-seqs: 2}]", {}, "serve.yaml:1: max_seqs appears twice, first at"),
        ("models:\nport:\nhost: ''", {}, "no model given"),
        ("models: [demo]\nmodel: demo", {}, "either model or models"),
        ("record_text: true", {}, "record_text needs a file"),
        ("forwarded_allow_ips: proxy.example", {}, "got 'proxy.example'"),
    ):
        file.write_text(text)
        models: list[Any] = [] if text.startswith("models") else DEMO
        with pytest.raises(ServeConfigInvalid) as caught:
            ServeConfig.resolve({}, environ, file, models)
        assert message in str(caught.value), text


def test_the_files_of_recordings(tmp_path: Path) -> None:
    environ = {"PAGETIDE_RECORD": "x", "PAGETIDE_RECORD_TEXT": "1"}
    for names, name, wanted in (
        (["demo"], "runs/today.jsonl.gz", ["runs/today.jsonl.gz"]),
        (["a", "hub/b"], "runs/today.jsonl.gz", ["runs/today.a.jsonl.gz", "runs/today.hub_b.jsonl.gz"]),
        (["a", "b"], "v1.2/today", ["v1.2/today.a", "v1.2/today.b"]),
        (["a", "b"], "today.rec", ["today.a.rec", "today.b.rec"]),
    ):
        models = [ModelOptions(one, "demo", {"device": "cpu"}) for one in names]
        config = ServeConfig.resolve({"record": name}, environ, None, models)
        found = [dict(model.engine) for model in config.recorded_models]
        assert found == [{"device": "cpu", "record": each, "record_text": True} for each in wanted]
        assert ServeConfig.resolve({}, {}, None, models).recorded_models == tuple(models)
    # one model by itself, and two in one file
    file = tmp_path / "serve.yaml"
    file.write_text("record: all.gz\nmodels:\n- demo\n- {model: demo, name: b, record: own.gz}\n")
    config = ServeConfig.resolve({}, {}, file)
    assert [model.engine["record"] for model in config.recorded_models] == ["all.demo.gz", "own.gz"]
    with pytest.raises(ServeConfigInvalid, match=r"two models record to run\.a_b"):
        ServeConfig.resolve({"record": "run"}, {}, None, [ModelOptions("a/b", "demo"), ModelOptions("a_b", "demo")])

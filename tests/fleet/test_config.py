"""fleet.yaml: each wrong value gives one sentence with the setting's name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pagetide.fleet.config import FleetConfig, FleetConfigInvalid

WRONG: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"{name} must be an integer from 0 to ")
      for name in ("workers", "front_ends", "threads")
      for value in (True, -1, 1.0, "2", None, math.nan, math.inf, 10**12, [1])),
    *(({"port": value}, "port must be a port from 0 to 65,535, got ") for value in (True, -1, 65_536, "8000", 1.5, None)),
    *(({"kv_events": value}, "kv_events must be a port from 1 to 65,535, got ") for value in (True, -1, 0, 65_536, "5557")),
    ({"port": 65_535, "front_ends": 2}, "port 65535 is too high: 2 ports"),
    ({"kv_events": 65_533, "workers": 2}, "kv_events 65533 is too high: 4 ports"),
    *(({name: value}, f"{name} must be a number of seconds from 0.5 to 1,000,000,000, got ")
      for name in ("hang_s", "keep_s", "unread_s")
      for value in (True, 0, 0.4, -1.0, "5", None, math.nan, math.inf, -math.inf, 1.1e9, 10**400)),
    *(({"durability": value}, "durability must be one of process, power, got ") for value in ("disk", None, 1, ["power"])),
    *(({"shares": {"a": value}}, "shares: 'a' must have a weight above 0")
      for value in (True, 0, -1, math.nan, math.inf, "1", None)),
    *(({"worker_resources": {"num_gpus": value}}, "worker_resources: num_gpus must be a number from 0 to 1,000,000,000, got ")
      for value in (True, -1, math.nan, math.inf, "1", None)),
    *(({name: value}, f"{name} must map names to values")
      for name in ("engine", "server", "shares", "worker_resources")
      for value in (5, "text", ["a"])),
    *(({"name": value}, "name must be of letters, digits, - and _") for value in ("", "a/b", "..", "a b", 5, None, True)),
    *(({name: value}, f"{name} must be a text") for name in ("model", "address", "host") for value in ("", 5, True, [])),
    *(({"state_dir": value}, "state_dir must be a folder's name") for value in (5, True, ["a"])),
    ({"engine": {"kv_memry": "1GiB"}}, "engine: unknown setting 'kv_memry'; did you mean kv_memory?"),
    ({"engine": {"zzz": 1}}, "engine: unknown setting 'zzz'"),
    ({"server": {"host": "0.0.0.0"}}, "server: unknown setting 'host'"),
    ({"server": {"api_key_fiel": "x"}}, "server: unknown setting 'api_key_fiel'; did you mean api_key_file?"),
]  # fmt: skip


def refusal(settings: dict[str, Any]) -> str:
    """What is said of these settings."""
    try:
        FleetConfig(**{"model": "demo", **settings})
    except FleetConfigInvalid as error:
        return str(error)
    return "nothing"


def test_a_wrong_value_is_refused_by_name() -> None:
    for settings, message in WRONG:
        said = refusal(settings)
        assert said.startswith(message) and "\n" not in said, settings


def written(folder: Path, data: Any) -> Path:
    file = folder / "fleet.yaml"
    file.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")  # JSON is YAML
    return file


def test_a_file_gives_all_settings_and_dashes_count_as_underscores(tmp_path: Path) -> None:
    data = {
        "model": "demo", "workers": 3, "front-ends": 2, "hang-s": 2, "keep_s": 60, "engine": {"max-seqs": 8},
        "worker-resources": {"num-gpus": 1, "my-chip": 0.5}, "shares": {"team-a": 3, "team_b": 1.5},
        "server": {"api-key-file": "keys.yaml"}, "kv-events": 5557, "state_dir": str(tmp_path / "state"),
    }  # fmt: skip
    config = FleetConfig.read(written(tmp_path, data), {"workers": 4, "port": None})
    assert (config.workers, config.front_ends, config.port, config.hang_s, config.kv_events) == (4, 2, 8000, 2, 5557)
    assert config.engine == {"max_seqs": 8} and config.server == {"api_key_file": str(tmp_path / "keys.yaml")}
    assert config.shares == {"team-a": 3, "team_b": 1.5}, "names of API keys stay as they are"
    assert config.worker_resources == {"num_gpus": 1, "my-chip": 0.5}
    assert config.journal == tmp_path / "state" / "journal.sqlite"
    assert FleetConfig(**config.to_dict()) == config


def test_empty_sections_are_those_that_are_left_out(tmp_path: Path) -> None:
    config = FleetConfig.read(written(tmp_path, "model: demo\nengine:\nshares:\nworker_resources:\nserver:\n"))
    assert config == FleetConfig("demo")


def test_a_wrong_file_is_refused_with_its_name_once(tmp_path: Path) -> None:
    for data, message in (
        ({"workers": 2}, "model: name the model that the workers load"),
        ({"model": 5}, ":1: model must be a text, got 5"),
        ({"model": "demo", "worker": 2}, "unknown setting 'worker'; did you mean workers?"),
        ({"model": "demo", "workers": -1}, "workers must be an integer"),
        ([1, 2], "must map settings to values"),
        ("", "model: name the model"),
        ("model: demo\nserver: {max-queue: 1, max_queue: 2}", ":2: max_queue appears twice, first at"),
        ("model: [demo", "not valid YAML"),
    ):
        file = written(tmp_path, data)
        with pytest.raises(FleetConfigInvalid) as caught:
            FleetConfig.read(file)
        text = str(caught.value)
        assert text.startswith(str(file)) and text.count(str(file)) == 1 + ("twice" in text) and message in text, data
    with pytest.raises(FleetConfigInvalid, match=r"nothing\.yaml: No such file or directory; check the path"):
        FleetConfig.read(tmp_path / "nothing.yaml")


def test_the_journal_lies_in_the_state_folder_under_the_fleets_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert FleetConfig("demo", name="one").journal == Path("/somewhere/pagetide/one/journal.sqlite")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/nowhere")
    assert FleetConfig("demo").journal == Path("/nowhere/.local/state/pagetide/fleet/journal.sqlite")

"""A setting is written once: its flag, variable, key, checks and documentation come from one field of a dataclass."""

from __future__ import annotations

import argparse
import ast
from collections import Counter

import settings
import source_rules
from checkout import ROOT

from pagetide.api.sampling_params import SamplingParams
from pagetide.common.settings import settings_of
from pagetide.engine.config import EngineArguments, EngineConfig
from pagetide.fleet.config import FleetConfig
from pagetide.monitor.config import MonitorConfig
from pagetide.server.config import ModelNames, ServeConfig

TABLES = (EngineArguments, SamplingParams, ModelNames, ServeConfig, FleetConfig, MonitorConfig)
# Flags of commands that are no settings of a table, and have the name of one.
OTHERS = {
    "pagetide/cli.py": {"--model", "--device", "--seed", "--max-new-tokens"},
    "pagetide/doctor.py": {"--device"},
    "pagetide/fleet_command.py": {"--name", "--address", "--drain-timeout"},
    "pagetide/replay.py": {"--host", "--port"},
    "pagetide/vram_monitor.py": {"--interval", "--device", "--name"},
}
# Modules that take the engine's settings from the table, and name none of them.
TAKERS = ("pagetide/cli.py", "pagetide/serve.py", "engine/llm.py", "engine/async_llm.py")


def strings(module: str) -> list[str]:
    tree = source_rules.tree_of(ROOT / module)
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_the_document_is_up_to_date() -> None:
    assert settings.DOCUMENT.read_text("utf-8") == settings.document(), "run: python .ci/settings.py"


def test_a_flag_of_a_setting_is_written_nowhere() -> None:
    flags = {flag for table in TABLES for one in settings_of(table).values() for flag in one.flags}
    found = {}
    for path, tree in source_rules.modules(ROOT, ("pagetide", *source_rules.ORDER)):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        added = [call.args for call in calls if call.func.attr == "add_argument"]
        texts = {arg.value for args in added for arg in args if isinstance(arg, ast.Constant)}
        if written := texts & flags:
            found[str(path.relative_to(ROOT))] = written
    assert found == OTHERS


def test_a_setting_of_the_engine_is_written_once() -> None:
    names = settings_of(EngineArguments).keys() - {"model"}
    fields = [
        node.target.id
        for node in ast.walk(source_rules.tree_of(ROOT / "engine" / "config.py"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    ]
    assert {name for name, times in Counter(fields).items() if name in names and times == 1} == names
    assert {module: found for module in TAKERS if (found := names.intersection(strings(module)))} == {}
    assert {name for name, one in EngineConfig.__dataclass_fields__.items() if name in names} == names


def test_every_setting_has_a_help_and_a_flag_of_its_own() -> None:
    for table in TABLES:
        parser = argparse.ArgumentParser()
        for one in settings_of(table).values():
            one.add_to(parser)  # argparse refuses a flag twice
            assert one.help and not one.help.endswith(".") and one.documentation.endswith(".")

"""Writes docs/settings.md from the tables of settings.

    python .ci/settings.py

tests/structure/test_settings.py fails while the document is out of date.
"""

from __future__ import annotations

from pathlib import Path

from pagetide.api.sampling_params import SamplingParams
from pagetide.batch.config import SECTIONS
from pagetide.common.settings import Settings, settings_of
from pagetide.engine.config import EngineArguments, Scope
from pagetide.fleet.config import FleetConfig
from pagetide.monitor.alerts import AlertRule
from pagetide.monitor.config import MonitorConfig
from pagetide.server.config import ModelNames, ServeConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
INTRODUCTION = """# Settings

Written by .ci/settings.py from the tables in the code; `--help` of a command says the same. A flag goes before a variable
(`pagetide serve` has them), a variable before a file. In a file's keys "-" may stand for "_". A switch has a `--no-` form too.
"""
PLACES = {
    Scope.PLAN: "",
    Scope.SERVER: "not of `plan`",
    Scope.MODEL: "`LLM`, `generate`, `run`, an entry of `models`",
    Scope.ENTRY: "`LLM`, an entry of `models`",
    Scope.API: "`LLM`",
}
ENGINE = """\
Arguments of `LLM` and `AsyncLLM`; flags of `plan`, `generate`, `run` and `serve`; keys under `engine` in `run.yaml` and
`fleet.yaml`, and at the top of `serve.yaml` for all models or in an entry of its `models`."""


def run_settings() -> Settings:
    """Those of `pagetide run` besides the engine's and the sampling's, by their places in the file."""
    own = {name: SECTIONS[name] for name in ("input", "output")}
    return SECTIONS[""] | {f"{section}.{name}": one for section, some in own.items() for name, one in some.items()}


def table(settings: Settings, flagged: tuple[str, ...] | None = None) -> str:
    """The settings as a Markdown table; `flagged` are those that are flags, by default all."""
    rows = [["setting", "flag", "default", ""], ["---"] * 4]
    for name, one in settings.items():
        has_flags = one.scope <= Scope.MODEL if flagged is None else name in flagged
        flags = ", ".join(f"`{flag}`" for flag in one.flags) if has_flags else ""
        place = f" ({PLACES[Scope(one.scope)]})" if one.scope else ""
        rows.append([f"`{name}`", flags, one.told_default, f"{one.doc or one.help}{place}"])
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in cells)


def document() -> str:
    """The text of docs/settings.md."""
    server, monitor = settings_of(ModelNames) | settings_of(ServeConfig), settings_of(MonitorConfig)
    parts = (
        ("Engine", ENGINE, table(settings_of(EngineArguments))),
        ("Sampling", "Fields of `SamplingParams`; flags of `generate` and `run`.", table(settings_of(SamplingParams))),
        ("Batch files", "Of `pagetide run`: [run.md](run.md).", table(run_settings())),
        (
            "Server",
            "Of `pagetide serve`: [serve.md](serve.md). `max_queue` is the variable `PAGETIDE_MAX_QUEUE`.",
            table(server),
        ),
        ("Fleet", "Keys of `fleet.yaml`: [fleet.md](fleet.md).", table(settings_of(FleetConfig), ("workers", "port"))),
        ("Monitor", "Of `vram-monitor serve`: [monitor.md](monitor.md).", table(monitor, tuple(monitor.keys() - {"alerts"}))),
        (
            "Alerts of the monitor",
            "Keys of an entry of `alerts`: [monitor.md](monitor.md#commands-and-webhooks).",
            table(settings_of(AlertRule), ()),
        ),
    )
    return INTRODUCTION + "".join(f"\n## {title}\n\n{text}\n\n{rows}\n" for title, text, rows in parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")

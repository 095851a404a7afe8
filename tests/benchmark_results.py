"""What every benchmark writes with `--json`: figures, each with its samples, the machine, the versions, the seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FIGURE = {"name", "value", "unit", "target", "better", "meets", "samples"}
MACHINE = {"cpu", "cores", "system", "python"}
VERSIONS = {"pagetide", "torch", "transformers", "numpy"}


def read_results(file: Path) -> dict[str, Any]:
    """The content of a results file. Raises AssertionError or ValueError where it has another form."""
    content: dict[str, Any] = json.loads(file.read_text("utf-8"), parse_constant=_refuse)
    check_results(content)
    return content


def check_results(content: dict[str, Any]) -> None:
    """Raises AssertionError where this is not a benchmark's result. A benchmark may add keys of its own."""
    assert {"figures", "machine", "versions", "seed"} <= content.keys()
    assert MACHINE <= content["machine"].keys() and VERSIONS <= content["versions"].keys()
    assert isinstance(content["seed"], int)
    assert content["figures"], "nothing was measured"
    for figure in content["figures"]:
        assert figure.keys() == FIGURE, figure
        assert figure["name"] and isinstance(figure["unit"], str) and figure["better"] in ("lower", "higher"), figure
        assert all(_is_number(number) for number in (figure["value"], *figure["samples"])), figure
        assert figure["meets"] == _meets(figure), figure


def _meets(figure: dict[str, Any]) -> bool | None:
    target = figure["target"]
    if target is None:
        return None
    assert _is_number(target), figure
    return bool(figure["value"] <= target if figure["better"] == "lower" else figure["value"] >= target)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")

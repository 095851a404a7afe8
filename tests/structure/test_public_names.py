"""What the package promises by name is there: public names and commands."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import pagetide

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", pagetide.__all__)
def test_a_public_name_resolves_and_is_in_the_reference(name: str) -> None:
    value = getattr(pagetide, name)
    if name == "__version__":
        assert value == PYPROJECT["project"]["version"]
    else:
        assert value.__name__ == name
        assert value.__doc__, f"{name} has no docstring"
        page = (ROOT / "docs" / "api" / "pagetide.rst").read_text("utf-8")
        assert re.search(rf"^\.\. auto(class|function|exception):: {name}$", page, re.MULTILINE)


def test_public_names_are_listed_and_annotated_for_type_checkers() -> None:
    assert set(pagetide.__all__) <= set(dir(pagetide))
    tree = ast.parse((ROOT / "pagetide" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    annotated = {(alias.name, f".{node.module}") for node in imports for alias in node.names}
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert annotated == set(pagetide._MODULE_OF.items())
    assert {name for name, _ in annotated} | {"__version__"} == set(pagetide.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = pagetide.LMM


@pytest.mark.parametrize("target", PYPROJECT["project"]["scripts"].values())
def test_a_command_leads_somewhere(target: str) -> None:
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))

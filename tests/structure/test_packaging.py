"""What a wheel holds, and what an editable install leaves: setuptools' own answers, from a folder as a clone is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT, files

PACKAGES = (
    "common", "monitor", "allocator", "cache", "scheduler", "api", "frames", "native", "engine", "server", "fleet", "configs",
)  # fmt: skip
# Prints the files of the wheel, and leaves the wheel of an editable install in the folder that is named.
BUILD = """
import json, sys
from setuptools import build_meta
from setuptools.config.pyprojecttoml import apply_configuration
from setuptools.dist import Distribution

project = apply_configuration(Distribution({"script_name": "setup.py"}), "pyproject.toml")
command = project.get_command_obj("build_py")
command.ensure_finalized()
names = [name.removeprefix(command.build_lib).lstrip("/") for name in command.get_outputs(include_bytecode=False)]
sys.stdout = sys.stderr
editable = build_meta.build_editable(sys.argv[1])
sys.stdout = sys.__stdout__
print(json.dumps([names, editable]))
"""


@dataclass(frozen=True)
class Built:
    """What setuptools made of the project."""

    parent: Path  # the folder that holds the clone, which is named pagetide
    wheel_files: list[str]
    site: Path  # as site-packages after an editable install


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    parent = tmp_path_factory.mktemp("parent")
    clone, site, out = parent / "pagetide", parent / "site", parent / "out"
    for folder in (clone / "src", site, out):
        folder.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "docs", "pagetide", *PACKAGES):
        (clone / name).symlink_to(ROOT / name)
    (clone / "src" / "pagetide").symlink_to("../pagetide")
    run = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=clone, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    names, editable = json.loads(run.stdout.splitlines()[-1])
    with zipfile.ZipFile(out / editable) as wheel:
        wheel.extractall(site)
    return Built(parent, names, site)


def test_a_wheel_holds_exactly_what_the_packages_hold(built: Built) -> None:
    own = (path.relative_to(ROOT) for path in files())
    expected = {
        str(path if path.parts[0] == "pagetide" else Path("pagetide") / path)
        for path in own
        if path.parts[0] in ("pagetide", *PACKAGES)
    }
    assert set(built.wheel_files) == expected
    assert "pagetide/py.typed" in expected and "pagetide/engine/demo_model/model.safetensors" in expected


def test_an_editable_install_is_a_path_that_holds_the_package_alone(built: Built) -> None:
    """Type checkers and editors read .pth files and execute no import hooks."""
    (path,) = built.site.glob("*.pth")
    folder = Path(path.read_text().strip())
    assert folder == built.parent / "pagetide" / "src"
    visible = [entry.name for entry in folder.iterdir() if entry.suffix != ".egg-info"]
    assert visible == ["pagetide"]
    assert (folder / "pagetide" / "py.typed").is_file()


def test_the_package_is_found_in_the_folder_that_holds_a_clone_of_its_name(built: Built) -> None:
    """There `pagetide` is a folder without `__init__.py`, which a package anywhere on the path goes before."""
    added = f"import site; site.addsitedir({str(built.site)!r})"
    code = f"{added}\nimport pagetide, pagetide.common.units; print(pagetide.__file__)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for folder, found in ((built.parent, "src/pagetide"), (built.parent / "pagetide", "pagetide")):
        command = [sys.executable, "-S", "-c", code]  # where its site is the only site-packages
        run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert (run.stdout.strip(), run.stderr) == (str(built.parent / "pagetide" / found / "__init__.py"), "")


def test_every_package_has_a_link_and_every_link_a_package() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "pagetide").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in PACKAGES}
    assert os.readlink(ROOT / "src" / "pagetide") == "../pagetide"


LIBRARY = """
import distutils.core, importlib.util, setuptools

spec = importlib.util.spec_from_file_location("native_build", "src/pagetide/native/build.py")
spec.loader.exec_module(built := importlib.util.module_from_spec(spec))
print(distutils.core.run_setup("setup.py", stop_after="init").has_ext_modules(), built.obstacle() is None)
"""


def test_an_sdist_has_all_that_a_wheel_with_kernels_is_made_of(tmp_path: Path) -> None:
    """Its sources lie in src/ alone, and the library goes where a platform's files go, or auditwheel refuses the wheel."""
    for name in ("pyproject.toml", "setup.py", "LICENSE", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "pagetide").symlink_to(ROOT / "pagetide")
    for wanted in (False, True):
        environ = os.environ | {"PAGETIDE_NATIVE": str(int(wanted))}
        command = [sys.executable, "-c", LIBRARY]
        run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        has, can = run.stdout.split()
        assert (has == "True") == (wanted and can == "True"), run.stderr

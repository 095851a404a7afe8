"""Runs what needs no torch with each further interpreter that is installed, from Python 3.11 to 3.13.

    python .ci/pythons.py

Run by `make test-pythons` in the environment of `make test`, whose own version is left out. torch for each version would be a
download of its own, so test files that need it are left out. Each interpreter gets an environment in build/pythons with the
other packages. Without a further interpreter there is nothing to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from setup import ROOT, SetupError, name_of, pip

VERSIONS = ("3.11", "3.12", "3.13")
WITHOUT = {"torch", "transformers", "pagetide"}  # the project is a path here
TESTS = ("tests/common", "tests/monitor", "tests/allocator", "tests/cache", "tests/scheduler", "tests/api", "tests/frames")
# Compiles every module and imports those that need no torch; prints three numbers.
IMPORTS = """
import importlib, pathlib, pkgutil, subprocess
names = subprocess.run(["git", "ls-files", "-z", "*.py"], capture_output=True, text=True, check=True).stdout.split("\\0")
for name in filter(None, names):
    compile(pathlib.Path(name).read_bytes(), name, "exec")
import pagetide
found = [module.name for module in pkgutil.walk_packages(pagetide.__path__, "pagetide.", onerror=lambda name: None)]
need = 0
for name in found:
    if name != "pagetide.__main__":
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in ("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers"):
                raise
            need += 1
print(len(names) - 1, len(found) - need, need)
"""


def say(sentence: str) -> None:
    print(f"pythons: {sentence}", flush=True)


def version_of(python: Path) -> str | None:
    """The version of an interpreter, as "3.12"; None if it does not run, as a placeholder of pyenv."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        run = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def installed(candidates: Iterable[Path], own: str) -> dict[str, Path]:
    """The first interpreter of each version but `own` among the candidates."""
    found: dict[str, Path] = {}
    for python in candidates:
        version = version_of(python)
        if version in VERSIONS and version != own:
            found.setdefault(version, python)
    return dict(sorted(found.items()))


def candidates() -> list[Path]:
    """Where interpreters are: on the PATH, and those of pyenv."""
    on_path = [shutil.which(f"python{version}") for version in VERSIONS]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return [*map(Path, filter(None, on_path)), *sorted(pyenv.glob("*/bin/python3"), reverse=True)]


def requirements() -> list[str]:
    """What the project and its quick tests need, without torch and what stands on it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["test"], *extras["server"]]
    return [line for line in lines if name_of(line) not in WITHOUT]


def make_environment(python: Path, version: str) -> Path:
    """The interpreter of an environment made of this one, with what the tests need besides torch. Raises SetupError."""
    folder, wanted = ROOT / "build" / "pythons" / version, requirements()
    made = "\n".join([str(python), *wanted, (ROOT / "constraints.txt").read_text("utf-8")])
    stamp, own = folder / "made-from.txt", folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text("utf-8") == made:
        return own
    say(f"makes an environment of {python} in {folder.relative_to(ROOT)}")
    if subprocess.run([python, "-m", "venv", "--clear", folder], check=False).returncode != 0:
        raise SetupError(f"{python} cannot make an environment; the reason stands above")
    pip(own, "--quiet", "--constraint", "constraints.txt", *wanted)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "pagetide.pth").write_text(f"{ROOT / 'src'}\n", "utf-8")  # what an editable install leaves, without one
    stamp.write_text(made, "utf-8")
    return own


def check(own: Path, version: str) -> bool:
    """Compiles, imports and tests with one interpreter. Returns whether all of it went well."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([own, "-P", "-c", IMPORTS], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        say(f"{version}: a module cannot be compiled or imported:\n{run.stderr}")
        return False
    compiled, imported, need_torch = run.stdout.split()
    skipped = f"{need_torch} need torch or transformers and are skipped"
    say(f"{version}: {compiled} files compile, {imported} modules are imported, {skipped}")
    command = [own, "-P", "-m", "pytest", "-q", "-n", os.environ.get("JOBS", "2"), "--torch=without",
               "-m", "not gpu and not stress", *TESTS]  # fmt: skip
    tests = subprocess.run(command, cwd=ROOT, env=env, check=False)
    return tests.returncode == 0


def main() -> int:
    own = "{}.{}".format(*sys.version_info[:2])
    found = installed(candidates(), own)
    if not found:
        say(f"no further interpreter of {', '.join(VERSIONS)} is installed: nothing to do")
    failed = []
    for version, python in found.items():
        try:
            if not check(make_environment(python, version), version):
                failed.append(version)
        except SetupError as error:
            say(f"{version}: {error}")
            failed.append(version)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

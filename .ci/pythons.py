"""Runs what needs no torch with each further interpreter that is installed, from Python 3.11 to 3.13.

    python .ci/pythons.py

Run by `make test-pythons` in the environment of `make test`, whose own version is left out. torch for each version would be a
download of its own, so what imports it is skipped, and counted. Each interpreter gets an environment in build/pythons with the
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

from environment import ROOT, Environment, SetupError

from setup import name_of, requirements

VERSIONS = ("3.11", "3.12", "3.13")
WITHOUT = {"torch", "transformers", "llguidance", "matplotlib", "triton", "setuptools"}  # torch, and what serves models
TESTS = ("tests/monitor", "tests/allocator", "tests/cache", "tests/scheduler")
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


def make_environment(python: Path, version: str) -> Environment:
    """An environment of this interpreter with what the tests need besides torch. Raises SetupError."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = [line for line in requirements(pyproject, ["test", "parallel"]) if name_of(line) not in WITHOUT]
    made = "\n".join([str(python), *wanted, (ROOT / "constraints.txt").read_text("utf-8")])
    environment = Environment(ROOT / "build" / "pythons" / version)
    stamp = environment.path / "made-from.txt"
    if stamp.is_file() and stamp.read_text("utf-8") == made:
        return environment
    say(f"makes an environment of {python} in {environment.path.relative_to(ROOT)}")
    if subprocess.run([python, "-m", "venv", "--clear", environment.path], check=False).returncode != 0:
        raise SetupError(f"{python} cannot make an environment; the reason stands above")
    environment.pip("--constraint", "constraints.txt", *wanted, quiet=True)
    (site,) = environment.path.glob("lib/python*/site-packages")
    (site / "pagetide.pth").write_text(f"{ROOT / 'src'}\n", "utf-8")  # what an editable install leaves, without one
    stamp.write_text(made, "utf-8")
    return environment


def check(environment: Environment, version: str) -> bool:
    """Compiles, imports and tests with one interpreter. Returns whether all of it went well."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [environment.python, "-P", "-c", IMPORTS], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        say(f"{version}: a module cannot be compiled or imported:\n{run.stderr}")
        return False
    compiled, imported, need_torch = run.stdout.split()
    skipped = f"{need_torch} need torch or transformers and are skipped"
    say(f"{version}: {compiled} files compile, {imported} modules are imported, {skipped}")
    command = [environment.python, "-P", "-m", "pytest", "-q", "-p", "without_torch", "-n", os.environ.get("JOBS", "2"),
               "-r", "fE", "-m", "not gpu and not stress", *TESTS]  # fmt: skip
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

"""Makes the environment that the make targets run in, and says what it downloads before it does.

    python3 .ci/setup.py --venv .venv --extra test --extra dev

Standard library only; Python 3.11 or later. Quick when nothing changed: the environment carries a stamp of what it was
made from. Two variables choose, and a choice holds until another one is made or `make clean`:

    PYTHON   the interpreter this script was started with was named by the user: the environment shall be made of it
    TORCH    a pip requirement such as torch==2.13.0, instead of the pin in constraints.txt

A torch that the interpreter can import already, if it is recent enough, is used as it is, and so is everything else
that lies beside it; then pins hold only for what is missing there, and nothing at all is downloaded if nothing is
missing. Otherwise every package comes as constraints.txt pins it, into the environment alone.

An environment that is broken, or that was interrupted, is made anew. One that somebody else made is completed in place,
and a recent torch in it stays.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class SetupError(Exception):
    """The environment cannot be made; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an environment was made from; lies in it as `pagetide.json`."""

    fingerprint: str
    python: str  # of the environment: "3.11"
    base: str  # prefix of the interpreter it was made with
    extras: tuple[str, ...]
    torch: str  # the value of TORCH, or nothing
    reuses_base: bool  # torch and its neighbours are those that were there before
    complete: bool = False  # False while packages are being installed


# ---- what the project asks for: pure -------------------------------------------------------------


def normalised(name: str) -> str:
    """The name as indexes compare it (PyPA, "Names and normalization")."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The normalised name a requirement begins with."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise SetupError(f"not a requirement: {requirement!r}")
    return normalised(match.group())


def implied(pyproject: Mapping[str, Any], extras: Iterable[str]) -> set[str]:
    """The extras, and those they name in turn: `dev = ["pagetide[test]", ...]` has the extra `test` in it."""
    project = pyproject["project"]
    todo, done = list(extras), set[str]()
    while todo:
        extra = todo.pop()
        if extra not in done:
            done.add(extra)
            for requirement in project["optional-dependencies"][extra]:
                if name_of(requirement) == normalised(project["name"]):
                    todo += re.findall(r"[\w-]+", requirement.partition("[")[2].partition("]")[0])
    return done


def requirements(pyproject: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """What building, running and the `extras` need, without the project itself."""
    project = pyproject["project"]
    wanted = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    for extra in sorted(implied(pyproject, extras)):
        wanted += project["optional-dependencies"][extra]
    return [requirement for requirement in dict.fromkeys(wanted) if name_of(requirement) != normalised(project["name"])]


def pins(text: str) -> dict[str, str]:
    """The lines of a constraints file, by normalised name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name_of(line): line for line in lines if line}


def constraints(pinned: Mapping[str, str], visible: Mapping[str, str], torch: str, reuses_base: bool) -> list[str]:
    """The pins to install under. `visible` is what the environment can import before anything is installed.

    With packages of its own: all pins, without torch's where the user chose another. With the base's packages: torch
    stays what it is, and what is there already is not held to a pin.
    """
    if reuses_base:
        return [f"torch=={visible['torch']}", *(line for name, line in pinned.items() if name not in visible)]
    return [line for name, line in pinned.items() if not (torch and name == "torch")]


def to_install(
    wanted: Sequence[str], pinned: Mapping[str, str], visible: Mapping[str, str], torch: str, reuses_base: bool
) -> dict[str, str]:
    """What has to be fetched of the requirements, by name, as it will be asked for: not there, or not as pinned."""
    missing = {}
    for requirement in wanted:
        name = name_of(requirement)
        pin = torch if torch and name == "torch" else pinned.get(name, requirement)
        version = visible.get(name)
        if version is None or (not reuses_base and "==" in pin and version.partition("+")[0] != pin.partition("==")[2]):
            missing[name] = pin
    return missing


def fingerprint(pyproject: Mapping[str, Any], constraints_text: str, script: str) -> str:
    """Changes when an environment has to be looked at again: not with the settings of ruff, mypy and pytest."""
    said = [pyproject["build-system"], pyproject["project"], pyproject["tool"]["setuptools"]]
    text = "\0".join([json.dumps(said, sort_keys=True), constraints_text, script])
    return hashlib.sha256(text.encode()).hexdigest()


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.11.0+cu130" gives (2, 11, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def least_release(requirement: str) -> tuple[int, ...]:
    """The lower bound of a requirement: "torch>=2.10" gives (2, 10)."""
    match = re.search(r">=\s*([\d.]+)", requirement)
    return release(match.group(1)) if match else ()


def rebuild_reason(
    stamp: Stamp | None, wanted: Stamp, runs_as: str | None, exists: bool, python_named: bool
) -> str | None:
    """Why the environment has to be made anew, or None where it can stay. `runs_as`: its Python version, if it runs."""
    if not exists:
        return "there is none yet"
    if runs_as is None:
        return "the one there is broken"
    if release(runs_as) < (3, 11):
        return f"the one there is of Python {runs_as}"
    if stamp is None:
        return None  # somebody else's: completed in place
    if not stamp.complete:
        return "the last set-up was interrupted"
    if runs_as != stamp.python:
        return f"its Python was {stamp.python} and is now {runs_as}"
    if python_named and stamp.base != wanted.base:
        return f"PYTHON names another interpreter than {stamp.base}"
    if stamp.reuses_base and wanted.torch:
        return "TORCH asks for a torch of its own"
    return None


# ---- doing it ------------------------------------------------------------------------------------


class Environment:
    """A virtual environment on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self._stamp = path / "pagetide.json"

    def stamp(self) -> Stamp | None:
        """What it was made from; None where this script never finished creating it."""
        with suppress(OSError, ValueError, TypeError):
            fields = json.loads(self._stamp.read_text())
            return Stamp(**{**fields, "extras": tuple(fields["extras"])})
        return None

    def set_stamp(self, stamp: Stamp) -> None:
        """Replaces the stamp in one move, so that a reader never sees half of one."""
        half = self._stamp.with_suffix(".tmp")
        half.write_text(json.dumps(asdict(stamp), indent=2) + "\n")
        half.replace(self._stamp)

    def ask(self, code: str) -> str | None:
        """What the environment's Python prints, or None where it does not run."""
        try:
            run = subprocess.run([self.python, "-P", "-c", code], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    def runs_as(self) -> str | None:
        """Its Python version, if it runs and has pip."""
        find = "import importlib.util as u, sys; print('%d.%d' % sys.version_info[:2] if u.find_spec('pip') else '')"
        return self.ask(find) or None

    def visible(self) -> dict[str, str]:
        """Every distribution it can import, with its version."""
        found = "[[d.name, d.version] for d in importlib.metadata.distributions()]"
        code = f"import importlib.metadata, json; print(json.dumps({found}))"
        # The first of a name is the one that is imported.
        return {normalised(name): version for name, version in reversed(json.loads(self.ask(code) or "[]"))}

    def create(self, stamp: Stamp, with_base: bool) -> None:
        """Makes it anew, empty but for pip and the stamp; `with_base` lets it import what this interpreter can."""
        command: list[str | Path] = [sys.executable, "-m", "venv", self.path]
        if with_base:
            command.append("--system-site-packages")
        if importlib.util.find_spec("ensurepip") is None:
            if not (with_base and importlib.util.find_spec("pip")):
                name = f"python{PYTHON_VERSION}-venv"
                raise SetupError(
                    f"{sys.executable} has no ensurepip, so it cannot make an environment: install the package {name} "
                    f"(Debian, Ubuntu: apt-get install {name}), or name another interpreter with PYTHON=..."
                )
            command.append("--without-pip")  # the base's own will do
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)
        self.path.mkdir(parents=True)
        self.set_stamp(stamp)  # first, so that a half-made one is known by it
        if subprocess.run(command, check=False).returncode != 0:
            raise SetupError(f"{self.path} could not be made; the reason stands above")
        if with_base and sys.prefix != sys.base_prefix:
            # An environment made from an environment sees the interpreter below both, not its neighbour's packages.
            (site_packages,) = self.path.glob("lib/python*/site-packages")
            folders = [entry for entry in sys.path if entry.startswith(sys.prefix) and entry.endswith("site-packages")]
            lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
            (site_packages / "pagetide_base.pth").write_text("".join(lines))

    def pip(self, *arguments: str | Path, quiet: bool = False) -> None:
        """Runs `pip install`; raises SetupError."""
        command: list[str | Path] = [self.python, "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--quiet"] if quiet else []
        if subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode != 0:
            raise SetupError(
                "pip could not install what is missing; the reason stands above. To try again, run make again"
            )


def torch_of_base(least: tuple[int, ...]) -> str | None:
    """The version of the torch this interpreter imports, if it works and is recent enough."""
    if importlib.util.find_spec("torch") is None:
        return None
    code = "import torch; print(torch.__version__)"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        say(f"the torch of {sys.executable} cannot be imported, so it is not used")
        return None
    version = run.stdout.strip()
    if release(version) < least:
        say(f"the torch of {sys.executable} is {version}, too old to be used")
        return None
    return version


def say(sentence: str) -> None:
    print(f"set-up: {sentence}", flush=True)


def announce(missing: Mapping[str, str]) -> None:
    """Says what will be downloaded."""
    if "torch" in missing:
        say(f"downloads {missing['torch']}: about 200 MB where the build is for CPUs, several GB where it brings CUDA")
        linux = sys.platform == "linux" and platform.machine() == "x86_64"
        if linux and not Path("/proc/driver/nvidia/version").exists():
            say("no NVIDIA GPU is seen here: an index of CPU builds saves those GB (see TORCH in the Makefile)")
    others = [requirement for name, requirement in missing.items() if name != "torch"]
    if others:
        say(
            f"downloads {', '.join(others)}, and what they need"
            + (": about 70 MB" if "transformers" in missing else "")
        )


def fetch(environment: Environment, pyproject: Mapping[str, Any], pinned: Mapping[str, str], wanted: Stamp) -> None:
    """Brings the packages that the project needs into the environment."""
    needed = requirements(pyproject, wanted.extras)
    visible = environment.visible()
    missing = to_install(needed, pinned, visible, wanted.torch, wanted.reuses_base)
    announce(missing)
    limits = environment.path / "constraints.txt"
    limits.write_text("\n".join(constraints(pinned, visible, wanted.torch, wanted.reuses_base)) + "\n")
    chosen = [wanted.torch] if wanted.torch else []
    environment.pip("-c", limits, *needed, *chosen, quiet=not missing)


def install(environment: Environment) -> None:
    """Links the project into the environment and tries torch."""
    # Without build isolation: setuptools is among what was fetched, and nothing more is needed.
    environment.pip("--no-deps", "--no-build-isolation", "-e", ".", quiet=True)
    torch = environment.ask("import torch; print(torch.__version__)")
    if torch is None:
        raise SetupError(f"torch is installed but cannot be imported; see: {environment.python} -c 'import torch'")
    say(f"{environment.path.name} is ready: Python {environment.runs_as()}, torch {torch}")


def set_up(environment: Environment, extras: Collection[str], torch: str, python_named: bool) -> None:
    """Brings the environment to what is asked for; does nothing where it is."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "constraints.txt").read_text()
    stamp = environment.stamp()
    kept = stamp if stamp and stamp.complete else None  # what was chosen and installed before
    wanted = Stamp(
        # A copied or moved checkout is another one: scripts and links name its place.
        fingerprint=fingerprint(pyproject, text, Path(__file__).read_text() + str(ROOT)),
        python=PYTHON_VERSION,
        base=sys.prefix,
        extras=tuple(sorted(implied(pyproject, extras) | set(kept.extras if kept else ()))),
        torch=torch or (kept.torch if kept else ""),
        reuses_base=False,
    )
    (torch_needed,) = (r for r in pyproject["project"]["dependencies"] if name_of(r) == "torch")
    runs_as = environment.runs_as()
    reason = rebuild_reason(stamp, wanted, runs_as, os.path.lexists(environment.path), python_named)
    if reason is None and runs_as is not None:
        wanted = completing(environment, stamp, replace(wanted, python=runs_as), torch_needed)
        if stamp == replace(wanted, complete=True):
            return
        if stamp:
            environment.set_stamp(wanted)  # not complete: whoever finds it like this starts anew
    else:
        say(f"makes {environment.path.name} with {sys.executable}: {reason}")
        found = None if wanted.torch else torch_of_base(least_release(torch_needed))
        if found:
            say(f"torch {found} is there already and is used, with what lies beside it")
        wanted = replace(wanted, reuses_base=found is not None)
        environment.create(wanted, with_base=wanted.reuses_base)
    try:
        fetch(environment, pyproject, pins(text), wanted)
    except SetupError:
        if reason is None and stamp:
            environment.set_stamp(stamp)  # pip refused before it changed anything: what worked goes on working
        raise
    install(environment)
    environment.set_stamp(replace(wanted, complete=True))


def completing(environment: Environment, stamp: Stamp | None, wanted: Stamp, torch_needed: str) -> Stamp:
    """What `wanted` means for an environment that stays: made of what it was made of. Read-only."""
    if stamp:
        return replace(wanted, base=stamp.base, reuses_base=stamp.reuses_base)
    # Somebody else made it. A torch that will do is left alone, unless another was named.
    version = environment.visible().get("torch", "0")
    return replace(wanted, base="", reuses_base=not wanted.torch and release(version) >= least_release(torch_needed))


def exclusive(path: Path) -> IO[str]:
    """An open file that no other set-up holds, so that `make -j test check` makes the environment once."""
    import fcntl

    path.parent.mkdir(exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("waits for another set-up of this checkout")
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the environment that the make targets run in.")
    parser.add_argument("--venv", default=".venv", help="its folder, from the checkout's root (default: .venv)")
    parser.add_argument("--extra", action="append", default=[], help="an optional dependency group of pyproject.toml")
    arguments = parser.parse_args()
    environment = Environment(ROOT / arguments.venv)
    if Path(sys.prefix).resolve() == environment.path.resolve():  # activated: it cannot make itself anew
        base = sys._base_executable  # type: ignore[attr-defined]
        os.execv(base, [base, __file__, *sys.argv[1:]])
    torch = os.environ.get("TORCH", "").strip()
    try:
        if torch and "torch" not in torch:
            raise SetupError(f"TORCH={torch} is no requirement for torch: write TORCH=torch=={torch}, say")
        with exclusive(ROOT / "build" / "setup.lock"):
            set_up(environment, arguments.extra, torch, bool(os.environ.get("PYTHON")))
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the environment that the make targets run in, and says what it downloads before it does.

    python3 .ci/setup.py --venv .venv --extra test --extra dev

Standard library only; Python 3.11 or later. Quick when nothing changed: the environment carries a stamp of what it was
made from. Two variables choose, and a choice holds until another one is made or `make clean`:

    PYTHON   the interpreter this script was started with was named by the user: the environment shall be made of it
    TORCH    a pip requirement such as torch==2.13.0, instead of the pin in constraints.txt

A torch that the interpreter can import already, if it is recent enough, is used as it is, and so is everything else
that lies beside it; then pins hold only for what is missing there, and nothing at all is downloaded if nothing is
missing. Otherwise every package comes as constraints.txt pins it, into the environment alone.

Of torch there are builds with CUDA, several GB with their libraries, and for CPUs. On Linux x86-64 without an NVIDIA
driver the one for CPUs is taken from PyTorch's own index, unless the user chose: by TORCH, or by telling pip where
packages come from (cpu_torch.py; docs/decisions/0035-cpu-build-of-torch.md).

An environment that is broken or incomplete is rebuilt. One that was made by other means is completed in place, and a recent
torch in it stays.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import cpu_torch
from cpu_torch import Machine, NoCpuBuild, Wheel
from environment import PYTHON_VERSION, ROOT, Environment, SetupError, Stamp, normalised, say

SCRIPTS = sorted(Path(__file__).parent.glob("*.py"))
# What is large of what is downloaded, each with those that only it needs: wheels of Linux x86-64, in MB.
SIZES_MB = {
    "transformers": 30,
    "numpy": 17,
    "triton": 200,
    "llguidance": 3,
    "cuda-bindings": 10,
    "matplotlib": 25,
    "mypy": 17,
    "ruff": 10,
    "ray": 80,
}


# ---- what the project asks for: pure -------------------------------------------------------------


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
    stamp: Stamp | None, wanted: Stamp, runs_as: str | None, exists: bool, python_named: bool, has_driver: bool
) -> str | None:
    """Why the environment has to be made anew, or None where it can stay.

    `runs_as` is its Python version, if it runs. `has_driver` says whether the machine has a driver of NVIDIA's.
    """
    if not exists:
        return "there is none yet"
    if runs_as is None:
        return "the one there is broken"
    if release(runs_as) < (3, 11):
        return f"the one there is of Python {runs_as}"
    if stamp is None:
        return None  # not made by this script: completed in place
    if not stamp.complete:
        return "the last set-up was interrupted"
    if runs_as != stamp.python:
        return f"its Python was {stamp.python} and is now {runs_as}"
    if python_named and stamp.base != wanted.base:
        return f"PYTHON names another interpreter than {stamp.base}"
    if stamp.reuses_base and wanted.torch:
        return "TORCH asks for a torch of its own"
    if stamp.cpu_build and wanted.torch and "+cpu" not in wanted.torch:
        return "TORCH asks for another torch than the build for CPUs"  # which pip would take for the same version
    if stamp.cpu_build and has_driver:
        return "there is an NVIDIA driver now, and its torch is the build for CPUs"
    return None


# ---- doing it ------------------------------------------------------------------------------------


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


def announce_torch(requirement: str, settings: Mapping[str, str], machine: Machine) -> None:
    """Says how much a torch is that comes from where pip takes everything from."""
    either = f"about {cpu_torch.CPU_MB} MB where it is for CPUs, about {cpu_torch.CUDA_GB} GB where it brings CUDA"
    told = cpu_torch.chosen_sources(settings)
    if told:
        say(f"downloads {requirement} from where pip is told to ({', '.join(told)}): {either}")
    elif machine.system == "darwin":
        say(f"downloads {requirement}: about {cpu_torch.MAC_MB} MB")
    elif machine.gets_cuda and "+cpu" not in requirement:
        say(f"downloads {requirement} with CUDA and its libraries: about {cpu_torch.CUDA_GB} GB")
    else:
        say(f"downloads {requirement}: {either}")


def announce_others(missing: Mapping[str, str]) -> None:
    """Says what is downloaded besides torch."""
    others = {name: requirement for name, requirement in missing.items() if name != "torch"}
    if others:
        megabytes = sum(SIZES_MB.get(name, 0) for name in others)
        size = f": about {megabytes} MB" if megabytes else ""
        say(f"downloads {', '.join(others.values())}, and what they need{size}")


def cpu_wheel(
    environment: Environment, pin: str, settings: Mapping[str, str], index: str, within_s: float
) -> Wheel | None:
    """PyTorch's build for CPUs of the torch that is pinned; None, and said, where its index does not have it now."""
    try:
        python = environment.runs_as() or PYTHON_VERSION
        return cpu_torch.find(pin.partition("==")[2], python, settings, index, within_s)
    except NoCpuBuild as error:
        say(f"no NVIDIA driver is seen here, but PyTorch's index of builds for CPUs is of no help: {error}")
        return None


def fetch_torch(
    environment: Environment,
    pin: str,
    wanted: Stamp,
    machine: Machine,
    index: str = cpu_torch.INDEX,
    within_s: float = cpu_torch.ANSWER_WITHIN_S,
) -> bool:
    """Brings the build for CPUs into the environment where that suits and is to be had; otherwise torch is announced.

    It comes by itself and without what it needs, so that nothing else is taken from that index. Returns whether it came.
    """
    settings = environment.pip_settings()
    wheel = None
    chosen = wanted.torch or cpu_torch.chosen_sources(settings)
    if not chosen and cpu_torch.is_wanted(machine, wanted.extras):
        wheel = cpu_wheel(environment, pin, settings, index, within_s)
    if wheel is not None:
        say(
            f"downloads torch {wheel.version} from {index}: {wheel.size}. No NVIDIA driver is seen here; "
            f"TORCH={pin} asks for the build with CUDA, about {cpu_torch.CUDA_GB} GB with its libraries"
        )
        try:
            environment.pip("--index-url", index, "--no-deps", pin)
            return True
        except SetupError:
            say(f"torch could not be installed from {index}, for the reason above")
    announce_torch(pin, settings, machine)
    return False


def fetch(
    environment: Environment, needed: Sequence[str], missing: Mapping[str, str], limits: Sequence[str], torch: str
) -> None:
    """Brings the packages that are needed into the environment. `torch` is the user's choice, or nothing."""
    announce_others(missing)
    file = environment.path / "constraints.txt"
    file.write_text("\n".join(limits) + "\n")
    chosen = [torch] if torch else []
    environment.pip("-c", file, *needed, *chosen, quiet=not missing)


def install(environment: Environment) -> None:
    """Links the project into the environment and tries torch."""
    # Without build isolation: setuptools is among what was fetched, and nothing more is needed.
    environment.pip("--no-deps", "--no-build-isolation", "-e", ".", quiet=True)
    torch = environment.ask("import torch; print(torch.__version__)")
    if torch is None:
        raise SetupError(f"torch is installed but cannot be imported; see: {environment.python} -c 'import torch'")
    say(f"{environment.path.name} is ready: Python {environment.runs_as()}, torch {torch}")


def set_up(environment: Environment, extras: Collection[str], torch: str, python_named: bool, machine: Machine) -> None:
    """Brings the environment to what is asked for; does nothing where it is."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "constraints.txt").read_text()
    stamp = environment.stamp()
    kept = stamp if stamp and stamp.complete else None  # what was chosen and installed before
    wanted = Stamp(
        # A copied or moved checkout is another one: scripts and links name its place.
        fingerprint=fingerprint(pyproject, text, "".join(path.read_text() for path in SCRIPTS) + str(ROOT)),
        python=PYTHON_VERSION,
        base=sys.prefix,
        extras=tuple(sorted(implied(pyproject, extras) | set(kept.extras if kept else ()))),
        torch=torch or (kept.torch if kept else ""),
        reuses_base=False,
    )
    (torch_needed,) = (r for r in pyproject["project"]["dependencies"] if name_of(r) == "torch")
    runs_as = environment.runs_as()
    exists = os.path.lexists(environment.path)
    reason = rebuild_reason(stamp, wanted, runs_as, exists, python_named, machine.has_driver)
    if reason is None and runs_as is not None:
        wanted = completing(environment, stamp, replace(wanted, python=runs_as), torch_needed)
        if stamp == replace(wanted, complete=True):
            return
        if stamp:
            # Not complete: if this set-up is interrupted, the next one rebuilds the environment.
            environment.set_stamp(wanted)
    else:
        say(f"makes {environment.path.name} with {sys.executable}: {reason}")
        found = None if wanted.torch else torch_of_base(least_release(torch_needed))
        if found:
            say(f"torch {found} is there already and is used, with what lies beside it")
        wanted = replace(wanted, reuses_base=found is not None)
        environment.create(wanted, with_base=wanted.reuses_base)
    pinned, visible = pins(text), environment.visible()
    needed = requirements(pyproject, wanted.extras)
    missing = to_install(needed, pinned, visible, wanted.torch, wanted.reuses_base)
    limits = constraints(pinned, visible, wanted.torch, wanted.reuses_base)
    try:
        if "torch" in missing:
            wanted = replace(wanted, cpu_build=fetch_torch(environment, missing["torch"], wanted, machine))
        if wanted.cpu_build:
            missing.pop("torch", None)
        fetch(environment, needed, missing, limits, wanted.torch)
    except SetupError:
        if reason is None and stamp:
            # What was there goes on working: pip changes nothing where it refuses. A new torch is not taken back.
            environment.set_stamp(replace(stamp, cpu_build=wanted.cpu_build))
        raise
    install(environment)
    environment.set_stamp(replace(wanted, complete=True))


def completing(environment: Environment, stamp: Stamp | None, wanted: Stamp, torch_needed: str) -> Stamp:
    """What `wanted` means for an environment that stays: made of what it was made of. Read-only."""
    if stamp:
        return replace(wanted, base=stamp.base, reuses_base=stamp.reuses_base, cpu_build=stamp.cpu_build)
    # Not made by this script. A sufficient torch is kept, unless TORCH names another.
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
            set_up(environment, arguments.extra, torch, bool(os.environ.get("PYTHON")), Machine.here())
            # Its sources may have changed since the project was installed.
            subprocess.run([environment.python, ROOT / "native" / "build.py"], check=True)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

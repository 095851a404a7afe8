"""Makes the environment that the make targets run in: venv, pip under constraints.txt, and the native kernels.

    python3 .ci/setup.py --venv .venv --extra test

Standard library only; Python 3.11 or later. Quick when nothing changed: a stamp in the environment says what it was made of.
Two variables choose, and a choice holds until another one is made or `make clean`:

    PYTHON   the interpreter that runs this script was named by the user: the environment is made of it
    TORCH    a requirement such as torch==2.13.0, instead of the pin in constraints.txt

A recent torch that the interpreter can import is used with all that lies beside it; pins hold for what is missing there.
Otherwise, on Linux x86-64 without an NVIDIA driver, torch is PyTorch's build for CPUs
(docs/decisions/0035-cpu-build-of-torch.md).
"""

from __future__ import annotations

import argparse
import fcntl
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The address that https://pytorch.org/get-started/locally gives for pip on Linux without CUDA.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = "torch's build for CPUs, about 200 MB"
CUDA_TORCH = "torch, about 3 GB where it brings CUDA, about 200 MB elsewhere"
# What the driver lays out on Linux, in containers that were given a GPU, and under WSL.
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
# pip's settings that say where packages come from.
SOURCES = re.compile(r"^(?:global|install|:env:)\.(?:index-url|pypi-url|extra-index-url|find-links|no-index)=", re.MULTILINE)
DISTRIBUTIONS = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"


class SetupError(Exception):
    """The environment cannot be made; the message is a sentence for the user."""


def say(sentence: str) -> None:
    print(f"set-up: {sentence}", flush=True)


def normalised(name: str) -> str:
    """The name as indexes compare it (PyPA, "Names and normalization")."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The normalised name that a requirement begins with."""
    return normalised(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0])


def pins(text: str) -> dict[str, str]:
    """The lines of a constraints file, by normalised name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name_of(line): line for line in lines if line}


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.11.0+cu130" gives (2, 11, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def recent_enough(version: str, pyproject: Mapping[str, Any]) -> bool:
    """Whether the project can use this version of torch."""
    (least,) = (line for line in pyproject["project"]["dependencies"] if name_of(line) == "torch")
    return release(version) >= release(least.partition(">=")[2])


def limits(pinned: Mapping[str, str], visible: Mapping[str, str], torch: str, keeps: bool) -> list[str]:
    """The constraints to install under.

    `visible` is what the environment can import. If it `keeps` that, torch stays, and what is there is held to no pin.
    """
    if keeps and "torch" in visible:
        return [f"torch=={visible['torch']}", *(line for name, line in pinned.items() if name not in visible)]
    return [torch or pinned["torch"], *(line for name, line in pinned.items() if name != "torch")]


def output_of(python: Path | str, *arguments: str) -> str | None:
    """What an interpreter prints with these arguments; None if it does not run."""
    try:
        run = subprocess.run([python, "-P", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def visible_to(python: Path) -> dict[str, str]:
    """Each distribution that an interpreter can import, with its version. The first of a name is the one that is imported."""
    found = json.loads(output_of(python, "-c", DISTRIBUTIONS) or "[]")
    return {normalised(name): version for name, version in reversed(found)}


def pip(python: Path, *arguments: str | Path) -> None:
    """Run `pip install`, without native kernels, of which it would show nothing. Raises SetupError if it fails."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    environ = {**os.environ, "PAGETIDE_NATIVE": "0"}
    if subprocess.run(command, cwd=ROOT, check=False, env=environ).returncode != 0:
        raise SetupError("pip could not install what is missing; the reason stands above. To try again, run make again")


def stamp_of(venv: Path) -> dict[str, Any]:
    """What an environment was made of; nothing if this script did not finish making it."""
    with suppress(OSError, ValueError):
        return dict(json.loads((venv / "pagetide.json").read_text()))
    return {}


def rebuild_reason(venv: Path, stamp: Mapping[str, Any], python_named: bool, torch: str, has_driver: bool) -> str | None:
    """Why the environment has to be made anew; None if it can stay."""
    if not os.path.lexists(venv):
        return "there is none yet"
    version = output_of(venv / "bin" / "python", "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])")
    if version is None or release(version) < (3, 11):
        return "the one there is broken" if version is None else f"the one there is of Python {version}"
    if python_named and stamp.get("base", sys.prefix) != sys.prefix:
        return f"PYTHON names another interpreter than {stamp['base']}"
    if torch and stamp.get("with_base"):
        return "TORCH asks for a torch of its own"
    if stamp.get("cpu_build") and (has_driver or (torch and "+cpu" not in torch)):
        # pip would take the build for CPUs for the same version.
        return "its torch is the build for CPUs, and there is an NVIDIA driver or TORCH asks for another"
    return None


def create(venv: Path, with_base: bool) -> None:
    """Make an empty environment; `with_base` lets it import what this interpreter can. Raises SetupError."""
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(
            f"{sys.executable} has no ensurepip, so it cannot make an environment: install the package {package} "
            f"(Debian, Ubuntu: apt-get install {package}), or name another interpreter with PYTHON=..."
        )
    if venv.is_dir() and not venv.is_symlink():
        shutil.rmtree(venv)
    venv.unlink(missing_ok=True)
    command = [sys.executable, "-m", "venv", *(["--system-site-packages"] if with_base else []), str(venv)]
    if subprocess.run(command, check=False).returncode != 0:
        raise SetupError(f"{venv} could not be made; the reason stands above")
    if with_base and sys.prefix != sys.base_prefix:
        # An environment made from an environment sees the interpreter below both, not its neighbour's packages.
        (site,) = venv.glob("lib/python*/site-packages")
        folders = [entry for entry in sys.path if entry.startswith(sys.prefix) and entry.endswith("site-packages")]
        (site / "pagetide_base.pth").write_text("".join(f"import site; site.addsitedir({name!r})\n" for name in folders))


def cpu_torch_suits(python: Path, extras: Collection[str], torch: str, has_driver: bool) -> bool:
    """Whether torch is to be the build for CPUs: Linux x86-64, no driver, no choice by TORCH, pip's settings or extras."""
    if torch or has_driver or "cuda" in extras or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    return SOURCES.search(output_of(python, "-m", "pip", "config", "list") or "") is None


def install(venv: Path, extras: Sequence[str], torch: str, keeps: bool, has_driver: bool) -> bool:
    """Install what is missing, and the project as a link. Returns whether torch came from the index of builds for CPUs."""
    python, pinned = venv / "bin" / "python", pins((ROOT / "constraints.txt").read_text())
    visible = visible_to(python)
    lines = limits(pinned, visible, torch, keeps)
    cpu_build = False
    if "torch" not in visible:
        if cpu_torch_suits(python, extras, torch, has_driver):
            say(f"downloads {CPU_TORCH}: no NVIDIA driver found here; TORCH={pinned['torch']} asks for the build with CUDA")
            # By itself, so that nothing else comes from that index.
            with suppress(SetupError):
                pip(python, "--index-url", CPU_INDEX, "--no-deps", "--timeout=5", "--retries=0", pinned["torch"])
                cpu_build = True
        if not cpu_build:
            say(f"downloads {CUDA_TORCH}")
    say(f"installs what is missing of pagetide[{','.join(extras)}]")
    constraints = venv / "constraints.txt"
    constraints.write_text("\n".join(lines) + "\n")
    pip(python, "--quiet", "-c", constraints, "setuptools")
    # Without build isolation: setuptools is all that it needs. Where torch is there, what is missing is small.
    arguments = ["-c", constraints, "--no-build-isolation", "-e", f".[{','.join(extras)}]", *([torch] if torch else [])]
    pip(python, *(["--quiet"] if "torch" in visible else []), *arguments)
    return cpu_build


def set_up(venv: Path, extras: Collection[str], torch: str, python_named: bool, has_driver: bool) -> None:
    """Bring the environment to what is asked for; does nothing if it is there already."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    stamp = stamp_of(venv)
    torch = torch or stamp.get("torch", "")
    # A copied or moved checkout is another one: scripts and links name its place.
    made_of = [pyproject["project"], pyproject["build-system"], pyproject["tool"]["setuptools"], str(ROOT)]
    made_of += [(ROOT / name).read_text() for name in ("constraints.txt", ".ci/setup.py")]
    wanted = {
        "made_of": hashlib.sha256(json.dumps(made_of).encode()).hexdigest(),
        "extras": sorted({*extras, *stamp.get("extras", [])}),
        "torch": torch,
    }
    reason = rebuild_reason(venv, stamp, python_named, torch, has_driver)
    if reason is None and {name: stamp.get(name) for name in wanted} == wanted:
        return
    python = venv / "bin" / "python"
    if reason is None:
        with_base, cpu_build, base = (stamp.get(name) for name in ("with_base", "cpu_build", "base"))
        # One that was made by other means is completed, and its torch stays.
        keeps = with_base or (not stamp and recent_enough(visible_to(python).get("torch", "0"), pyproject))
        (venv / "pagetide.json").unlink(missing_ok=True)
    else:
        say(f"makes {venv.name} with {sys.executable}: {reason}")
        found = None if torch else output_of(sys.executable, "-c", "import torch; print(torch.__version__)")
        with_base = keeps = found is not None and recent_enough(found, pyproject)
        cpu_build, base = False, sys.prefix
        if with_base:
            say(f"torch {found} is there already and is used, with what lies beside it")
        create(venv, with_base)
    cpu_build = install(venv, wanted["extras"], torch, keeps and not torch, has_driver) or cpu_build
    version = output_of(python, "-c", "import torch; print(torch.__version__)")
    if version is None:
        raise SetupError(f"torch is installed but cannot be imported; see: {python} -c 'import torch'")
    whole = {**wanted, "with_base": with_base, "cpu_build": cpu_build, "base": base or sys.prefix}
    (venv / "pagetide.json").write_text(json.dumps(whole, indent=2) + "\n")
    say(f"{venv.name} is ready: torch {version}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the environment that the make targets run in.")
    parser.add_argument("--venv", default=".venv", help="its folder, from the checkout's root (default: .venv)")
    parser.add_argument("--extra", action="append", default=[], help="an optional dependency group of pyproject.toml")
    arguments = parser.parse_args()
    venv = ROOT / arguments.venv
    if Path(sys.prefix).resolve() == venv.resolve():  # activated: it cannot make itself anew
        base = sys._base_executable  # type: ignore[attr-defined]
        os.execv(base, [base, __file__, *sys.argv[1:]])
    torch = os.environ.get("TORCH", "").strip()
    has_driver = any(Path(file).exists() for file in DRIVER_FILES)
    try:
        if torch and name_of(torch) != "torch":
            raise SetupError(f"TORCH={torch} is not a requirement for torch: write TORCH=torch=={torch}, say")
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build" / "setup.lock").open("w") as lock:  # `make -j test check` makes the environment once
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up(venv, arguments.extra, torch, bool(os.environ.get("PYTHON")), has_driver)
            # Its sources may have changed since the project was installed.
            subprocess.run([venv / "bin" / "python", ROOT / "native" / "build.py"], check=True)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A virtual environment on disk, with a stamp of what it was made from. Standard library only."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
    cpu_build: bool = False  # the CPU build was taken: no driver, and the user chose no torch
    complete: bool = False  # False while packages are being installed


def normalised(name: str) -> str:
    """The name as indexes compare it (PyPA, "Names and normalization")."""
    return re.sub(r"[-_.]+", "-", name).lower()


def say(sentence: str) -> None:
    print(f"set-up: {sentence}", flush=True)


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

    def pip_settings(self) -> dict[str, str]:
        """What the user told pip for `pip install`, by environment variables and files; raises SetupError."""
        command: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check", "config", "list"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise SetupError(f"pip cannot tell how it is configured: {run.stderr.strip()}")
        # global.index-url='https://...', then install.*, then :env:.*: later ones win in pip, and here.
        found = re.findall(r"^(global|install|:env:)\.([\w-]+)=(.*)$", run.stdout, re.MULTILINE)
        order = ["global", "install", ":env:"]
        found.sort(key=lambda setting: order.index(setting[0]))
        return {name: str(ast.literal_eval(value)) for _, name, value in found}

    def pip(self, *arguments: str | Path, quiet: bool = False) -> None:
        """Runs `pip install`; raises SetupError."""
        command: list[str | Path] = [self.python, "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--quiet"] if quiet else []
        if subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode != 0:
            raise SetupError(
                "pip could not install what is missing; the reason stands above. To try again, run make again"
            )

"""Builds wheel and sdist into dist/ from what git holds, and tries each in an environment of its own, from another folder.

    python .ci/distribution.py [--release]

Run by `make dist` in an environment that has the extra `dist` and can import torch. The environments that are made here see
what that one has, so nothing is downloaded. With --release the checks of a release have to pass too; otherwise they are
printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from setup import ROOT

PACKAGES = (
    "common", "monitor", "allocator", "cache", "scheduler", "api", "frames", "native", "engine", "server", "fleet", "configs",
)  # fmt: skip
LIBRARY = "pagetide/native/_kernels.so"  # built where there is a compiler
LINK = re.compile(r"\]\(\s*<?(?![a-z][a-z0-9+.-]*:|#)([^)\s>]+)")
PLACEHOLDER = "ADDRESS-OF-THIS-REPOSITORY"


class DistError(Exception):
    """What was built cannot be published; the message is a sentence for the maintainer."""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """The standard output of a command. Raises DistError with all it said if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = " ".join(map(str, command))
        raise DistError(f"`{line}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- what is built ------------------------------------------------------------------------------


def expected_files(tracked: Iterable[str]) -> set[str]:
    """The files of the packages, by their places in a wheel."""
    links = {f"pagetide/{package}" for package in PACKAGES}
    return {
        name if name.startswith("pagetide/") else f"pagetide/{name}"
        for name in tracked
        if name.startswith((*(f"{package}/" for package in PACKAGES), "pagetide/")) and name not in links
    }


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return {info.filename: opened.read(info) for info in opened.infolist() if not info.is_dir()}


def check_files(from_sdist: Path, direct: Path, expected: set[str]) -> None:
    """Raises DistError if the wheels differ from each other, or hold other files than `expected`."""
    files, others = contents(from_sdist), contents(direct)
    differing = sorted(name for name in files.keys() | others.keys() if files.get(name) != others.get(name))
    if differing:
        raise DistError(f"the wheel of the sdist and that of the checkout differ in: {', '.join(differing)}")
    packaged = {name for name in files if ".dist-info/" not in name and name != LIBRARY}
    if packaged != expected:
        raise DistError(
            f"the wheel lacks {sorted(expected - packaged)} of what git holds, and has {sorted(packaged - expected)} "
            f"that git does not hold"
        )


def check_metadata(raw: bytes, origin: str) -> None:
    """Raises DistError for metadata that a package index refuses, or a description with links into the repository."""
    from packaging.metadata import Metadata

    try:
        metadata = Metadata.from_email(raw, validate=True)
    except ExceptionGroup as group:
        said = "; ".join(map(str, group.exceptions))
        raise DistError(f"the metadata of {origin} are not valid: {said}") from group
    relative = LINK.findall(metadata.description or "")
    if relative or not metadata.description:
        raise DistError(f"the description of {origin} is empty or has relative links: {', '.join(relative)}")


def metadata_of(path: Path) -> bytes:
    """METADATA of a wheel, PKG-INFO of an sdist."""
    if path.suffix == ".whl":
        return next(data for name, data in contents(path).items() if name.endswith(".dist-info/METADATA"))
    with tarfile.open(path) as opened:
        info = min((name for name in opened.getnames() if name.endswith("/PKG-INFO")), key=len)
        member = opened.extractfile(info)
        assert member is not None
        return member.read()


def copy_tracked(names: Iterable[str], target: Path) -> None:
    """Copies these files of the checkout, links as links. In the checkout itself a build finds what earlier ones left."""
    for name in names:
        if os.path.lexists(ROOT / name):  # else deleted, and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def build(out: Path) -> tuple[Path, Path]:
    """Wheel and sdist in `out`, checked."""
    tracked = [name for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0") if name]
    tree = out / "checkout"
    copy_tracked(tracked, tree)
    builds = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir"]
    run(*builds, out, tree, cwd=out)  # the sdist, and a wheel from it
    run(*builds, out / "direct", "--wheel", tree, cwd=out)
    (wheel,), (sdist,), (direct,) = out.glob("*.whl"), out.glob("*.tar.gz"), (out / "direct").glob("*.whl")
    check_files(wheel, direct, expected_files(tracked))
    for path in (wheel, sdist):
        check_metadata(metadata_of(path), path.name)
    return wheel, sdist


# ---- what is installed --------------------------------------------------------------------------


def fresh_environment(path: Path) -> Path:
    """An environment that can import what this one has, pip too, after its own. Returns its `bin`."""
    venv.create(path, with_pip=False, symlinks=True)  # with_pip would bring another setuptools in Python 3.11
    (site,) = path.glob("lib/python*/site-packages")
    # As plain paths, so that .pth files there, of this checkout's editable install, are not read.
    others = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("".join(f"{entry}\n" for entry in others))
    return path / "bin"


def install(bin_folder: Path, path: Path, version: str, cwd: Path) -> None:
    """Installs the file, and checks that pip finds all it requires. Downloads nothing."""
    pip = [bin_folder / "python", "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    run(*pip, "--no-deps", "--ignore-installed", "--no-build-isolation", path, cwd=cwd)
    run(*pip, f"pagetide=={version}", cwd=cwd)


def try_out(bin_folder: Path, version: str, cwd: Path) -> list[str]:
    """Uses what was installed, from the folder `cwd`. Returns what was seen. Raises DistError."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PAGETIDE_"))}
    own = {name: str(cwd / name.lower()) for name in ("PAGETIDE_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    env = kept | own | {"OMP_NUM_THREADS": "1"}
    python, pagetide, monitor = (bin_folder / name for name in ("python", "pagetide", "vram-monitor"))
    where = run(python, "-c", "import pagetide; print(pagetide.__file__)", cwd=cwd, env=env).strip()
    if not Path(where).is_relative_to(bin_folder.parent):
        raise DistError(f"pagetide was imported from {where}, not from {bin_folder.parent}")
    for command in (pagetide, monitor):
        said = run(command, "--version", cwd=cwd, env=env).split()
        if said[-1:] != [version]:
            raise DistError(f"`{command.name} --version` says {' '.join(said)!r}, not {version}")
    (demo,) = json.loads(run(pagetide, "models", "--json", cwd=cwd, env=env))
    if demo["error"]:
        raise DistError(f"the bundled model is not usable: {demo['error']}")
    line = run(pagetide, "generate", "--model", "demo", "--prompt", "Call me", "--max-new-tokens", "8", "--temperature",
               "0", "--device", "cpu", "--kv-memory", "32MiB", "--json", cwd=cwd, env=env)  # fmt: skip
    (completion,) = json.loads(line)["completions"]
    if len(completion["token_ids"]) != 8 or not completion["text"]:
        raise DistError(f"`pagetide generate` gave: {line}")
    devices = json.loads(run(monitor, "--json", "-o", "host", cwd=cwd, env=env))["devices"]
    table = run(monitor, "-1", "-o", "host", cwd=cwd, env=env)
    if len(devices) != 1 or not table.strip():
        raise DistError(f"`vram-monitor` shows {devices} and {table!r}")
    return [f"pagetide {version} from {Path(where).parent.relative_to(bin_folder.parent)}", repr(completion["text"])]


# ---- what makes it a release --------------------------------------------------------------------


def missing_for_release(pyproject: dict[str, object], changelog: str, readme: str, status: str) -> list[str]:
    """What keeps the checkout from being a release, as sentences."""
    project = pyproject["project"]
    assert isinstance(project, dict)
    found = []
    if "Repository" not in project.get("urls", {}):
        found.append("pyproject.toml has no Repository in [project.urls]")
    if PLACEHOLDER in readme:
        found.append(f"README.md still says {PLACEHOLDER}")
    heading = re.search(rf"^## \[{re.escape(project['version'])}\] - (.+)$", changelog, re.MULTILINE)
    try:
        datetime.date.fromisoformat(heading[1] if heading else "")
    except ValueError:
        found.append(f"CHANGELOG.md has no heading `## [{project['version']}] - YYYY-MM-DD`")
    if status:
        found.append("the checkout has changes that are not committed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds wheel and sdist, and tries each.")
    parser.add_argument("--release", action="store_true", help="fail unless the checkout can be released")
    release = parser.parse_args().release
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    version = pyproject["project"]["version"]
    try:
        missing = missing_for_release(
            pyproject,
            (ROOT / "CHANGELOG.md").read_text("utf-8"),
            (ROOT / "README.md").read_text("utf-8"),
            run("git", "status", "--porcelain", cwd=ROOT),
        )
        if missing and release:
            raise DistError("not a release: " + "; ".join(missing))
        with tempfile.TemporaryDirectory(prefix="pagetide-dist-") as folder:
            scratch = Path(folder)
            print("dist: builds the sdist, a wheel from it, and a wheel from the checkout", flush=True)
            built = build(scratch)
            for path in built:
                cwd = scratch / path.suffix[1:]
                cwd.mkdir()
                bin_folder = fresh_environment(cwd / "venv")
                install(bin_folder, path, version, cwd)
                print(f"dist: {path.name} works: {', '.join(try_out(bin_folder, version, cwd))}", flush=True)
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            (ROOT / "dist").mkdir()
            for path in built:
                shutil.copy2(path, ROOT / "dist")
                print(f"dist: dist/{path.name}, {path.stat().st_size / 1e6:.1f} MB")
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    for sentence in missing:
        print(f"dist: not a release yet: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

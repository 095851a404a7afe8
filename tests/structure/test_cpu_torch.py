"""Where torch's build for CPUs comes from (.ci/cpu_torch.py): a local index, real pip, and a fake torch of 1 KB."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cpu_torch
import pytest
from cpu_torch import Machine, NoCpuBuild
from environment import Environment, SetupError, Stamp

import setup

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"cp{PYTHON.replace('.', '')}"
CPU_WHEEL = f"torch-2.13.0+cpu-{TAG}-{TAG}-linux_x86_64.whl"
PLAIN = Machine("linux", "x86_64", has_driver=False)
WANTED = Stamp("f", PYTHON, "/usr", ("test",), "", reuses_base=False)
PIN = "torch==2.13.0"


class Index:
    """A package index over HTTP: `pages` by path, and what was asked of it. A path in `hangs` is never answered."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, list[str]] = {}
        self.hangs: set[str] = set()
        self.asked: list[str] = []
        self.over = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                question = f"{self.command} {self.path}"
                index.asked.append(question)
                if question in index.hangs:
                    index.over.wait()
                body = index.answer(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body or b"")

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"

    def answer(self, path: str) -> bytes | None:
        project = path.removeprefix("/simple/").strip("/")
        if project in self.links:
            return "".join(f'<a href="{link}">a wheel</a>\n' for link in self.links[project]).encode()
        return self.files.get(path)

    def lists(self, project: str, filename: str, wheel: bytes = b"", checksum: str | None = None) -> None:
        """Adds a file to a project's page, written as PyTorch's index writes it."""
        path = f"/files/{filename.replace('+', '%2B')}"
        self.files[path] = wheel
        checksum = hashlib.sha256(wheel).hexdigest() if checksum is None else checksum
        self.links.setdefault(project, []).append(f"{path}#sha256={checksum}")

    def projects_asked(self) -> set[str]:
        return {question.split("/")[2] for question in self.asked if "/simple/" in question}

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def wheel(folder: Path, name: str, version: str, requires: str = "") -> bytes:
    """A package with one empty module."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    files = {
        f"{name}/__init__.py": b"",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for path, text in files.items()
    )
    file = folder / "wheel.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(path, text)
    return file.read_bytes()


@pytest.fixture
def index() -> Iterator[Index]:
    served = Index()
    yield served
    served.close()


@pytest.fixture
def users_index() -> Iterator[Index]:
    served = Index()
    yield served
    served.close()


@pytest.fixture
def pip_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip as it is without anybody's settings, and no proxy before the local index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Recorded(Environment):
    """An environment whose pip writes down what it is asked, and refuses where it is told to."""

    def __init__(self, path: Path, settings: dict[str, str] | None = None, refuses: bool = False) -> None:
        super().__init__(path)
        self._settings = settings or {}
        self._refuses = refuses
        self.asked: list[tuple[str | Path, ...]] = []

    def runs_as(self) -> str | None:
        return PYTHON

    def pip_settings(self) -> dict[str, str]:
        return self._settings

    def pip(self, *arguments: str | Path, quiet: bool = False) -> None:
        self.asked.append(arguments)
        if self._refuses:
            raise SetupError("pip could not install what is missing")


# ---- the index ----------------------------------------------------------------------------------


def test_the_wheel_of_this_version_python_and_processor_is_found_and_measured(index: Index) -> None:
    others = [
        f"torch-2.13.0-{TAG}-none-macosx_14_0_arm64.whl",
        f"torch-2.13.0+cpu-{TAG}-{TAG}-manylinux_2_28_aarch64.whl",
        f"torch-2.13.0+cpu-{TAG}-{TAG}-win_amd64.whl",
        f"torch-2.13.0+cpu-{TAG}-{TAG}t-manylinux_2_28_x86_64.whl",
        "torch-2.13.0+cpu-cp39-cp39-manylinux_2_28_x86_64.whl",
        f"torch-2.13.0+cu130-{TAG}-{TAG}-manylinux_2_28_x86_64.whl",
        f"torch-2.12.0+cpu-{TAG}-{TAG}-manylinux_2_28_x86_64.whl",
        f"torch-2.13.01+cpu-{TAG}-{TAG}-manylinux_2_28_x86_64.whl",
    ]
    for filename in [*others, f"torch-2.13.0+cpu-{TAG}-{TAG}-manylinux_2_28_x86_64.whl"]:
        index.lists("torch", filename, filename.encode())
    found = cpu_torch.find("2.13.0", PYTHON, {}, index.url)
    assert found.url.endswith(f"/files/torch-2.13.0%2Bcpu-{TAG}-{TAG}-manylinux_2_28_x86_64.whl")
    assert found.version == "2.13.0+cpu"
    assert found.num_bytes == len(f"torch-2.13.0+cpu-{TAG}-{TAG}-manylinux_2_28_x86_64.whl")
    assert replace(found, num_bytes=191_794_682).size == "192 MB"


def test_a_size_that_is_not_told_is_approximate(index: Index) -> None:
    index.lists("torch", CPU_WHEEL)
    index.files.clear()
    found = cpu_torch.find("2.13.0", PYTHON, {}, index.url)
    assert found.num_bytes is None
    assert found.size == "about 192 MB"


def test_a_size_that_does_not_come_in_time_is_not_waited_for(index: Index) -> None:
    index.lists("torch", CPU_WHEEL)
    index.hangs.add(f"HEAD /files/{CPU_WHEEL.replace('+', '%2B')}")
    assert cpu_torch.find("2.13.0", PYTHON, {}, index.url, within_s=0.3).num_bytes is None


def test_an_index_that_never_answers_is_left_alone(index: Index) -> None:
    index.hangs.add("GET /simple/torch/")
    with pytest.raises(NoCpuBuild, match=r"did not answer within 0\.05 s"):
        cpu_torch.find("2.13.0", PYTHON, {}, index.url, within_s=0.05)


def test_a_name_server_that_never_answers_is_no_longer_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: over.wait())
    try:
        with pytest.raises(NoCpuBuild, match="did not answer"):
            cpu_torch.find("2.13.0", PYTHON, {}, "http://index.invalid/simple", within_s=0.05)
    finally:
        over.set()


def test_an_index_that_refuses_says_how(index: Index) -> None:
    with pytest.raises(NoCpuBuild, match="answered 404 Not Found"):
        cpu_torch.find("2.13.0", PYTHON, {}, index.url)
    index.lists("torch", "torch-2.13.0+cpu-cp39-cp39-manylinux_2_28_x86_64.whl")
    with pytest.raises(NoCpuBuild, match=f"has no torch 2.13.0 for Python {PYTHON}"):
        cpu_torch.find("2.13.0", PYTHON, {}, index.url)
    with pytest.raises(NoCpuBuild, match="cannot be reached"):
        cpu_torch.find("2.13.0", PYTHON, {"cert": "/no/such/file"}, index.url)


def test_an_index_that_is_not_there(index: Index) -> None:
    index.close()
    with pytest.raises(NoCpuBuild, match=r"cannot be reached: .*refused"):
        cpu_torch.find("2.13.0", PYTHON, {}, index.url)


def test_the_index_is_reached_by_pips_proxy(index: Index) -> None:
    index.lists("torch", CPU_WHEEL)
    index.links["http://index.invalid/simple/torch"] = index.links["torch"]  # a proxy is asked for whole addresses
    found = cpu_torch.find("2.13.0", PYTHON, {"proxy": index.url}, "http://index.invalid/simple")
    assert found.version == "2.13.0+cpu"
    assert "GET http://index.invalid/simple/torch/" in index.asked


# ---- who gets it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "wanted", "settings"),
    [
        (replace(PLAIN, has_driver=True), WANTED, {}),
        (replace(PLAIN, processor="aarch64"), WANTED, {}),
        (Machine("darwin", "arm64", has_driver=False), WANTED, {}),
        (Machine("darwin", "x86_64", has_driver=False), WANTED, {}),
        (PLAIN, replace(WANTED, extras=("cuda", "test")), {}),
        (PLAIN, replace(WANTED, torch=PIN), {}),
        (PLAIN, WANTED, {"index-url": "https://mirror.example/simple"}),
        (PLAIN, WANTED, {"extra-index-url": "https://mirror.example/simple"}),
        (PLAIN, WANTED, {"find-links": "/srv/wheels"}),
        (PLAIN, WANTED, {"no-index": "true"}),
    ],
)
def test_the_index_is_not_asked_where_somebody_chose_or_the_build_would_not_suit(
    tmp_path: Path, index: Index, machine: Machine, wanted: Stamp, settings: dict[str, str]
) -> None:
    index.lists("torch", CPU_WHEEL)
    environment = Recorded(tmp_path, settings)
    assert setup.fetch_torch(environment, PIN, wanted, machine, index.url) is False
    assert index.asked == []
    assert environment.asked == []  # torch comes with everything else


def test_a_machine_without_a_driver_gets_it_and_hears_its_size_first(
    tmp_path: Path, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    index.lists("torch", CPU_WHEEL, b"x" * 3_000_000)
    environment = Recorded(tmp_path, {"cert": "", "no-index": "0"})
    assert setup.fetch_torch(environment, PIN, WANTED, PLAIN, index.url) is True
    assert environment.asked == [("--index-url", index.url, "--no-deps", PIN)]
    said = capsys.readouterr().out
    assert f"downloads torch 2.13.0+cpu from {index.url}: 3 MB." in said
    assert f"TORCH={PIN} asks for the build with CUDA, about 3 GB" in said


def test_where_the_index_or_pip_fails_it_goes_on_as_before_and_says_so(
    tmp_path: Path, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = Recorded(tmp_path, refuses=True)
    assert setup.fetch_torch(environment, PIN, WANTED, PLAIN, index.url) is False
    said = capsys.readouterr().out
    assert "answered 404" in said
    assert f"downloads {PIN} with CUDA and its libraries: about 3 GB" in said
    assert environment.asked == []
    index.lists("torch", CPU_WHEEL)
    assert setup.fetch_torch(environment, PIN, WANTED, PLAIN, index.url) is False
    said = capsys.readouterr().out
    assert f"could not be installed from {index.url}" in said
    assert f"downloads {PIN} with CUDA and its libraries: about 3 GB" in said


@pytest.mark.parametrize(
    ("machine", "settings", "size"),
    [
        (PLAIN, {"find-links": "/srv/wheels"}, "where pip is told to (find-links): about 192 MB where it is for CPUs"),
        (replace(PLAIN, has_driver=True), {}, "with CUDA and its libraries: about 3 GB"),
        (replace(PLAIN, processor="aarch64"), {}, "about 192 MB where it is for CPUs, about 3 GB"),
        (Machine("darwin", "arm64", has_driver=False), {}, "about 100 MB"),
    ],
)
def test_every_torch_is_announced_with_its_size(
    machine: Machine, settings: dict[str, str], size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.announce_torch(PIN, settings, machine)
    assert size in capsys.readouterr().out


def test_what_comes_beside_torch_is_announced_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    setup.announce_others({"torch": PIN, "triton": "triton==3.7.1", "ruff": "ruff==0.17.5", "rich": "rich==15.0.0"})
    assert "downloads triton==3.7.1, ruff==0.17.5, rich==15.0.0, and what they need: about 210 MB" in (
        capsys.readouterr().out
    )
    setup.announce_others({"torch": PIN})
    assert capsys.readouterr().out == ""


# ---- with pip itself ----------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A new environment with this interpreter's pip and nothing else."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    pip = pytest.importorskip("pip")
    made = Environment(tmp_path / "venv")
    venv.create(made.path, symlinks=True)
    (packages,) = made.path.glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return made


@pytest.mark.skipif(not Machine.here().gets_cuda, reason="the wheel is for Linux on x86-64")
def test_torch_alone_comes_from_pytorchs_index_and_stays_when_the_rest_comes(
    tmp_path: Path,
    environment: Environment,
    index: Index,
    users_index: Index,
    pip_unset: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index.lists("torch", CPU_WHEEL, wheel(tmp_path, "torch", "2.13.0+cpu", requires="needed"))
    users_index.lists("torch", f"torch-2.13.0-{TAG}-{TAG}-linux_x86_64.whl", wheel(tmp_path, "torch", "2.13.0"))
    for name in ("needed", "small"):
        index.lists(name, f"{name}-99.0-py3-none-any.whl", wheel(tmp_path, name, "99.0"))
        users_index.lists(name, f"{name}-1.0-py3-none-any.whl", wheel(tmp_path, name, "1.0"))

    assert setup.fetch_torch(environment, PIN, WANTED, PLAIN, index.url) is True
    monkeypatch.setenv("PIP_INDEX_URL", users_index.url)  # in place of the index that pip has without settings
    setup.fetch(environment, ["torch>=2.10", "small"], {"small": "small"}, [PIN], "")

    assert environment.visible() == {"torch": "2.13.0+cpu", "small": "1.0", "needed": "1.0"}
    assert index.projects_asked() == {"torch"}
    assert not any(question.startswith("GET /files/torch") for question in users_index.asked)


def test_pips_settings_are_read_as_pip_does(
    tmp_path: Path, environment: Environment, pip_unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nfind-links = /srv/wheels\nextra-index-url =\n  https://a.example\n  https://b.example\n"
        "[install]\nfind-links = /srv/more\n[list]\nindex-url = https://c.example\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://d.example/it's")
    settings = environment.pip_settings()
    assert settings["find-links"] == "/srv/more"
    assert settings["extra-index-url"].split() == ["https://a.example", "https://b.example"]
    assert settings["index-url"] == "https://d.example/it's"
    assert cpu_torch.chosen_sources(settings) == ["index-url", "extra-index-url", "find-links"]

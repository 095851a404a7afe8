"""The container file: what it copies exists, what it installs is what the project needs, and its images have no root."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tomllib

import pytest
from checkout import ROOT, files

import setup  # .ci/setup.py

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
STAGES = {stage.split(" AS ")[1].split("\n")[0]: stage for stage in re.split(r"^FROM ", "\n".join(LINES), flags=re.M)[1:]}
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def test_the_build_sees_the_whole_package_and_nothing_else() -> None:
    assert IGNORED[0] == "*"
    seen = {line[1:] for line in IGNORED if line.startswith("!")}
    assert all((ROOT / name).exists() for name in seen)
    packages = {path.relative_to(ROOT).parts[0] for path in files() if path.name == "__init__.py"}
    assert seen >= (packages - {"benchmarks", "tests"}) | {"src", PYPROJECT["project"]["readme"]}
    assert not seen & {"tests", "benchmarks", ".git", ".venv", "build"}


def test_the_monitors_image_installs_what_the_project_names_and_no_torch() -> None:
    (install,) = (line for line in LINES if "nvidia-ml-py" in line)
    wanted = set(install.split("constraints.txt", 1)[1].split())
    required = {re.split(r"[<>=]", requirement)[0] for requirement in PYPROJECT["project"]["dependencies"]}
    assert wanted <= required and wanted.isdisjoint({"torch", "transformers"})


def test_the_engines_image_can_serve_with_torch_of_the_index_that_make_asks() -> None:
    stage = STAGES["build-engine"]
    assert f"--index-url {setup.CPU_INDEX} --no-deps" in stage
    assert re.findall(r"extras = (\[.*?\])", stage) == ['["constrained", "server"]']
    assert {"constrained", "server", "cuda"} <= PYPROJECT["project"]["optional-dependencies"].keys()
    stage = STAGES["engine"]
    assert "\nEXPOSE 8000\n" in stage and "\nENV PAGETIDE_HOST=0.0.0.0\n" in stage


@pytest.mark.parametrize(("answer", "status"), [(None, 0), (b"HTTP/1.1 200 OK\r\n", 0), (b"HTTP/1.1 503 X\r\n", 1), (b"", 1)])
def test_the_health_check_of_the_engines_image(answer: bytes | None, status: int) -> None:
    """`answer` of what listens at the port; None: nothing does, as another command runs."""
    (line,) = (line for line in STAGES["engine"].splitlines() if line.startswith("HEALTHCHECK "))
    program, *arguments = json.loads(line.partition(" CMD ")[2])
    assert program == "python" and ":8000" not in line and "8000" in arguments[1]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        here = [argument.replace("8000", str(listening.getsockname()[1])) for argument in arguments]
        if answer is not None:
            listening.listen()
        with subprocess.Popen([sys.executable, *here]) as check:
            if answer is not None:
                connection, _ = listening.accept()
                with connection:
                    asked = connection.recv(1000)
                    connection.sendall(answer)
                assert asked == b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"
            assert check.wait(30) == status


def test_what_a_user_runs_has_no_root_and_a_command_of_the_project() -> None:
    for name, command in (("monitor", "vram-monitor"), ("engine", "pagetide")):
        stage = STAGES[name]
        assert "\nUSER 10001\n" in stage and "--uid 10001 " in stage and f'ENTRYPOINT ["{command}"]' in stage
        assert command in PYPROJECT["project"]["scripts"]
        assert not re.search(r"\nUSER (?!10001\n)", stage)
    assert 'CMD ["vram-monitor", "leases"]' in STAGES["monitor"]

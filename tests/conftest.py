"""Every test session has a world of its own: no test meets a monitor, or an engine, of whoever runs the tests."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from torch_free import needs_torch, refuse_torch, runs_with_torch

# The benchmarks are programs of the checkout, not part of what is installed. Last: what is installed goes first.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

# How long an example takes says how busy the machine is, not whether the code is right. `make test` has the quick ones,
# `make test-all` the deep ones, both the same on every run; `make soak` draws others each time.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=15)
settings.register_profile("deep", settings.get_profile("quick"), max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("deep"), derandomize=False, max_examples=1000)
settings.load_profile("quick")

# This process may ignore signals, SIGHUP under nohup and SIGINT and SIGQUIT in a script's background, and so would every child.
# A handler is not inherited: children begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", choices=("with", "without"), help="only files that need torch, or only those that need none")
    parser.addoption("--tier", choices=("deep",), help="only tests/deep, and properties, which the profile gives more examples")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--torch") == "without":
        refuse_torch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of tests, and folders by their conftest, that `--torch` does not ask for. None: other rules decide."""
    torch, own = config.getoption("--torch"), collection_path / "conftest.py"
    if own.is_file():
        return (torch == "without" and needs_torch(own)) or None
    if torch is None or not collection_path.name.startswith("test_"):
        return None
    return runs_with_torch(collection_path) == (torch == "without") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--tier=deep`: what lies in tests/deep, and properties that `make test` tries with few examples.

    A deep file of servers or fleets stays in one process, so that each of these starts once.
    """
    deep = Path(__file__).parent / "deep"
    if config.getoption("--tier") == "deep":
        items[:] = [item for item in items if deep in item.path.parents or _is_property(item)]
    for item in items:
        starts = any(deep / folder in item.path.parents for folder in ("server", "fleet", "front"))
        if starts and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(deep).as_posix()))


def _is_property(item: pytest.Item) -> bool:
    """Whether it is made of examples. A test that runs a state machine itself is marked."""
    return is_hypothesis_test(getattr(item, "obj", None)) or item.get_closest_marker("hypothesis") is not None


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A runtime directory of the tests' own, and empty folders of settings, caches and states, here and in children."""
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGETIDE_RUNTIME_DIR", str(runtime))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for sockets, whose addresses are short."""
    from broker_rig import short_folder

    with short_folder() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Many tests collect garbage, and so does every engine's close: spare it what torch and transformers brought along."""
    gc.collect()
    gc.freeze()

"""Fixtures of all tests of engines, in both tiers: one monitor for all, else each `LLM` would start one, and end it again."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pagetide.monitor import Watch, watch


@pytest.fixture(scope="session", autouse=True)
def _one_monitor(_own_folders: None) -> Iterator[Watch]:
    with watch(timeout_s=60) as watched:
        yield watched


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

"""Whether torch's build for CPUs is the one to install, and where PyTorch's own index has it.

Standard library only. On Linux x86-64 the default package index has torch with CUDA, of no use to a machine without an
NVIDIA driver. PyTorch documents an index of builds for CPUs; only torch itself is ever taken from it, so that a package
of the same name there can never stand in for one that the user's own index serves.
"""

from __future__ import annotations

import platform
import queue
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

# The address that https://pytorch.org/get-started/locally gives for pip on Linux without CUDA.
INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_WITHIN_S = 5.0

# Sizes of torch 2.13's wheels, for where no server tells them: the build for CPUs on Linux x86-64, that of macOS, and
# the default one of Linux x86-64 with the libraries of NVIDIA's and the triton that it depends on.
CPU_MB = 192
MAC_MB = 100
CUDA_GB = 3

# What the driver lays out on Linux, in containers that were given a GPU, and under WSL.
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
# pip's settings that say where packages come from, by any of their names.
SOURCES = ("index-url", "pypi-url", "extra-index-url", "find-links", "no-index")

T = TypeVar("T")


class NoCpuBuild(Exception):
    """The index offers no build to install; the message says why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which build of torch a machine is served by."""

    system: str  # "linux", "darwin"
    processor: str  # "x86_64", "aarch64"
    has_driver: bool  # of NVIDIA's

    @classmethod
    def here(cls) -> Machine:
        return cls(sys.platform, platform.machine(), any(Path(file).exists() for file in DRIVER_FILES))

    @property
    def gets_cuda(self) -> bool:
        """Whether the default index serves it a build with CUDA."""
        return self.system == "linux" and self.processor == "x86_64"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A build of torch as the index lists it."""

    url: str
    version: str  # "2.13.0+cpu"
    num_bytes: int | None  # None where the server does not say

    @property
    def size(self) -> str:
        return f"about {CPU_MB} MB" if self.num_bytes is None else f"{self.num_bytes / 1e6:,.0f} MB"


def is_wanted(machine: Machine, extras: Collection[str]) -> bool:
    """Whether the CPU build of torch suits this machine better. A choice by TORCH or pip's settings is not considered."""
    return machine.gets_cuda and not machine.has_driver and "cuda" not in extras


def chosen_sources(settings: Mapping[str, str]) -> list[str]:
    """Those of pip's settings by which the user says where packages come from."""
    return [name for name in SOURCES if settings.get(name, "").lower() not in ("", "0", "false", "no", "off")]


def find(
    release: str,
    python: str,
    settings: Mapping[str, str],
    index: str = INDEX,
    within_s: float = ANSWER_WITHIN_S,
) -> Wheel:
    """The index's wheel of torch `release` ("2.13.0") for a Python ("3.11") on Linux x86-64.

    `settings` are pip's: its proxy and certificates are used. Raises NoCpuBuild, after `within_s` seconds at the latest.
    """
    deadline = time.monotonic() + within_s
    try:
        ask = opener(settings)
        url, version = within(within_s, lambda: listed(ask, release, python, index.rstrip("/"), within_s))
    except TimeoutError:
        raise NoCpuBuild(f"{index} did not answer within {within_s:g} s") from None
    except urllib.error.HTTPError as error:
        raise NoCpuBuild(f"{index} answered {error.code} {error.reason}") from None
    except (OSError, ValueError, HTTPException) as error:  # no route, no name, no TLS; no HTTP
        raise NoCpuBuild(f"{index} cannot be reached: {getattr(error, 'reason', error)}") from None
    num_bytes = None
    with suppress(OSError, TypeError, ValueError, HTTPException):  # a size is no reason to fail
        num_bytes = within(deadline - time.monotonic(), lambda: content_length(ask, url, within_s))
    return Wheel(url, version, num_bytes)


def listed(
    ask: urllib.request.OpenerDirector, release: str, python: str, index: str, timeout_s: float
) -> tuple[str, str]:
    """Address and version of the wheel that suits; raises NoCpuBuild where there is none."""
    with ask.open(f"{index}/torch/", timeout=timeout_s) as answer:
        links = Links(answer.url)
        links.feed(answer.read().decode(errors="replace"))
    tag = f"cp{python.replace('.', '')}"
    wanted = re.compile(rf"torch-({re.escape(release)}(?:\+cpu)?)-{tag}-{tag}-(?:manylinux|linux)\w*_x86_64\.whl")
    for url in links.urls:
        if named := wanted.fullmatch(unquote(urlsplit(url).path).rpartition("/")[2]):
            return url, named.group(1)
    raise NoCpuBuild(f"{index} has no torch {release} for Python {python}")


def content_length(ask: urllib.request.OpenerDirector, url: str, timeout_s: float) -> int:
    """The size of a file as its server tells it."""
    with ask.open(urllib.request.Request(url, method="HEAD"), timeout=timeout_s) as answer:
        return int(answer.headers["Content-Length"])


def opener(settings: Mapping[str, str]) -> urllib.request.OpenerDirector:
    """What opens addresses as pip would: by the user's proxy, with the user's certificates."""
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=settings.get("cert")))
    ]
    if proxy := settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return urllib.request.build_opener(*handlers)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns or raises; TimeoutError where it takes longer.

    The time limits of sockets hold for each wait alone, and for looking up a name not at all. So the call runs in a
    thread, which is left behind then and ends with the process.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="index", daemon=True).start()
    try:
        result, error = results.get(timeout=max(seconds, 0))
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


class Links(HTMLParser):
    """Collects where the links of an index's page point, without their checksums (PyPA, "Simple repository API")."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self._base = base
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if tag == "a" and name == "href" and value:
                self.urls.append(urldefrag(urljoin(self._base, value)).url)

"""Fixtures of the tests with a browser, in both tiers: Chromium, and pages that may log no errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the tests of the page need playwright")
    if CHROMIUM is None:
        pytest.skip("the tests of the page need Chromium on the PATH")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end none may have logged an error or broken its Content-Security-Policy."""
    contexts, said = [], []

    def open_one(url: str, may_fail: str | None = None, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | options))
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: said.append(line.text) if is_bad(line, may_fail) else None)
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) => console.error(`CSP: ${e.violatedDirective}`))"
        )
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert said == []


def is_bad(line: Any, may_fail: str | None) -> bool:
    """Whether a line of the console is one that the page should not cause. The tests themselves read the canvas often."""
    excused = ["willReadFrequently", *([may_fail] if may_fail else [])]
    return line.type in ("error", "warning") and not any(one in line.text for one in excused)

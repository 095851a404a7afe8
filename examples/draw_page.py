"""Draws the pictures of the server's page in docs/images, from real runs in a real browser.

    python examples/draw_page.py

It serves the bundled model under load, and takes pictures of the page: light, dark with two models, on a phone, and when a
recall has taken memory. The picture of a million blocks is of a made-up pool (tests/page_pools.py), as this machine has no
device for so many. Two runs never have the same timing, so the pictures differ from run to run. It needs Chromium and what
`pip install -e ".[test]"` brings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PICTURES = ("light", "recall", "phone", "dark", "million")
WIDE = {"width": 1440, "height": 900}
HIGH = {"width": 1440, "height": 1240}
PHONE = {"width": 390, "height": 844}
MOST_BYTES = 300_000
COMMON = (  # beginnings that several requests share, as system prompts are
    "It was late in the year, and the ship lay at anchor in the harbour, where the men were waiting for the wind to turn. "
    "The captain had said nothing for three days, and no man dared to ask him what he was looking for in the charts. ",
    "The old house stood at the end of a long road, and its windows looked out over the fields towards the sea. "
    "In the evening the children sat on the stairs and listened to the stories of their grandfather, who had been a sailor. ",
)
WORDS = ("sea", "calm", "whale", "ship", "men", "song", "home", "winter", "light", "voyage", "north", "wind", "old", "far")
NAMES = ("chat", "search", "summary", "agent", "draft")


class PageLoad:
    """Requests from several threads until it is closed.

    Args:
        models: The names that the threads take in turn.
        longest: Of a prompt, in words.
    """

    def __init__(self, url: str, models: Sequence[str], threads: int, longest: int = 220) -> None:
        self._url, self._models, self._longest = url, models, longest
        self._ending = threading.Event()
        for number in range(threads):
            threading.Thread(target=self._ask, args=(number,), daemon=True).start()

    def close(self) -> None:
        """Send no more."""
        self._ending.set()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        turn = 0
        while not self._ending.is_set():
            turn += 1
            beginning = chance.choice(COMMON) if chance.random() < 0.6 else ""
            words = " ".join(chance.choice(WORDS) for _ in range(chance.randrange(4, self._longest)))
            body = {
                "model": self._models[number % len(self._models)], "prompt": beginning + words, "stream": True,
                "max_tokens": chance.randrange(60, 500), "ignore_eos": True, "temperature": 0.9,
                "n": chance.choice((1, 1, 1, 2)),
            }  # fmt: skip
            name = f"{NAMES[number % len(NAMES)]}-{number * 37 + turn}"
            headers = {"content-type": "application/json", "x-request-id": name}
            request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request) as answer:
                    for _ in answer:
                        if self._ending.is_set():
                            return
            except (urllib.error.URLError, ConnectionError):
                return


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of `pagetide serve` with these arguments, once it is ready."""
    command = [sys.executable, "-P", "-m", "pagetide", "serve", "--port", "0", "--no-access-log", *arguments]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + 120
            while True:
                log.seek(0)
                said = log.read()
                if found := re.search(r"serving .* at (\S+)", said):
                    break
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server did not start; it said: {said}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait()


@contextmanager
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("no Chromium was found on the PATH: install one, say `apt install chromium`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


def picture(page: Any, file: Path) -> None:
    """Write what `page` shows as a PNG, with fewer colours if it would be too large."""
    page.mouse.move(0, 0)
    raw = file.with_suffix(".raw.png")
    page.screenshot(path=str(raw))
    with Image.open(raw) as taken:
        image = taken.convert("RGB")
    raw.unlink()
    image.save(file, optimize=True)
    for colours in (256, 128, 64):
        if file.stat().st_size < MOST_BYTES:
            break
        image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.name}: {image.width} x {image.height}, {file.stat().st_size:,} bytes", flush=True)


def opened(chromium: Any, url: str, **options: Any) -> Any:
    """The page in a window of its own."""
    page = chromium.new_context(**({"viewport": WIDE} | options)).new_page()
    page.goto(f"{url}/page/" if not url.endswith("/page/") else url)
    return page


def run_prompt(page: Any, tokens: int) -> None:
    """Run the prompt box until this many tokens are there."""
    page.get_by_role("textbox", name="Prompt").fill("Call me Ishmael. Some years ago")
    page.get_by_text("Sampling").first.click()
    page.get_by_label("Max tokens").fill("400")
    page.get_by_text("Sampling").first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator("#output .token").nth(tokens).wait_for(state="attached", timeout=240_000)


def recall(share: float, kv_bytes: int) -> None:
    """Have the broker take this share of the cache of the one engine that runs."""
    command = [sys.executable, "-P", "-m", "pagetide.vram_monitor"]
    (lease,) = json.loads(subprocess.run([*command, "leases", "--json"], capture_output=True, check=True).stdout)
    subprocess.run([*command, "recall", lease["engine"], str(int(share * kv_bytes))], check=True)


def draw_one_model(chromium: Any, folder: Path, wanted: Sequence[str], seconds: float) -> None:
    """The pictures of one model: light, under a recall, on a phone."""
    with served("demo", "--device", "cpu", "--kv-memory", "min=16MiB,max=96MiB", "--max-seqs", "20") as url:
        busy = seconds > 5
        load = PageLoad(url, ["demo"], 13 if busy else 1)
        page = opened(chromium, url, color_scheme="light")
        page.wait_for_timeout(seconds * 1000)
        more = PageLoad(url, ["demo"], 14 if busy else 1)  # now there are more than may run
        run_prompt(page, 30 if busy else 1)
        if "light" in wanted:
            picture(page, folder / "page-light.png")
        if "recall" in wanted:
            page.set_viewport_size(HIGH)
            page.get_by_role("button", name="Abort").click()
            page.evaluate("document.getElementById('output').hidden = true")
            recall(0.5, page.evaluate("pagetide.models[0].memory.kv"))
            page.locator(".event.recall").first.wait_for(timeout=60_000)
            page.wait_for_timeout(1200)
            picture(page, folder / "page-recall.png")
        if "phone" in wanted:
            phone = opened(chromium, url, viewport=PHONE, device_scale_factor=2, has_touch=True, is_mobile=True)
            phone.wait_for_timeout(min(seconds, 8) * 1000)
            picture(phone, folder / "page-phone.png")
        load.close()
        more.close()


def draw_two_models(chromium: Any, folder: Path, seconds: float) -> None:
    """Two models on one device, dark."""
    names = ["small", "large"]
    arguments = [*(f"--model=demo --served-model-name={name}" for name in names)]
    flat = [part for pair in arguments for part in pair.split()]
    with served(*flat, "--device", "cpu", "--kv-memory", "min=8MiB,max=64MiB", "--max-seqs", "12") as url:
        first = PageLoad(url, names[:1], 14)
        page = opened(chromium, url, color_scheme="dark", viewport={"width": 1680, "height": 960})
        page.wait_for_timeout(seconds * 600)
        second = PageLoad(url, names[1:], 14)
        page.wait_for_timeout(seconds * 600)
        picture(page, folder / "page-dark.png")
        first.close()
        second.close()


def draw_made_up(chromium: Any, folder: Path, num_blocks: int) -> None:
    """A made-up pool, of a million blocks unless told otherwise."""
    sys.path.insert(0, str(ROOT / "tests"))
    from page_pools import PageRig, Simulation

    lengths = (num_blocks // 16, 90)
    load = min(190, num_blocks // 100)
    pool = Simulation("made-up-70b", num_blocks, 64, seed=3, mapped=0.86, load=load, rows=170, lengths=lengths)
    for _ in range(90):
        pool.step()
    with PageRig([pool]) as rig:
        page = opened(chromium, rig.url, color_scheme="light", device_scale_factor=2)
        for number in range(12):
            rig.step(1, (lambda: pool.recall(0.9)) if number == 8 else None)
            page.wait_for_timeout(250)
        page.wait_for_timeout(800)
        picture(page, folder / "page-million.png")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the server's page, from real runs in a browser.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the pictures (default: the repository's)")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES, metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--seconds", type=float, default=25.0, help="of load before a picture (default 25)")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the made-up pool (default 1,000,000)")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    with browser() as chromium, tempfile.TemporaryDirectory() as runtime:
        os.environ["PAGETIDE_RUNTIME_DIR"] = runtime  # a broker of its own: other engines of this machine are left alone
        steps: list[tuple[set[str], Callable[[], None]]] = [
            ({"light", "recall", "phone"}, lambda: draw_one_model(chromium, args.folder, args.only, args.seconds)),
            ({"dark"}, lambda: draw_two_models(chromium, args.folder, args.seconds)),
            ({"million"}, lambda: draw_made_up(chromium, args.folder, args.blocks)),
        ]
        for names, draw in steps:
            if names & set(args.only):
                draw()


if __name__ == "__main__":
    main()

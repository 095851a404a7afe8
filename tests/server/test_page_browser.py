"""The page in a real browser: what it draws is what the frames say, and it stays usable when things go wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from cell_oracle import naive_cells
from fakes import World
from page_pools import MadeUpFleet, PageRig, Pushed, Simulation, record
from random_walk import VARIANTS, walk
from servers import WITH_EVERYTHING, ServerProcess

from pagetide.scheduler.frames.source import FrameSource, MemoryFigures, PoolFacts, encode
from pagetide.scheduler.frames.state import FrameState
from pagetide.server.feed import fleet_picture

playwright = pytest.importorskip("playwright.sync_api", reason="the tests of the page need playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the tests of the page need Chromium on the PATH")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
MARKUP = '<img src=x onerror="globalThis.hacked = 1"><script>globalThis.hacked = 2</script>'
WAIT_MS = 20_000
MOST_LOOKS = 50  # at one random life

# JavaScript that the tests run in the page.
SAME_CELLS = """(expected) => {
    const { cells } = pagetide.shown.get("demo").model;
    return expected.every(([block, cell]) => cells[block] === cell);
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, canvas, [role=dialog]")].filter((node) => {
    if (node.hidden || node.closest("[hidden]")) return false;
    const labels = [...(node.labels ?? [])].map((one) => one.textContent).join("");
    const ids = (node.getAttribute("aria-labelledby") ?? "").split(" ");
    const by = ids.map((id) => document.getElementById(id)?.textContent ?? "").join("");
    return !(labels || by || node.getAttribute("aria-label") || node.textContent).trim();
}).map((node) => node.outerHTML)"""
SAME_IDS = """() => {
    const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    return ids.length - new Set(ids).size;
}"""
CONTROLS = "button:not(:disabled), select, textarea, summary, canvas.map, input:not([type=radio])"
NUM_CONTROLS = """(controls) => [...document.querySelectorAll(controls)].filter(
    (node) => node.checkVisibility() && node.tabIndex >= 0).length"""
FOCUSED = """(controls) => {
    const node = document.activeElement;
    if (node === document.body) return null;
    globalThis.numbers ??= new Map();
    if (!numbers.has(node)) numbers.set(node, numbers.size);
    return [numbers.get(node), node.matches(controls)];
}"""
STORED = "() => document.cookie + JSON.stringify([localStorage, sessionStorage]) + document.body.innerHTML"
CONTRAST = """() => {
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    const light = (colour) => {
        const [red, green, blue] = colour.match(/[\\d.]+/g).map((value) => part(Number(value)));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const text = light(getComputedStyle(document.querySelector(".summary")).color);
    const card = light(getComputedStyle(document.querySelector(".card")).backgroundColor);
    return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05);
}"""

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server with a real engine."""
    log = tmp_path_factory.mktemp("served") / "log"
    with ServerProcess([*WITH_EVERYTHING, "--no-access-log"], log, OMP_NUM_THREADS="1") as server:
        yield server.url


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens pages; at the end none may have logged an error or broken its Content-Security-Policy."""
    contexts, said = [], []

    def open_one(url: str, may_fail: str | None = None, **options: Any) -> Any:
        context = browser.new_context(
            **({"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | options)
        )
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


def seen(page: Any, model: str = "demo") -> list[int]:
    """The cells that the page has of a model."""
    return list(page.evaluate("(name) => [...pagetide.shown.get(name).model.cells]", model))


DRAWN = """([name, number, value]) => {
    const one = globalThis.pagetide?.shown.get(name);
    return one?.model[number] === value && one.panel.map.layout && !one.panel.map.pending && !one.panel.map.flashes.size;
}"""


def wait_for_step(page: Any, simulation: Simulation) -> None:
    """Until the page has the newest step, and has drawn it."""
    page.wait_for_function(DRAWN, arg=[simulation.name, "step", simulation.step_number])


def check_colours(page: Any, cells: list[int]) -> None:
    """Some 400 cells have the colour of their state; of those with a pattern only that they are neither empty nor another's."""
    expected = colours(page)
    chosen = [block for block in range(0, len(cells), max(1, len(cells) // 400)) if cells[block] not in (0, 5)]
    plain = list(expected.values())
    for block, pixel in zip(chosen, pixels(page, chosen), strict=True):
        cell = cells[block]
        if cell in (2, 4):
            assert pixel[3] == 255 and pixel[:3] not in plain, (block, cell)
        else:
            state = str((cell & 0x7FFF) - 16) if cell >= 16 else {1: "free", 3: "cached"}[cell]
            assert pixel == [*expected[state], 255], (block, cell)


def pixels(page: Any, blocks: list[int], model: str = "demo") -> list[list[int]]:
    """The colour in a quarter of each block's cell, where no state has a mark, as red, green, blue, alpha."""
    script = """([name, blocks]) => {
        const { panel } = pagetide.shown.get(name);
        const { map, canvas } = panel;
        const context = canvas.getContext("2d");
        return blocks.map((block) => {
            const [x, y, size] = map.cellRect(block).map((value) => value * map.ratio);
            return [...context.getImageData(Math.floor(x + size * 0.3), Math.floor(y + size * 0.3), 1, 1).data];
        });
    }"""
    return list(page.evaluate(script, [model, blocks]))


def colours(page: Any, model: str = "demo") -> dict[str, list[int]]:
    """The colours of the theme: of the states, and of each row's request."""
    script = """(name) => {
        const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
        const { model } = pagetide.shown.get(name);
        const theme = pagetide.theme();
        const found = Object.fromEntries(["free", "cached", "null"].map((state) => [state, rgb(theme[state])]));
        for (const row of model.rows.keys()) found[row] = rgb(theme.hues[pagetide.hueOf(model, row)]);
        return found;
    }"""
    return dict(page.evaluate(script, model))


# ---- what is drawn


@pytest.mark.parametrize(("num_blocks", "per_extent", "seed"), [(512, 8, 1), (4096, 64, 2), (10_000, 16, 3)])
def test_the_page_has_the_cells_of_the_pool_at_every_step(
    open_page: Open, num_blocks: int, per_extent: int, seed: int
) -> None:
    pool = Simulation(
        "demo", num_blocks, per_extent, seed=seed, lengths=(num_blocks * 3 // 4, num_blocks // 2), rows=12
    )
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        wait_for_step(page, pool)
        for number in range(10):
            rig.step(10, act=(lambda: pool.recall(0.6)) if number == 6 else None)
            wait_for_step(page, pool)
            assert seen(page) == pool.cells().tolist()
            check_colours(page, pool.cells().tolist())
        assert pool.stats["preemptions"] > 0 and np.any(pool.cells() >= 0x8000) and np.any(pool.cells() == 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_page_draws_what_the_books_of_a_scheduler_say(open_page: Open, seed: int) -> None:
    """At step borders of a random life: the data feed's cells equal an oracle's, and the canvas has their colours."""
    model, checked = Pushed("demo"), 0
    sources: list[FrameSource] = []
    with PageRig([model]) as rig:
        page = open_page(rig.url)

        def look(world: World) -> None:
            nonlocal checked
            if checked == MOST_LOOKS:
                return
            if not sources:
                facts = PoolFacts("demo", 4096, 64)
                sources.append(FrameSource(lambda: world.scheduler, facts, lambda: MemoryFigures({"kv": 7}, 3, 5)))
            frame = json.loads(encode(sources[0].take()))
            rig.push(model, frame)
            page.wait_for_function(DRAWN, arg=["demo", "seq", frame["seq"]])
            expected = naive_cells(world.scheduler)
            assert seen(page) == expected
            check_colours(page, expected)
            checked += 1

        walk(seed, VARIANTS[seed * 5 % len(VARIANTS)], 40, check_every=3, look=look)
        assert checked > 10


def test_a_million_blocks_are_drawn_and_can_be_zoomed_into(open_page: Open) -> None:
    pool = Simulation("demo", 1_000_000, 64, seed=4, lengths=(40_000, 40_000), load=40)
    pool.step()
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(3)
        wait_for_step(page, pool)
        cells = pool.cells()
        assert page.evaluate(SAME_CELLS, [[at, int(cells[at])] for at in range(0, 1_000_000, 997)])
        assert page.evaluate("pagetide.shown.get('demo').panel.map.fitted.scale") < 4
        page.get_by_role("button", name="Zoom in").focus()
        for _ in range(12):
            page.keyboard.press("Enter")
        wait_for_step(page, pool)
        assert page.evaluate("pagetide.shown.get('demo').panel.map.isDetailed")
        page.get_by_role("button", name="Fit").click()
        assert not page.evaluate("pagetide.shown.get('demo').panel.map.isZoomed")


VIEW = "JSON.stringify(pagetide.shown.get('demo').panel.map.view)"


def test_what_is_zoomed_into_stays_in_view(open_page: Open) -> None:
    pool = Simulation("demo", 4096, 64)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(5)
        wait_for_step(page, pool)
        page.evaluate("pagetide.shown.get('demo').panel.map.zoom(3, 300, 100)")
        view = page.evaluate(VIEW)
        rig.tell()  # as the server does every few seconds
        rig.tell(demo="asleep")
        page.get_by_text("asleep: the picture is of").wait_for()
        rig.tell(demo="ready")
        rig.step()
        wait_for_step(page, pool)
        assert page.evaluate(VIEW) == view
        middle = """() => { const { map, canvas } = pagetide.shown.get("demo").panel;
            return [map.isZoomed, map.blockAt(canvas.clientWidth / 2, canvas.clientHeight / 2), map.view.scale]; }"""
        page.evaluate("() => { const { map } = pagetide.shown.get('demo').panel; map.moveCursor(2080); map.zoom(2); }")
        is_zoomed, block, scale = page.evaluate(middle)
        assert is_zoomed and block >= 0
        width = page.evaluate("document.querySelector('canvas.map').width")
        page.set_viewport_size({"width": 1190, "height": 760})
        page.wait_for_function("(width) => document.querySelector('canvas.map').width !== width", arg=width)
        is_zoomed, after, scale_after = page.evaluate(middle)
        assert is_zoomed and scale_after == scale and block // 64 == after // 64


# The place of a block's cell once it has been the same for 10 frames: the map's size follows what stands beside it.
SETTLED_CELL = """async (block) => {
    const place = () => pagetide.shown.get('demo').panel.map.cellRect(block);
    for (let last = place(), same = 0; same < 10; same++) {
        await new Promise(requestAnimationFrame);
        const now = place();
        if (now.join() !== last.join()) same = 0;
        last = now;
    }
    return place();
}"""


def test_hovering_and_clicking_a_block_says_what_it_is(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(200, 200), load=8)
    with PageRig([pool], key="sk-1") as rig:
        page = open_page(rig.url, may_fail="401")
        sign_in(page, "sk-1")
        rig.step(20)
        wait_for_step(page, pool)
        job = pool.running[0]
        left, top, edge = page.evaluate(SETTLED_CELL, job.table[2])[:3]
        page.locator("canvas.map").hover(position={"x": left + edge / 2, "y": top + edge / 2})
        assert (
            page.locator("#tooltip").text_content().startswith(f"block {job.table[2]} · live · {job.label or job.id}")
        )
        page.locator("canvas.map").click(position={"x": left + edge / 2, "y": top + edge / 2})
        details = page.get_by_role("dialog")
        details.get_by_text("its block 2").first.wait_for()
        assert "the sea was calm" in details.locator(".block-text").text_content()
        page.keyboard.press("Escape")
        assert details.is_hidden() and page.evaluate("document.activeElement.className").startswith("map")


def test_the_cells_of_a_request_stand_out_while_it_is_hovered_over(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(200, 200), load=8)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(20)
        wait_for_step(page, pool)
        first, other = pool.running[0], pool.running[1]
        alone = [next(block for block in job.table if pool.held()[block] == 1) for job in (first, other)]
        before = pixels(page, alone)
        page.locator(f"#running li:has-text('{first.label or first.id}')").hover()
        wait_for_step(page, pool)
        after = pixels(page, alone)
        assert after[0] == before[0] and after[1][3] < 128


def test_a_flash_is_a_few_pictures(open_page: Open) -> None:
    """And not one for each picture of the screen, which kept a browser busy."""
    pool = Simulation("demo", 512, 8, lengths=(200, 200), load=8)
    with PageRig([pool]) as rig:
        page = open_page(rig.url, reduced_motion="no-preference")
        rig.step(20)
        wait_for_step(page, pool)
        page.evaluate("""() => { globalThis.drawn = globalThis.flashed = 0;
            const { map } = pagetide.shown.get("demo").panel;
            const draw = globalThis.requestAnimationFrame;
            globalThis.requestAnimationFrame = (then) => draw((now) => {
                drawn += 1;
                flashed = Math.max(flashed, map.flashes.size);
                then(now);
            }); }""")
        rig.step(10)
        page.wait_for_function("(step) => pagetide.shown.get('demo').model.step === step", arg=pool.step_number)
        page.wait_for_function("() => !pagetide.shown.get('demo').panel.map.flashes.size", polling=50)
        assert page.evaluate("flashed") > 0 and page.evaluate("drawn") <= 8  # 520 ms, nine a second


# ---- the lists


def test_the_lists_say_what_runs_what_waits_and_why(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=24, seed=3)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(60)
        wait_for_step(page, pool)
        page.wait_for_function(
            "(n) => document.getElementById('num-waiting').textContent === String(n)", arg=len(pool.waiting)
        )
        assert page.locator("#num-running").text_content() == str(len(pool.running))
        names = [job.label or job.id for job in pool.waiting]
        assert page.locator("#waiting .name").all_text_contents() == names
        decision = next(d for d in reversed(pool.decisions) if d.get("request_id") == pool.waiting[0].id)
        assert decision["what"] == "wait"
        why = page.locator("#waiting .why").first.text_content()
        needs = f"needs {decision['needed']} blocks; {decision['room']} are free"
        peak = f", but with it the running requests are expected to need {round(decision['usable'] * 1.08)} of "
        assert why.removeprefix("when it came: ").startswith(needs + peak if decision["expected"] else needs)
        page.get_by_role("searchbox").fill(pool.waiting[0].id)
        page.keyboard.press("Enter")
        page.get_by_role("dialog").get_by_text(needs).first.wait_for()


def test_decisions_are_told_in_plain_words(open_page: Open) -> None:
    with PageRig([Simulation("demo", 512, 8)]) as rig:
        page = open_page(rig.url)
        script = """async ([decision, step]) => {
            const { inWordsNow, nameIn } = await import("./decisions.js");
            return [inWordsNow(decision, step), nameIn(decision)];
        }"""
        waits = {"what": "wait", "step": 100, "request_id": "r10.1", "label": "x", "needed": 2, "room": 129, "usable": 149,
                 "expected": 159, "margin": 4.0, "in_steps": 512}  # fmt: skip
        words, name = page.evaluate(script, [waits, 150])
        assert words == (
            "needs 2 blocks; 129 are free, but with it the running requests are expected to need 159 of 149 blocks in about "
            "512 steps: it waits so that none has to give up its blocks"
        )
        assert name == "x · r10.1"
        assert page.evaluate(script, [waits, 151])[0] == f"when it came: {words}"
        short = waits | {"room": 1, "expected": None, "margin": None, "in_steps": None, "request_id": "r10"}
        assert page.evaluate(script, [short, 100]) == ["needs 2 blocks; 1 is free", "x"]


def test_events_begin_with_the_decisions_that_are_kept(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=24, seed=3)
    for _ in range(60):
        pool.step()
    kept = [one for one in pool.decisions[-64:] if one["what"] != "wait"]
    assert kept
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        page.wait_for_function("(n) => document.querySelectorAll('#events li').length === n", arg=len(kept))
        assert set(page.locator("#events time").all_text_contents()) == {"before"}
        steps = page.locator("#events time").evaluate_all("(all) => all.map((one) => one.title)")
        assert steps == [f"step {one['step']}" for one in reversed(kept)]
        assert page.locator("#no-events").is_hidden()


def test_hits_are_told_by_request(open_page: Open) -> None:
    pool = Simulation("demo", 4096, 8, lengths=(400, 100), load=8, seed=3)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        wait_for_step(page, pool)
        expected: dict[str, str] = {}
        for _ in range(40):
            rig.step()
            wait_for_step(page, pool)
            for job in pool.running:
                if job.cached:
                    expected.setdefault(job.id, f"{job.label or job.id} found {job.cached} prompt tokens")
        hits = page.locator("#events li.hit .words").all_text_contents()
        assert len(hits) > 1 and [text.split(" in the cache")[0] for text in reversed(hits)] == list(expected.values())
        script = """async () => {
            const { eventsOfChange } = await import("./events.js");
            const row = { id: "r1", label: "", prompt: 90, limit: 99 };
            const rows = [[64, 0], [64, 1], [0, 0]].map(([cached, preemptions]) => ({ ...row, cached, preemptions }));
            const model = { stats: { cached_prompt_tokens: 100 }, counts: {} };
            const change = { full: false, admitted: rows, ended: [], decisions: [], before: { stats: {}, counts: {} } };
            const hits = (one) => eventsOfChange(model, one).filter(({ kind }) => kind === "hit");
            return [change, { ...change, full: true }].map((one) => hits(one).map(({ id, text }) => [id ?? null, text]));
        }"""
        rest = "of other requests found in the cache, not computed again"
        assert page.evaluate(script) == [
            [[None, f"36 prompt tokens {rest}"], ["r1", "found 64 prompt tokens in the cache, not computed again"]],
            [[None, f"100 prompt tokens {rest}"]],
        ]


def test_the_scale_of_a_lease_is_that_of_what_is_used(open_page: Open) -> None:
    """The most that a process may have is for all that it does: the pool can be small beside it."""
    pool = Simulation("demo", 512, 8, mapped=0.1, lengths=(100, 100), load=2)
    real = pool.memory
    lease = {"granted": 20 << 20, "held": 19 << 20, "min": 13 << 20, "max": 40 << 30, "recall_target": None}
    pool.memory = lambda: real() | {"weights": 8 << 20, "base": 4 << 20, "prepared": 0, "lease": lease}
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(5)
        wait_for_step(page, pool)
        drawn = "pagetide.shown.get('demo').panel.chart.drawn"
        page.wait_for_function(f"() => {drawn}")
        assert page.evaluate(drawn) == {"top": 10 << 20, "above": ["at most 64 MiB"]}  # of 8 MiB for the cache


def test_a_search_asks_all_models(open_page: Open) -> None:
    """Also of requests that the page has not seen."""
    pools = [Simulation("one", 512, 8, seed=1), Simulation("two", 512, 8, seed=2)]
    with PageRig(pools) as rig:
        page = open_page(rig.url)
        rig.step(5)
        wait_for_step(page, pools[1])
        with rig.changed:
            old = {
                "n": 1000,
                "step": 1,
                "what": "cut",
                "request_id": "long-ago",
                "label": "",
                "needed": 90,
                "limit": 80,
            }
            pools[1].decisions.append(old | {"changed": -1})
        search = page.get_by_role("searchbox")
        search.fill("never-was")
        page.keyboard.press("Enter")
        page.get_by_text("no request of that name is known").wait_for()
        assert page.get_by_role("dialog").is_hidden()
        search.fill("long-ago")
        page.keyboard.press("Enter")
        details = page.get_by_role("dialog")
        details.get_by_text("it needs 90 blocks, and the pool may have 80").wait_for()
        assert "two" in details.locator(".facts-list").text_content()


def test_two_models_have_a_panel_each(open_page: Open) -> None:
    pools = [Simulation("one", 512, 8, seed=1), Simulation("two", 1024, 16, seed=2)]
    with PageRig(pools) as rig:
        page = open_page(rig.url)
        rig.step(30)
        for pool in pools:
            wait_for_step(page, pool)
            assert seen(page, pool.name) == pool.cells().tolist()
        assert page.locator(".panel h2").all_text_contents() == ["one", "two"]
        assert page.locator("#prompt-model option").all_text_contents() == ["one", "two"]
        page.get_by_text("two, KV").wait_for()


# ---- the prompt box


def test_the_prompt_box_sends_what_is_chosen_and_shows_each_token(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step()
        wait_for_step(page, pool)
        page.get_by_role("textbox", name="Prompt").fill("The sea")
        page.get_by_text("Sampling").first.click()
        chosen = {
            "Temperature": "0.7", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05", "Seed": "7", "Min tokens": "2",
            "Max tokens": "32", "Continuations (n)": "2", "Stop, one a line": "###\nEND",
        }  # fmt: skip
        for label, value in chosen.items():
            page.get_by_label(label).fill(value)
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator("#prompt-status", has_text="4 tokens in").wait_for()
        path, body, request_id = rig.bodies[0]
        assert path == "/v1/completions" and request_id.startswith("page-")
        assert body == {
            "model": "demo", "stream": True, "stream_options": {"include_usage": True}, "prompt": "The sea", "logprobs": 4,
            "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "min_tokens": 2, "max_tokens": 32, "n": 2,
            "stop": ["###", "END"],
        }  # fmt: skip
        assert page.locator("#output .token").all_text_contents() == ["Call", " me", " Ishmael", "."]
        page.locator("#output .token").nth(1).hover()
        assert "78 %" in page.locator("#tooltip").text_content() and "␣other" in page.locator("#tooltip").text_content()
        page.get_by_role("radio", name="Beams").check()
        page.get_by_role("radio", name="Chat").check()
        page.get_by_role("button", name="Run", exact=True).click()
        page.wait_for_function("() => document.getElementById('run').disabled === false")
        path, body, _ = rig.bodies[1]
        assert path == "/v1/chat/completions" and body["use_beam_search"] is True and body["n"] == 2
        assert "temperature" not in body and body["messages"] == [{"role": "user", "content": "The sea"}]


def test_the_request_of_the_prompt_box_is_followed(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(100, 400), load=1)
    with PageRig([pool], answer=["a"] * 4, hold=True) as rig:
        page = open_page(rig.url)
        rig.step()
        page.get_by_role("button", name="Run", exact=True).click()
        page.wait_for_function("() => pagetide.followedId !== null")
        label = rig.wait_for_request()[2]
        pool.name_of = lambda n: (f"mine-{n}", label)
        pool.load = 2
        rig.step(12)
        wait_for_step(page, pool)
        rows = page.evaluate("[...pagetide.shown.get('demo').panel.map.followed]")
        assert rows == [job.row for job in pool.running if job.label == label] != []
        page.get_by_role("button", name="Abort").click()
        page.get_by_text("Aborted.").first.wait_for()
        assert page.evaluate("pagetide.shown.get('demo').panel.map.followed.size") == 0


def test_the_prompt_box_says_where_its_request_is(open_page: Open) -> None:
    """Beams are all there at the end only: until then the status tells."""
    pool = Simulation("demo", 512, 8, lengths=(100, 400), load=1, rows=1)
    with PageRig([pool], answer=[""] * 2, hold=True) as rig:
        page = open_page(rig.url)
        rig.step(10)
        page.get_by_text("Sampling").first.click()
        page.get_by_role("radio", name="Beams").check()
        page.get_by_text("Beams come whole at the end").wait_for()
        assert page.get_by_label("Beams (n)").get_attribute("placeholder") == "4"
        page.get_by_role("button", name="Run", exact=True).click()
        path, body, label = rig.wait_for_request()
        assert (path, body["use_beam_search"], body["n"]) == ("/v1/completions", True, 4) and "logprobs" not in body
        status = page.locator("#prompt-status")
        page.get_by_text("Sent …").wait_for()
        pool.name_of, pool.load = lambda n: (f"mine-{n}", label), 2

        def step_until(reached: Callable[[], bool]) -> None:
            while not reached():
                rig.step()

        step_until(lambda: bool(pool.waiting))
        status.get_by_text("Waits: its blocks are there; it waits for one of the 1 that run to end").wait_for()
        step_until(lambda: pool.running != [] and pool.running[0].label == label)
        job = pool.running[0]
        assert job.computed < job.prompt
        status.get_by_text(f"Computing the prompt: {job.computed} of {job.prompt} tokens").wait_for()
        step_until(lambda: job.computed >= job.prompt)
        status.get_by_text("Searching: ").wait_for()


@pytest.mark.parametrize(
    ("seed", "sent"),
    [("9007199254740993", 2**53 + 1), ("18446744073709551615", 2**64 - 1), ("-9223372036854775808", -(2**63)), ("007", 7),
     ("18446744073709551616", None), ("-9223372036854775809", None), ("1e3", None), ("7.0", None)],
)  # fmt: skip
def test_a_seed_keeps_its_digits(open_page: Open, seed: str, sent: int | None) -> None:
    with PageRig([Simulation("demo", 512, 8)]) as rig:
        page = open_page(rig.url)
        rig.step()
        page.get_by_text("Sampling").first.click()
        page.get_by_label("Seed").fill(seed)
        page.get_by_role("button", name="Run", exact=True).click()
        if sent is None:
            page.locator(
                "#prompt-status.failed", has_text=f"the seed is {seed}; it has to be a whole number"
            ).wait_for()
            assert rig.bodies == []
        else:
            assert rig.wait_for_request()[1]["seed"] == sent
            page.locator("#prompt-status", has_text="4 tokens in").wait_for()


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_divided_without_a_loss(open_page: Open, seed: int) -> None:
    """Whatever the pieces are, the spans together are the text, and each token has one place."""
    chance = np.random.default_rng(seed)
    alphabet = ["a", " b", "é", "�", "", "\n", "<b>", "日"]
    cases = [
        [tokens := [alphabet[i] for i in chance.integers(0, len(alphabet), chance.integers(0, 6))],
         "".join(tokens) if chance.random() < 0.5 else "".join(tokens).replace("�", "ü")[: chance.integers(0, 8)]]
        for _ in range(200)
    ]  # fmt: skip
    pool = Simulation("demo", 512, 8)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        script = """async (cases) => {
            const { divided } = await import("./prompt.js");
            return cases.map(([tokens, text]) => divided(text, tokens.map((token) => ({ token }))).map(
                ([part, own]) => [part, own.map((one) => one.token)]));
        }"""
        for (tokens, text), parts in zip(cases, page.evaluate(script, cases), strict=True):
            assert "".join(part for part, _ in parts) == text
            placed = [token for _, own in parts for token in own]
            assert placed == tokens[: len(placed)]


# ---- with a real engine


def test_the_page_agrees_with_a_real_engine_after_random_load(open_page: Open, served: str) -> None:
    chance = np.random.default_rng(5)
    prompts = [" ".join(["The sea was calm."] * int(n)) for n in chance.integers(1, 40, 8)]

    def ask(prompt: str) -> None:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        assert httpx2.post(f"{served}/v1/completions", json=body, timeout=60.0).status_code == 200

    page = open_page(f"{served}/page/")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, prompts))
    page.wait_for_function("() => pagetide.shown.get('demo')?.model.rows.size === 0")
    with httpx2.stream("GET", f"{served}/page/events", timeout=60.0) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith('data: {"model"'))
        frame = json.loads(next(lines))["frame"]
    assert frame["full"] and frame["stats"]["generated_tokens"] == 8 * 24
    state = FrameState()
    state.apply(json.dumps(frame).encode())
    assert seen(page) == state.cells.tolist()
    check_colours(page, seen(page))
    free, draining, live, cached, inflight, mapped, _ = frame["blocks"]
    assert [seen(page).count(cell) for cell in (1, 2, 3, 4)] == [free, draining, cached, inflight]
    assert live == 0 and sum(cell > 0 for cell in seen(page)) == mapped + 1 and cached > 0
    named = {1: "free", 2: "draining", 3: "cached", 0: "unmapped"}
    for block in range(1, len(state.cells), 7):
        found = httpx2.get(f"{served}/page/block", params={"model": "demo", "block": block}).json()
        assert found["state"] == named[int(state.cells[block])], (block, found)


def test_the_prompt_box_streams_and_its_blocks_light_up(open_page: Open, served: str) -> None:
    page = open_page(f"{served}/page/")
    page.wait_for_function("() => pagetide.shown.get('demo')?.model.pool")
    page.evaluate("""() => { globalThis.ringed = new Set();
        const { map } = pagetide.shown.get("demo").panel;
        const follow = map.follow.bind(map);
        map.follow = (rows) => { for (const row of rows) globalThis.ringed.add(row); follow(rows); };
        globalThis.lengths = new Set();
        new MutationObserver(() => globalThis.lengths.add(document.getElementById("output").textContent.length))
            .observe(document.getElementById("output"), { childList: true, subtree: true }); }""")
    page.get_by_text("Sampling").first.click()
    page.get_by_role("radio", name="Greedy").check()
    page.get_by_label("Max tokens").fill("40")
    page.get_by_role("textbox", name="Prompt").fill("The whale")
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator("#prompt-status", has_text="40 tokens in").wait_for()
    body = {"model": "demo", "prompt": "The whale", "max_tokens": 40, "temperature": 0, "logprobs": 4}
    whole = httpx2.post(f"{served}/v1/completions", json=body, timeout=60.0).json()["choices"][0]
    assert page.locator("#output").text_content() == whole["text"]
    assert page.evaluate("globalThis.ringed.size") == 1  # the row that it had
    assert page.evaluate("globalThis.lengths.size") > 5  # the text came in pieces
    first = page.locator("#output .token").first
    first.hover()
    most = max(whole["logprobs"]["top_logprobs"][0].values())
    page.locator("#tooltip .chosen", has_text=f"{most:.2f}").wait_for()
    assert page.locator("#tooltip tr").count() == 4
    page.locator("#output").focus()
    page.keyboard.press("ArrowRight")
    assert first.evaluate("(node) => node === document.activeElement")


# ---- what a stranger sends


def test_markup_stays_text(open_page: Open) -> None:
    pool = Simulation(
        "demo", 512, 8, lengths=(400, 400), load=24, seed=3, name_of=lambda n: (f"{MARKUP}{n}", f"{n}{MARKUP}")
    )
    other = Simulation(MARKUP, 512, 8)
    with PageRig([pool, other], answer=[MARKUP, "<b>", "</p>"]) as rig:
        page = open_page(rig.url)
        rig.step(60)
        wait_for_step(page, pool)
        page.get_by_role("textbox", name="Prompt").fill(MARKUP)
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator("#prompt-status", has_text="3 tokens in").wait_for()
        assert page.locator("#output").text_content() == f"{MARKUP}<b></p>"
        page.locator("#output .token").first.hover()
        page.locator("#waiting button").first.click()
        page.get_by_role("dialog").get_by_text(MARKUP).first.wait_for()
        page.get_by_role("searchbox").fill(MARKUP)
        page.keyboard.press("Enter")
        assert page.evaluate("globalThis.hacked") is None
        images = page.locator("img").evaluate_all("(all) => all.map((one) => one.getAttribute('src'))")
        assert images == ["icon.svg"] and page.locator("script").count() == 1 and page.locator("#output b").count() == 0


# ---- when things go wrong


def page_without_server(open_page: Open) -> tuple[Any, int]:
    """A page that has frames of a server which has ended since, and the server's port."""
    pool = Simulation("demo", 512, 8, seed=1)
    with PageRig([pool]) as rig:
        page = open_page(rig.url, may_fail="Failed to load resource")
        rig.step(20)
        wait_for_step(page, pool)
        port = rig.port
    page.locator("#banner").wait_for(state="visible")
    return page, port


def test_the_page_comes_back_after_a_restart_of_the_server(open_page: Open) -> None:
    page, port = page_without_server(open_page)
    assert "does not answer" in page.locator("#banner-text").text_content()
    second = Simulation("demo", 1024, 16, seed=2)  # another pool: nothing of the old one may stay
    with PageRig([second], port=port) as rig:
        rig.step(10)
        page.get_by_role("button", name="Try now").click()
        wait_for_step(page, second)
        rig.step()
        wait_for_step(page, second)
        assert seen(page) == second.cells().tolist()
        assert page.locator("#banner").is_hidden()


def test_the_page_says_that_a_model_loads_or_sleeps(open_page: Open) -> None:
    """The server answers, and the picture is an old one: neither is said as the other."""
    page, port = page_without_server(open_page)
    at = page.evaluate("new Date(pagetide.shown.get('demo').model.time * 1000).toTimeString().slice(0, 8)")
    second = Simulation("demo", 512, 8, seed=2)
    with PageRig([second], port=port) as rig:
        rig.tell(demo="loading")
        page.get_by_text(f"loading: the picture is of {at}").wait_for()
        assert page.locator("#banner").is_hidden() and page.locator("#status-text").text_content() == "live"
        rig.tell(demo="ready")
        rig.step(3)
        wait_for_step(page, second)
        page.locator(".age").wait_for(state="hidden")
        rig.tell(demo="asleep")
        page.get_by_text("asleep: the picture is of").wait_for()


@pytest.mark.parametrize(("status", "message"), [(429, "too many pages look on"), (503, "the server is ending")])
def test_the_page_says_why_the_server_refuses(open_page: Open, status: int, message: str) -> None:
    pool = Simulation("demo", 512, 8)
    with PageRig([pool]) as rig:
        rig.refusal = (status, message)
        page = open_page(rig.url, may_fail="Failed to load resource")
        page.get_by_text(f"The server refuses: {message}. Trying again").wait_for()
        rig.refusal = None
        rig.step()
        page.get_by_role("button", name="Try now").click()
        wait_for_step(page, pool)
        assert page.locator("#banner").is_hidden()


def sign_in(page: Any, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_signing_in(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8)
    with PageRig([pool], key="sk-1") as rig:
        page = open_page(rig.url, may_fail="401")
        page.locator("#status-text", has_text="signed out").wait_for()
        assert page.evaluate("document.activeElement.id") in ("api-key", "")
        assert page.locator(".totals").is_hidden() and page.locator("#search-form").is_hidden()
        sign_in(page, "wrong")
        page.get_by_text("This key is not known here.").wait_for()
        sign_in(page, "sk-1")
        rig.step()
        wait_for_step(page, pool)
        assert page.locator("#sign-in-place").is_hidden()
        assert page.evaluate("document.activeElement.id") == "content"
        assert page.locator(".totals").is_visible() and page.locator("#search-form").is_visible()
        assert "sk-1" not in page.evaluate(STORED)
        page.reload()
        wait_for_step(page, pool)


# ---- people and devices


def test_all_controls_have_names_and_can_be_reached_by_keyboard(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=14)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(40)
        wait_for_step(page, pool)
        page.wait_for_function("() => document.querySelectorAll('#running button').length > 0")
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(SAME_IDS) == 0
        page.evaluate("document.activeElement.blur?.()")
        expected, reached = page.evaluate(NUM_CONTROLS, CONTROLS), set()
        for _ in range(expected + 40):
            page.keyboard.press("Tab")
            focused = page.evaluate(FOCUSED, CONTROLS)
            if focused is None:
                break
            if focused[1]:
                reached.add(focused[0])
        assert len(reached) == expected > 20


def test_the_map_has_a_cursor(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8)
    with PageRig([pool]) as rig:
        page = open_page(rig.url)
        rig.step(5)
        wait_for_step(page, pool)
        page.locator("canvas.map").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert page.locator("#announcer").text_content().startswith("block 2 · ")
        page.keyboard.press("Enter")
        assert page.get_by_role("dialog").get_by_role("heading", name="Block 2", exact=True).is_visible()
        page.keyboard.press("Escape")
        assert page.get_by_role("dialog").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_in_one_direction_only(open_page: Open, scheme: str) -> None:
    pools = [Simulation("demo", 1024, 32, load=20), Simulation("a-model-with-a-long-name", 10_000, 64)]
    size = {"width": 360, "height": 740}
    with PageRig(pools) as rig:
        page = open_page(
            rig.url, viewport=size, device_scale_factor=3, has_touch=True, is_mobile=True, color_scheme=scheme
        )
        rig.step(40)
        wait_for_step(page, pools[1])
        page.get_by_text("What am I seeing?").click()
        page.get_by_text("Sampling").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate(CONTRAST) > 4.5


# ---- a fleet

SHOWN_FLEET = """() => ({
    fronts: [...document.querySelectorAll(".fronts li")].map((one) => [...one.children].map((part) => part.textContent)),
    queue: Object.fromEntries([...document.querySelectorAll(".queue-facts div")].map((one) =>
        [one.firstChild.textContent, one.lastChild.textContent])),
    workers: [...document.querySelectorAll(".worker")].map((one) => ({
        name: one.querySelector(".name").textContent, state: one.querySelector(".pill").textContent,
        facts: one.querySelector(".facts").textContent, blocks: one.querySelector(".blocks-bar").getAttribute("aria-label"),
        why: one.querySelector(".why").textContent,
        shares: [...one.querySelectorAll(".blocks-bar i")].map(
            (part) => Math.round(100 * part.getBoundingClientRect().width / part.parentNode.getBoundingClientRect().width)),
    })),
})"""
READY = {
    "state": "ready", "facts": "4 of 8 sequences · 3 requests · epoch 1 · cpu",
    "blocks": "90 blocks in use · 50 cached · 60 free · 50 to come", "why": "", "shares": [36, 20, 24, 20],
}  # fmt: skip


class FleetPageRig(PageRig):
    """The server of a made-up fleet, whose newest status is sent by `tell_fleet`."""

    def __init__(self, fleet: MadeUpFleet, **options: Any) -> None:
        super().__init__([fleet], **options)
        self.fleet = fleet
        self.now = 1_795_465_254.0

    def tell_fleet(self, page: Any, is_away: bool = False) -> None:
        """Send the status as the server makes it, and wait until the page shows it."""
        self.now += 0.5
        self.push(self.fleet, None if is_away else fleet_picture(self.fleet.status, self.now))
        seen = (
            "([now, away]) => { const one = globalThis.pagetide?.shown.get('demo')?.model; return !pagetide.dirty && "
        )
        page.wait_for_function(
            f"{seen} (away ? one?.isAway : one?.now?.time === now && !one.isAway); }}", arg=[self.now, is_away]
        )


def test_a_fleet_has_a_row_for_each_worker(open_page: Open) -> None:
    fleet = MadeUpFleet("demo", workers=2)
    with FleetPageRig(fleet) as rig:
        page = open_page(rig.url)
        rig.tell_fleet(page)
        ready = [
            READY | {"name": "worker-0"},
            READY | {"name": "worker-1", "facts": READY["facts"].replace("h 1", "h 2")},
        ]
        assert page.evaluate(SHOWN_FLEET) == {
            "fronts": [["host-0-0a1b2c3d", "0 requests"], ["host-1-0a1b2c3d", "0 requests"]],
            "queue": {"waiting": "0", "running": "0", "ended": "0", "failed": "0", "cancelled": "0", "refused": "0",
                      "requeued": "0", "journal": "written"},
            "workers": ready,
        }  # fmt: skip
        assert page.locator(".event").count() == 0
        hidden = [page.locator(one).is_hidden() for one in ("#search-form", "#running", "#total-recalls", "canvas.map")]
        assert all(hidden) and page.get_by_role("region", name="Workers").is_visible()

        fleet.status["queue"].update(
            waiting=1234, running=21, ended=7, requeued=3, recorded_tokens=600, hit_blocks=1, prompt_blocks=4
        )
        fleet.status["front_ends"] = {"host-1-0a1b2c3d": 1, "host-2-0a1b2c3d": 1254}
        fleet.status["errors"] = {"worker-0": "has died", "worker-10": "has died"}
        fleet.set_worker("worker-0", state="starting")
        fleet.set_worker("worker-1", silent_s=3.9, blocks={"usable": 100, "limit": 100, "free": 0, "live": 100})
        fleet.set_worker("worker-10", state="draining", node="other")
        fleet.set_worker("worker-2", state="starting")
        fleet.status["journal"]["fault"] = "the disk is full"
        rig.tell_fleet(page)
        shown = page.evaluate(SHOWN_FLEET)
        assert shown["fronts"] == [["host-1-0a1b2c3d", "1 request"], ["host-2-0a1b2c3d", "1,254 requests"]]
        assert [shown["queue"][name] for name in ("waiting", "running", "ended", "requeued", "journal")] == [
            "1,234", "21", "7", "3", "fault",
        ]  # fmt: skip
        assert page.locator(".queue p.failed").text_content() == "the disk is full"
        nothing = {"facts": "", "blocks": "no blocks", "shares": [0, 0, 0, 100], "state": "starting"}
        facts = READY["facts"].removesuffix("1 · cpu")
        assert shown["workers"] == [
            nothing | {"name": "worker-0", "why": "has died; it is started again"},
            {"name": "worker-1", "state": "silent for 3 s", "facts": f"{facts}2 · cpu · host", "shares": [100, 0, 0, 0],
             "blocks": "100 blocks in use · 0 cached · 0 free", "why": "its requests go to others if it stays silent"},
            nothing | {"name": "worker-2", "why": "loads the model"},
            READY | {"name": "worker-10", "state": "draining", "facts": f"{facts}11 · cpu · other",
                     "why": "hands its requests over, and then ends"},
        ]  # fmt: skip
        totals = [page.locator(f"#total-{name}").text_content() for name in ("speed", "running", "waiting", "hits")]
        assert totals == ["1,200", "21", "1,234", "25 %"]


def test_what_happens_in_a_fleet_is_told(open_page: Open) -> None:
    fleet = MadeUpFleet("demo", workers=3, fronts=1)
    told: list[str] = []

    def news(page: Any) -> list[str]:
        """The events that came since the last call, oldest first."""
        texts = page.locator(".event").evaluate_all("(all) => all.map((one) => one.textContent.slice(8))")[::-1]
        new = texts[len(told) :]
        told.extend(new)
        return list(new)

    with FleetPageRig(fleet) as rig:
        page = open_page(rig.url)
        rig.tell_fleet(page)
        fleet.set_worker("worker-1", state="starting")
        fleet.status["errors"]["worker-1"] = "has died"
        fleet.status["queue"]["requeued"] = 4
        rig.tell_fleet(page)
        assert news(page) == [
            "lostworker-1 has died; it is started again", "moved4 requests of lost workers go on elsewhere",
        ]  # fmt: skip
        fleet.set_worker("worker-1", epoch=7)
        fleet.set_worker("worker-2", silent_s=2.5)
        rig.tell_fleet(page)
        assert news(page) == ["readyworker-1 is ready, with the epoch 7", "lostworker-2 is silent"]
        assert "started again; the process before has died" in page.locator(".worker").nth(1).text_content()
        fleet.set_worker("worker-2", silent_s=0.1)
        fleet.set_worker("worker-0", state="draining")
        fleet.set_worker("worker-3", state="starting")
        fleet.status["front_ends"]["host-9"] = 0
        fleet.status["journal"]["fault"] = "the disk is full"
        rig.tell_fleet(page)
        assert news(page) == [
            "leavesworker-0 hands its requests over, and then ends", "returnedworker-2 speaks again",
            "startsworker-3 is starting", "journalthe disk is full", "startsthe front end host-9 is here",
        ]  # fmt: skip
        fleet.status["workers"] = [one for one in fleet.status["workers"] if one["name"] != "worker-0"]
        fleet.status["kept"] = ["worker-1", "worker-2", "worker-3"]
        fleet.status["journal"]["fault"] = None
        rig.tell_fleet(page)
        assert news(page) == ["leavesworker-0 has ended", "returnedthe journal can be written again"]
        rig.tell_fleet(page, is_away=True)
        rig.tell_fleet(page, is_away=True)
        assert news(page) == ["lostthe queue does not answer"]
        assert page.locator("#announcer").text_content() == "demo: the queue does not answer"
        page.get_by_text("the queue does not answer: the picture is of").wait_for()
        assert page.locator(".worker").count() == 3 and page.locator("#banner").is_hidden()
        rig.tell_fleet(page)
        assert news(page) == ["returnedthe queue answers again"] and page.locator(".age").is_hidden()


def test_a_fleet_can_be_read_by_all(open_page: Open) -> None:
    """Controls and rows have names, and markup in a worker's error or in a front end's name stays text."""
    fleet = MadeUpFleet(MARKUP, workers=2)
    fleet.name = "demo"
    fleet.status["front_ends"] = {MARKUP: 1}
    fleet.status["errors"] = {f"{MARKUP}-1": MARKUP}
    fleet.status["journal"]["fault"] = MARKUP
    with FleetPageRig(fleet) as rig:
        page = open_page(rig.url)
        rig.tell_fleet(page)
        fleet.set_worker(f"{MARKUP}-1", state="starting")
        fleet.set_worker("worker-1", node=MARKUP, device=MARKUP)
        rig.tell_fleet(page)
        assert page.evaluate("globalThis.hacked") is None and page.locator("img").count() == 1
        assert page.locator(".event", has_text=MARKUP).count() > 0
        assert page.evaluate(NAMELESS) == [] and page.evaluate(SAME_IDS) == 0
        for name in ("Front ends", "Queue", "Workers"):
            assert page.get_by_role("region", name=name, exact=True).is_visible()
        assert page.get_by_role("img", name="90 blocks in use · 50 cached").count() == 2
        page.get_by_text("What am I seeing?").click()
        assert page.get_by_text("have the model", exact=False).count() == 0
        assert page.locator("#guide li:visible").count() == 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_fleet_on_a_phone_scrolls_in_one_direction_only(open_page: Open, scheme: str) -> None:
    fleet = MadeUpFleet("demo", workers=12)
    fleet.set_worker("worker-1000000000000000000000000000000000000000000000000000000000000", state="starting")
    fleet.status["front_ends"] = {"a-host-with-a-very-long-name.in-a-domain.example-4711-0a1b2c3d": 1_000_000}
    fleet.status["journal"]["fault"] = "the journal /" + "x" * 200
    size = {"width": 400, "height": 740}
    with FleetPageRig(fleet) as rig:
        page = open_page(
            rig.url, viewport=size, device_scale_factor=3, has_touch=True, is_mobile=True, color_scheme=scheme
        )
        rig.tell_fleet(page)
        page.get_by_text("What am I seeing?").click()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        assert page.evaluate(CONTRAST) > 4.5
        tops = page.locator(".fleet-parts > section").evaluate_all(
            "(all) => all.map((one) => one.getBoundingClientRect().top)"
        )
        assert tops == sorted(tops) and len(set(tops)) == 3


# ---- replay


def test_a_recording_is_played_and_sought(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(200, 200), seed=5)
    frames = record([pool], 120, full_every=25)
    expected: dict[int, list[int]] = {}
    again = Simulation("demo", 512, 8, lengths=(200, 200), seed=5)
    for _ in range(120):
        again.step()
        expected[again.step_number] = again.cells().tolist()
    with PageRig([pool], recording=frames) as rig:
        page = open_page(rig.url)
        page.wait_for_function("() => pagetide.shown.get('demo')?.model.step === 1")
        assert page.locator("#prompt-card").is_hidden()
        for seconds in (3.0, 9.5, 1.2, 11.9):
            page.evaluate("(s) => pagetide.replay.seek(pagetide.replay.began + s)", seconds)
            step = round(seconds * 10) + 1
            page.wait_for_function("(step) => Math.abs(pagetide.shown.get('demo').model.step - step) <= 1", arg=step)
            at = page.evaluate("pagetide.shown.get('demo').model.step")
            assert seen(page) == expected[at]
        page.evaluate("pagetide.replay.seek(pagetide.replay.began)")
        page.wait_for_function("() => pagetide.shown.get('demo').model.step === 1")
        page.get_by_label("Speed").select_option("10")
        page.locator("h1").click()
        page.keyboard.press(" ")
        page.wait_for_function("() => pagetide.shown.get('demo').model.step === 120")
        assert seen(page) == expected[120]
        page.get_by_role("button", name="Play").wait_for()
        page.keyboard.press("Home")
        page.wait_for_function("() => pagetide.shown.get('demo').model.step === 1")
        assert json.loads(page.evaluate("JSON.stringify(pagetide.replay.playing)")) is False


def test_a_replay_stops_where_no_more_frames_come(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(200, 200), seed=5)
    frames = record([pool], 600)
    with PageRig([pool], recording=frames) as rig:
        rig.damage = ["{", "\x00"]  # of a damaged file: left out
        page = open_page(rig.url, may_fail="Failed to load resource")
        page.wait_for_function("() => pagetide.shown.get('demo')?.model.step === 1")
        rig.refusal = (503, "the file is gone")
        page.get_by_label("Speed").select_option("10")
        page.get_by_role("button", name="Play").click()
        page.get_by_text("The frames did not come: the file is gone").wait_for()
        page.get_by_role("button", name="Play").wait_for()  # it stopped when all that came was shown
        assert page.evaluate("pagetide.replay.time - pagetide.replay.began") == pytest.approx(10, abs=0.1)
        assert rig.num_refused <= 3
        page.evaluate("pagetide.replay.seek(pagetide.replay.ended)")
        page.wait_for_function("() => pagetide.replay.isLost")
        rig.refusal = None
        page.evaluate("pagetide.replay.seek(pagetide.replay.began + 10)")
        page.wait_for_function("() => pagetide.shown.get('demo').model.step >= 100")
        page.get_by_role("button", name="Play").click()
        page.wait_for_function("() => pagetide.shown.get('demo').model.step === 600")
        assert seen(page) == pool.cells().tolist()


# ---- the pictures of the documents


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    """At a small size, by the script: of a real server on a phone, and of a made-up pool."""
    script = Path(__file__).resolve().parents[2] / "examples" / "draw_page.py"
    command = [sys.executable, "-P", str(script), "--folder", str(tmp_path), "--only", "phone", "million"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--blocks", "4096", "--seconds", "0.1"], check=True, env=environ, timeout=300)
    sizes = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sizes.keys() == {"page-phone.png", "page-million.png"}
    for name, (width, height) in {"page-phone.png": (780, 1688), "page-million.png": (2880, 1800)}.items():
        assert len(sizes[name]) < 300_000 and struct.unpack(">II", sizes[name][16:24]) == (width, height)

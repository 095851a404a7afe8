"""The page in a real browser: what it draws is what the frames say, and it stays usable when things go wrong."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from browser_rig import (
    MARKUP,
    NAMELESS,
    SAME_IDS,
    FleetPageRig,
    Open,
    page_without_server,
    phone,
    pixels,
    seen,
    shown,
    sign_in,
    wait_for_step,
)
from page_pools import MadeUpFleet, PageRig, Simulation, record
from servers import WITH_EVERYTHING, ServerProcess

pytestmark = pytest.mark.xdist_group("browser")


# JavaScript that the tests run in the page.
SAME_CELLS = """(expected) => {
    const { cells } = pagetide.shown.get("demo").model;
    return expected.every(([block, cell]) => cells[block] === cell);
}"""
SHOWS_STEP = "(step) => pagetide.shown.get('demo')?.model.step === step"
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


def test_a_million_blocks_are_drawn_and_can_be_zoomed_into(open_page: Open) -> None:
    pool = Simulation("demo", 1_000_000, 64, seed=4, lengths=(40_000, 40_000), load=40)
    pool.step()
    with shown(open_page, pool, steps=3) as (_, page):
        cells = pool.cells()
        assert page.evaluate(SAME_CELLS, [[at, cells[at]] for at in range(0, 1_000_000, 997)])
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
    with shown(open_page, pool, steps=5) as (rig, page):
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


def test_the_cells_of_a_request_stand_out_while_it_is_hovered_over(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(200, 200), load=8)
    with shown(open_page, pool, steps=20) as (_, page):
        first, other = pool.running[:2]
        alone = [pool.cells().index(16 + one.row) for one in (first, other)]
        before = pixels(page, alone)
        page.locator(f"#running li:has-text('{first.request.label or first.request.request_id}')").hover()
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
        page.wait_for_function(SHOWS_STEP, arg=pool.step_number)
        page.wait_for_function("() => !pagetide.shown.get('demo').panel.map.flashes.size", polling=50)
        assert page.evaluate("flashed") > 0 and page.evaluate("drawn") <= 8  # 520 ms, nine a second


def test_decisions_are_told_in_plain_words(open_page: Open) -> None:
    with shown(open_page, Simulation("demo", 512, 8)) as (_, page):
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
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=24, seed=3, forecast=False)
    for _ in range(400):
        pool.step()
    kept = [one for one in pool.decisions if one["what"] != "wait"]
    assert kept
    with shown(open_page, pool) as (_, page):
        page.wait_for_function("(n) => document.querySelectorAll('#events li').length >= n", arg=len(kept))
        assert set(page.locator("#events time").all_text_contents()) == {"before"}
        steps = page.locator("#events time").evaluate_all("(all) => all.map((one) => one.title)")
        assert steps[: len(kept)] == [f"step {one['step']}" for one in reversed(kept)]
        assert (
            page.locator("#events li.admit").count() == len(pool.running) == sum("came at" in one for one in steps[len(kept) :])
        )
        assert page.locator("#no-events").is_hidden()


def test_hits_are_told_by_request(open_page: Open) -> None:
    pool = Simulation("demo", 4096, 8, lengths=(400, 20), load=8, seed=1)
    with shown(open_page, pool) as (rig, page):
        expected: dict[str, str] = {}
        for _ in range(40):
            rig.step()
            wait_for_step(page, pool)
            for one in pool.running:
                name, found = one.request.request_id, one.num_cached_tokens
                if found:
                    expected.setdefault(name, f"{one.request.label or name} found {found} prompt tokens")
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
            [[None, f"36 prompt tokens {rest}"], ["r1", "found 64 prompt tokens in the cache, not computed again"]],
        ]


def test_the_scale_of_a_lease_is_that_of_what_is_used(open_page: Open) -> None:
    """The most that a process may have is for all that it does: the pool can be small beside it."""
    pool = Simulation("demo", 512, 8, mapped=0.1, lengths=(100, 100), load=2)
    real = pool.memory
    lease = {"granted": 20 << 20, "held": 19 << 20, "min": 13 << 20, "max": 40 << 30, "recall_target": None}
    pool.memory = lambda: real() | {"weights": 8 << 20, "base": 4 << 20, "prepared": 0, "lease": lease}
    with shown(open_page, pool, steps=5) as (_, page):
        drawn = "pagetide.shown.get('demo').panel.chart.drawn"
        page.wait_for_function(f"() => {drawn}")
        assert page.evaluate(drawn) == {"top": 10 << 20, "above": ["at most 64 MiB"]}  # of 8 MiB for the cache


def test_two_models_have_a_panel_each_and_a_search_asks_both(open_page: Open) -> None:
    """Also of requests that the page has not seen."""
    pools = [Simulation("one", 512, 8, seed=1), Simulation("two", 1024, 16, seed=2)]
    with shown(open_page, *pools, steps=30) as (rig, page):
        for pool in pools:
            assert seen(page, pool.name) == pool.cells()
        assert page.locator(".panel h2").all_text_contents() == ["one", "two"]
        assert page.locator("#prompt-model option").all_text_contents() == ["one", "two"]
        page.get_by_text("two, KV").wait_for()
        with rig.changed:
            pools[1].scheduler.decisions.cut(1, "long-ago", 90, 80)
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


def test_the_request_of_the_prompt_box_is_followed(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(100, 400), load=1)
    with shown(open_page, pool, steps=1, answer=["a"] * 4, hold=True) as (rig, page):
        page.get_by_role("button", name="Run", exact=True).click()
        page.wait_for_function("() => pagetide.followedId !== null")
        label = rig.wait_for_request()[2]
        pool.name_of = lambda n: (f"mine-{n}", label)
        pool.load = 2
        rig.step(12)
        wait_for_step(page, pool)
        rows = page.evaluate("[...pagetide.shown.get('demo').panel.map.followed]")
        assert rows == [one.row for one in pool.running if one.request.label == label] != []
        page.get_by_role("button", name="Abort").click()
        page.get_by_text("Aborted.").first.wait_for()
        assert page.evaluate("pagetide.shown.get('demo').panel.map.followed.size") == 0


def test_the_prompt_box_says_where_its_request_is(open_page: Open) -> None:
    """Beams are all there at the end only: until then the status tells."""
    pool = Simulation("demo", 512, 8, lengths=(100, 400), load=1, rows=1)
    with shown(open_page, pool, steps=10, answer=[""] * 2, hold=True) as (rig, page):
        page.get_by_text("Sampling").first.click()
        page.get_by_role("radio", name="Beams").check()
        page.get_by_text("Beams come as a whole at the end").wait_for()
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
        step_until(lambda: pool.running != [] and pool.running[0].request.label == label)
        prompt, computed = len(pool.running[0].request.prompt_token_ids), pool.scheduler.rows.computed
        assert computed[0] < prompt
        status.get_by_text(f"Computing the prompt: {computed[0]} of {prompt} tokens").wait_for()
        step_until(lambda: computed[0] >= prompt)
        status.get_by_text("Searching: ").wait_for()


SEEDS = [("9007199254740993", 2**53 + 1), ("18446744073709551615", 2**64 - 1), ("-9223372036854775808", -(2**63)), ("007", 7),
     ("18446744073709551616", None), ("-9223372036854775809", None), ("1e3", None), ("7.0", None)]  # fmt: skip


def test_a_seed_keeps_its_digits(open_page: Open) -> None:
    with shown(open_page, Simulation("demo", 512, 8), steps=1) as (rig, page):
        page.get_by_text("Sampling").first.click()
        for seed, sent in SEEDS:
            rig.bodies.clear()
            page.get_by_label("Seed").fill(seed)
            page.get_by_role("button", name="Run", exact=True).click()
            if sent is None:
                said = f"the seed is {seed}; it has to be a whole number"
                page.locator("#prompt-status.failed", has_text=said).wait_for()
                assert rig.bodies == []
            else:
                assert rig.wait_for_request()[1]["seed"] == sent
                page.locator("#prompt-status", has_text="4 tokens in").wait_for()


def test_tokens_are_divided_without_a_loss(open_page: Open) -> None:
    """Whatever the pieces are, the spans together are the text, and each token has one place."""
    chance = np.random.default_rng(0)
    alphabet = ["a", " b", "é", "�", "", "\n", "<b>", "日"]
    cases = [
        [
            tokens := [alphabet[i] for i in chance.integers(0, len(alphabet), chance.integers(0, 6))],
            "".join(tokens) if chance.random() < 0.5 else "".join(tokens).replace("�", "ü")[: chance.integers(0, 8)],
        ]
        for _ in range(600)
    ]
    pool = Simulation("demo", 512, 8)
    with shown(open_page, pool) as (_, page):
        script = """async (cases) => {
            const { divided } = await import("./prompt.js");
            return cases.map(([tokens, text]) => divided(text, tokens.map((token) => ({ token }))).map(
                ([part, own]) => [part, own.map((one) => one.token)]));
        }"""
        for (tokens, text), parts in zip(cases, page.evaluate(script, cases), strict=True):
            assert "".join(part for part, _ in parts) == text
            placed = [token for _, own in parts for token in own]
            assert placed == tokens[: len(placed)]


def test_the_prompt_box_streams(open_page: Open, tmp_path: Path) -> None:
    """With a real engine."""
    with ServerProcess([*WITH_EVERYTHING, "--no-access-log"], tmp_path / "log", OMP_NUM_THREADS="1") as server:
        page = open_page(f"{server.url}/page/")
        page.wait_for_function("() => pagetide.shown.get('demo')?.model.pool")
        page.evaluate("""() => { globalThis.lengths = new Set();
            new MutationObserver(() => globalThis.lengths.add(document.getElementById("output").textContent.length))
                .observe(document.getElementById("output"), { childList: true, subtree: true }); }""")
        page.get_by_text("Sampling").first.click()
        page.get_by_role("radio", name="Greedy").check()
        page.get_by_label("Max tokens").fill("40")
        page.get_by_role("textbox", name="Prompt").fill("The whale")
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator("#prompt-status", has_text="40 tokens in").wait_for()
        body = {"model": "demo", "prompt": "The whale", "max_tokens": 40, "temperature": 0, "logprobs": 4}
        whole = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60.0).json()["choices"][0]
        assert page.locator("#output").text_content() == whole["text"]
        assert page.evaluate("globalThis.lengths.size") > 1  # the text came in pieces
        first = page.locator("#output .token").first
        first.hover()
        most = max(whole["logprobs"]["top_logprobs"][0].values())
        page.locator("#tooltip .chosen", has_text=f"{most:.2f}").wait_for()
        assert page.locator("#tooltip tr").count() == 4
        page.locator("#output").focus()
        page.keyboard.press("ArrowRight")
        assert first.evaluate("(node) => node === document.activeElement")
        page.close()  # before its server ends, which it would log


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


def test_an_admin_has_buttons_for_models_and_others_none(open_page: Open) -> None:
    pools = [Simulation("demo", 512, 8), Simulation("more", 512, 8, seed=2)]
    with PageRig(pools, key="sk-1") as rig:
        page = open_page(rig.url, may_fail="Failed to load resource")
        sign_in(page, "sk-1")
        rig.step(3)
        for pool in pools:
            wait_for_step(page, pool)
        page.get_by_label("Engines").check()
        legend = page.locator("#device .chart-legend")
        legend.get_by_text("demo, weights").wait_for()
        group = page.get_by_role("group", name="What to do with demo")
        for name, wanted in (("Sleep", ["Wake", "Stop"]), ("Wake", ["Stop"]), ("Stop", ["Load"])):
            group.get_by_role("button", name=name).click()
            page.wait_for_function(
                """([name, wanted]) => [...document.querySelectorAll(`[aria-label="What to do with ${name}"] button`)].filter(
                    (one) => !one.hidden).map((one) => one.textContent).join() === wanted""", arg=["demo", ",".join(wanted)]
            )  # fmt: skip
        entry = legend.locator("div", has_text="demo, weights").locator("dd")
        page.wait_for_function("(node) => node.textContent.startsWith('0 ')", arg=entry.element_handle())
        group.get_by_role("button", name="Load").click()
        page.get_by_role("alert").get_by_text("no weights").wait_for()
    with shown(open_page, Simulation("demo", 512, 8), steps=1) as (_, page):
        assert page.get_by_role("group", name="What to do with demo").is_hidden()


def test_the_page_says_why_the_server_refuses(open_page: Open) -> None:
    pool, message = Simulation("demo", 512, 8), "too many pages look on"
    with PageRig([pool]) as rig:
        rig.refusal = (429, message)
        page = open_page(rig.url, may_fail="Failed to load resource")
        page.get_by_text(f"The server refuses: {message}. Trying again").wait_for()
        rig.refusal = None
        rig.step()
        page.get_by_role("button", name="Try now").click()
        wait_for_step(page, pool)
        assert page.locator("#banner").is_hidden()


def test_the_map_has_a_cursor(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8)
    with shown(open_page, pool, steps=5) as (_, page):
        page.locator("canvas.map").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert page.locator("#announcer").text_content().startswith("block 2 · ")
        page.keyboard.press("Enter")
        assert page.get_by_role("dialog").get_by_role("heading", name="Block 2", exact=True).is_visible()
        page.keyboard.press("Escape")
        assert page.get_by_role("dialog").is_hidden()


def test_what_happens_in_a_fleet_is_told(open_page: Open) -> None:
    fleet = MadeUpFleet("demo", workers=3, fronts=1)
    told: list[str] = []

    def news(page: Any) -> list[str]:
        """The events that came since the last call, oldest first."""
        words = "(all) => all.map((one) => one.textContent.slice(one.firstChild.textContent.length))"
        texts = page.locator(".event").evaluate_all(words)[::-1]
        new = texts[len(told) :]
        told.extend(new)
        return list(new)

    with FleetPageRig(fleet) as rig:
        page = open_page(rig.url)
        rig.tell_fleet(page)
        assert news(page) == [f"readyworker-{n} is ready, with the epoch {n + 1}" for n in range(3)]
        fleet.set_worker("worker-1", state="starting")
        fleet.status["errors"]["worker-1"] = "has died"
        fleet.status["queue"]["requeued"] = 4
        rig.tell_fleet(page)
        assert news(page) == ["lostworker-1 has died; it is started again", "moved4 requests of lost workers go on elsewhere"]
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
def test_a_phone_scrolls_in_one_direction_only(open_page: Open, scheme: str) -> None:
    def check(page: Any, width: int) -> None:
        page.get_by_text("What am I seeing?").click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(CONTRAST) > 4.5

    pools = [Simulation("demo", 1024, 32, load=20), Simulation("a-model-with-a-long-name", 10_000, 64)]
    with PageRig(pools) as rig:
        page = open_page(rig.url, **phone(360, scheme))
        rig.step(40)
        wait_for_step(page, pools[1])
        page.get_by_text("Sampling").first.click()
        check(page, 360)
    fleet = MadeUpFleet("demo", workers=12)
    fleet.set_worker("worker-1000000000000000000000000000000000000000000000000000000000000", state="starting")
    fleet.status["front_ends"] = {"a-host-with-a-very-long-name.in-a-domain.example-4711-0a1b2c3d": 1_000_000}
    fleet.status["journal"]["fault"] = "the journal /" + "x" * 200
    with FleetPageRig(fleet) as fleet_rig:
        page = open_page(fleet_rig.url, **phone(400, scheme))
        fleet_rig.tell_fleet(page)
        check(page, 400)
        script = "(all) => all.map((one) => one.getBoundingClientRect().top)"
        tops = page.locator(".fleet-parts > section").evaluate_all(script)
        assert tops == sorted(tops) and len(set(tops)) == 3


def test_a_recording_is_played_and_sought(open_page: Open) -> None:
    pool, again = (Simulation("demo", 512, 8, lengths=(200, 200), seed=5) for _ in range(2))
    frames = record(pool, 120, full_every=25)
    expected: list[list[int]] = [[]]
    for _ in range(120):
        again.step()
        expected.append(again.cells())
    with PageRig([pool], recording=frames) as rig:
        page = open_page(rig.url)
        page.wait_for_function(SHOWS_STEP, arg=1)
        assert page.locator("#prompt-card").is_hidden()
        for seconds in (3.0, 9.5, 1.2, 11.9):
            page.evaluate("(s) => pagetide.replay.seek(pagetide.replay.began + s)", seconds)
            step = round(seconds * 10) + 1
            page.wait_for_function("(step) => Math.abs(pagetide.shown.get('demo').model.step - step) <= 1", arg=step)
            assert seen(page) == expected[page.evaluate("pagetide.shown.get('demo').model.step")]
        page.evaluate("pagetide.replay.seek(pagetide.replay.began)")
        page.wait_for_function(SHOWS_STEP, arg=1)
        page.get_by_label("Speed").select_option("10")
        page.locator("h1").click()
        page.keyboard.press(" ")
        page.wait_for_function(SHOWS_STEP, arg=120)
        assert seen(page) == expected[120]
        page.get_by_role("button", name="Play").wait_for()
        page.keyboard.press("Home")
        page.wait_for_function(SHOWS_STEP, arg=1)
        assert page.evaluate("pagetide.replay.playing") is False


def test_a_replay_stops_where_no_more_frames_come(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(200, 200), seed=5)
    frames = record(pool, 600)
    with PageRig([pool], recording=frames) as rig:
        rig.damage = ["{", "\x00"]  # of a damaged file: left out
        page = open_page(rig.url, may_fail="Failed to load resource")
        page.wait_for_function(SHOWS_STEP, arg=1)
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
        page.wait_for_function(SHOWS_STEP, arg=600)
        assert seen(page) == pool.cells()


@pytest.mark.usefixtures("browser")  # which skips without one
def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    """At a small size, by the script: of a real server on a phone, and of a made-up pool."""
    script = Path(__file__).resolve().parents[3] / "examples" / "draw_page.py"
    command = [sys.executable, "-P", str(script), "--folder", str(tmp_path), "--only", "phone", "million"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--blocks", "4096", "--seconds", "0.1"], check=True, env=environ, timeout=300)
    sizes = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sizes.keys() == {"page-phone.png", "page-million.png"}
    for name, (width, height) in {"page-phone.png": (780, 1688), "page-million.png": (2880, 1800)}.items():
        assert len(sizes[name]) < 300_000 and struct.unpack(">II", sizes[name][16:24]) == (width, height)

"""The page in a real browser: what it draws is what the frames say, and it stays usable when things go wrong."""

from __future__ import annotations

import pytest
from browser_rig import (
    MARKUP,
    NAMELESS,
    SAME_IDS,
    FleetPageRig,
    Open,
    check_colours,
    page_without_server,
    seen,
    shown,
    sign_in,
    wait_for_step,
)
from page_pools import MadeUpFleet, PageRig, Simulation

pytestmark = pytest.mark.xdist_group("browser")
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


def test_the_page_has_the_cells_of_the_pool_at_every_step(open_page: Open) -> None:
    """An oracle's, and the canvas has their colours: also amid a recall, while blocks move and extents are given back."""
    pool = Simulation("demo", 4096, 64, seed=4, lengths=(3072, 2048), rows=12)
    plans, kinds = [], set()

    def recall() -> None:
        pool.recall(0.6)
        plans.append(pool.begin())

    with shown(open_page, pool) as (rig, page):
        for number in range(11):
            if number == 6:
                rig.step(0, act=recall)
            else:
                rig.step(10, act=lambda: pool.finish(plans.pop()) if plans else None)
            wait_for_step(page, pool)
            cells = pool.cells()
            assert seen(page) == cells
            check_colours(page, cells)
            kinds |= {"shared" if cell >= 0x8000 else "own" if cell >= 16 else cell for cell in cells}
    assert pool.scheduler.stats.preemptions > 0 and kinds == {"shared", "own", 0, 1, 2, 3, 4, 5}


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
        request, block = pool.running[0].request, pool.blocks_of(pool.running[0])[2]
        left, top, edge = page.evaluate(SETTLED_CELL, block)[:3]
        page.locator("canvas.map").hover(position={"x": left + edge / 2, "y": top + edge / 2})
        said = page.locator("#tooltip").text_content()
        assert said.startswith(f"block {block} · live · {request.label or request.request_id}")
        page.locator("canvas.map").click(position={"x": left + edge / 2, "y": top + edge / 2})
        details = page.get_by_role("dialog")
        details.get_by_text("its block 2").first.wait_for()
        assert "the sea was calm" in details.locator(".block-text").text_content()
        page.keyboard.press("Escape")
        assert details.is_hidden() and page.evaluate("document.activeElement.className").startswith("map")


def test_the_lists_say_what_runs_what_waits_and_why(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=24, seed=3)
    with shown(open_page, pool, steps=60) as (_, page):
        page.wait_for_function("(n) => document.getElementById('num-waiting').textContent === String(n)", arg=len(pool.waiting))
        assert page.locator("#num-running").text_content() == str(len(pool.running))
        requests = [one.request for one in pool.waiting]
        names = [request.label or request.request_id for request in requests]
        assert page.locator("#waiting .name").all_text_contents() == names
        decision = next(d for d in reversed(pool.decisions) if d.get("request_id") == requests[0].request_id)
        assert decision["what"] == "wait"
        why = page.locator("#waiting .why").first.text_content()
        needs = f"needs {decision['needed']} blocks; {decision['room']} are free"
        peak = f", but with it the running requests are expected to need {decision['expected']} of "
        assert why.removeprefix("when it came: ").startswith(needs + peak if decision["expected"] else needs)
        page.get_by_role("searchbox").fill(requests[0].request_id)
        page.keyboard.press("Enter")
        page.get_by_role("dialog").get_by_text(needs).first.wait_for()


def test_a_page_that_is_opened_late_tells_which_requests_run(open_page: Open) -> None:
    pool = Simulation("demo", 8192, 8, lengths=(40, 400), load=60, rows=64, seed=2)
    for _ in range(4):
        pool.step()
    early = sorted((one.request for one in pool.running), key=lambda one: one.arrival)
    assert len(early) > 51
    with shown(open_page, pool) as (_, page):
        page.wait_for_function("() => document.querySelectorAll('#events li').length >= 51")
        told = page.locator("#events li.admit .words").all_text_contents()
        names = [one.label or one.request_id for one in reversed(early[-50:])]
        assert [text.split(" is admitted: ")[0] for text in told[:-1]] == names
        assert told[-1] == f"{len(early) - 50} more requests admitted"
        assert set(page.locator("#events time").all_text_contents()) == {"before"}


def test_the_prompt_box_sends_what_is_chosen_and_shows_each_token(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8)
    with shown(open_page, pool, steps=1) as (rig, page):
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
        legend = page.locator("#likely-legend .token")  # its tints are those of the text
        assert legend.all_text_contents() == ["above 25 %", "5 to 25 %", "1 to 5 %", "below 1 %"] and legend.first.is_visible()
        assert legend.evaluate_all("(all) => new Set(all.map((one) => getComputedStyle(one).backgroundColor)).size") == 4
        assert page.locator("#output .token").evaluate_all("(all) => all.map((one) => one.dataset.likely)") == ["3"] * 4
        page.locator("#output .token").nth(1).hover()
        assert "78 %" in page.locator("#tooltip").text_content() and "␣other" in page.locator("#tooltip").text_content()
        page.get_by_role("radio", name="Beams").check()
        page.get_by_role("radio", name="Chat").check()
        page.get_by_role("button", name="Run", exact=True).click()
        page.wait_for_function("() => document.getElementById('run').disabled === false")
        path, body, _ = rig.bodies[1]
        assert path == "/v1/chat/completions" and body["use_beam_search"] is True and body["n"] == 2
        assert legend.first.is_hidden()
        assert "temperature" not in body and body["messages"] == [{"role": "user", "content": "The sea"}]


def test_markup_stays_text(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=24, seed=3, name_of=lambda n: (f"{MARKUP}{n}", f"{n}{MARKUP}"))
    other = Simulation(MARKUP, 512, 8)
    with shown(open_page, pool, other, steps=60, answer=[MARKUP, "<b>", "</p>"]) as (_, page):
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
        assert seen(page) == second.cells()
        assert page.locator("#banner").is_hidden()


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


def test_all_controls_have_names_and_can_be_reached_by_keyboard(open_page: Open) -> None:
    pool = Simulation("demo", 512, 8, lengths=(400, 400), load=14)
    with shown(open_page, pool, steps=40) as (_, page):
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


def test_a_fleet_has_a_row_for_each_worker(open_page: Open) -> None:
    fleet = MadeUpFleet("demo", workers=2)
    with FleetPageRig(fleet) as rig:
        page = open_page(rig.url)
        rig.tell_fleet(page)
        second = {"name": "worker-1", "facts": READY["facts"].replace("h 1", "h 2")}
        assert page.evaluate(SHOWN_FLEET) == {
            "fronts": [["host-0-0a1b2c3d", "0 requests"], ["host-1-0a1b2c3d", "0 requests"]],
            "queue": {"waiting": "0", "running": "0", "ended": "0", "failed": "0", "cancelled": "0", "refused": "0",
                      "requeued": "0", "journal": "written"},
            "workers": [READY | {"name": "worker-0"}, READY | second],
        }  # fmt: skip
        told = page.locator(".event").all_text_contents()
        assert told == [f"beforereadyworker-{n} is ready, with the epoch {n + 1}" for n in (1, 0)]
        hidden = [page.locator(one).is_hidden() for one in ("#search-form", "#running", "#total-recalls", "canvas.map")]
        assert all(hidden) and page.get_by_role("region", name="Workers").is_visible()

        queue = {"waiting": 1234, "running": 21, "ended": 7, "requeued": 3}
        fleet.status["queue"] |= queue | {"recorded_tokens": 600, "hit_blocks": 1, "prompt_blocks": 4}
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

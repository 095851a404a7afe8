"""What is read from the page in a real browser, and servers without engines behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from page_pools import MadeUpFleet, PageRig, Simulation

from pagetide.server.feed import fleet_picture

MARKUP = '<img src=x onerror="globalThis.hacked = 1"><script>globalThis.hacked = 2</script>'
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
DRAWN = """([name, number, value]) => {
    const one = globalThis.pagetide?.shown.get(name);
    return one?.model[number] === value && one.panel.map.layout && !one.panel.map.pending && !one.panel.map.flashes.size;
}"""
Open = Callable[..., Any]


def seen(page: Any, model: str = "demo") -> list[int]:
    """The cells that the page has of a model."""
    return list(page.evaluate("(name) => [...pagetide.shown.get(name).model.cells]", model))


def wait_for_step(page: Any, simulation: Simulation) -> None:
    """Until the page has the newest step, and has drawn it."""
    page.wait_for_function(DRAWN, arg=[simulation.name, "step", simulation.step_number])


@contextmanager
def shown(open_page: Open, *pools: Simulation, steps: int = 0, **options: Any) -> Iterator[tuple[PageRig, Any]]:
    """A server of these pools, and the page that shows them after so many steps."""
    with PageRig(pools, **options) as rig:
        page = open_page(rig.url)
        rig.step(steps)
        for pool in pools:
            wait_for_step(page, pool)
        yield rig, page


def phone(width: int, scheme: str) -> dict[str, Any]:
    """The options of a page on a phone."""
    size = {"width": width, "height": 740}
    return {"viewport": size, "device_scale_factor": 3, "has_touch": True, "is_mobile": True, "color_scheme": scheme}


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


def sign_in(page: Any, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


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
        seen = "([now, away]) => { const one = globalThis.pagetide?.shown.get('demo')?.model; return !pagetide.dirty && "
        page.wait_for_function(
            f"{seen} (away ? one?.isAway : one?.now?.time === now && !one.isAway); }}", arg=[self.now, is_away]
        )

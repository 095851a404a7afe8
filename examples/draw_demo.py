"""Draws the terminal views of `pagetide demo` and `pagetide demo --shared` as SVGs, from real runs.

    python examples/draw_demo.py

Each run is recorded; its picture is the moment when a recall has taken the most. The run of `pagetide demo` is drawn as
terminals of three sizes show it. Two runs never have the same timing, so the pictures differ from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from pagetide.demo.display import fitted
from pagetide.demo.page import DemoState, demo_page
from pagetide.demo.run import DemoOptions, run_demo
from pagetide.demo.shared import SECONDS, share_device
from pagetide.monitor.view.picture import picture
from pagetide.monitor.view.symbols import UNICODE

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZES = ((80, 24), (100, 30), (200, 50))
SHARED_SIZE = (100, 30)
AFTER_S = 1.0  # that the shared run goes on after the external process has taken the most
Moment = tuple[float, DemoState]


class Recorder:
    """Keeps every state that is shown, with the seconds since its creation."""

    def __init__(self) -> None:
        self.states: list[Moment] = []
        self._began = time.monotonic()

    def show(self, state: DemoState) -> None:
        """Keep `state`."""
        self.states.append((time.monotonic() - self._began, state))


def main(argv: Sequence[str] | None = None) -> None:
    """Run both demos and write the pictures."""
    parser = argparse.ArgumentParser(description="Draw the terminal views of `pagetide demo` as SVGs, from real runs.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the pictures (default: the repository's)")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="of `pagetide demo` (default 24)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of each prompt (default 96)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the shared run; 0 leaves it out")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder()
    options = DemoOptions("cpu", args.prompts, args.max_new_tokens)
    print("\n".join(asyncio.run(run_demo(options, recorder.show)).lines()), flush=True)
    moment = recalled(recorder.states)
    for width, height in SIZES:
        draw(moment, width, height, args.folder / f"demo-{width}x{height}.svg", "pagetide demo")
    if args.seconds > 0:
        shared = Recorder()
        print("\n".join(asyncio.run(share_device(shared.show, seconds=args.seconds)).lines()), flush=True)
        width, height = SHARED_SIZE
        file = args.folder / f"demo-shared-{width}x{height}.svg"
        draw(contended(shared.states), width, height, file, "pagetide demo --shared")


def recalled(states: Sequence[Moment]) -> Moment:
    """The moment of a recall with the fewest mapped blocks, of equals the last; without a recall, the fullest pool."""
    with_pool = [(at_s, state) for at_s, state in states if state.pool is not None]
    during = [(at_s, state) for at_s, state in with_pool if state.alarm and state.panes]

    def mapped(moment: Moment) -> int:
        pool = moment[1].pool
        return 0 if pool is None else pool.num_mapped

    return min(reversed(during), key=mapped) if during else max(with_pool, key=mapped)


def contended(states: Sequence[Moment]) -> Moment:
    """The moment some time after the last one at which the external process held the most."""
    with_use = [(at_s, state) for at_s, state in states if state.holdings]
    most_s, _ = max(with_use, key=lambda moment: (moment[1].holdings[-1].external, moment[0]))
    return next((moment for moment in with_use if moment[0] >= most_s + AFTER_S), with_use[-1])


def draw(moment: Moment, width: int, height: int, file: Path, title: str) -> None:
    """Write the picture of `moment` in a terminal of `width` x `height` cells."""
    at_s, state = moment
    lines = fitted(demo_page(state, at_s, width, height, UNICODE), width, height)
    file.write_text(picture(lines, width, height, title, f"The terminal view of {title}"), encoding="utf-8")


if __name__ == "__main__":
    main()

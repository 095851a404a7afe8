"""What keys do to the live view: any keys, on any snapshot, and each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from snapshot_strategies import SNAPSHOT
from snapshots import leased_snapshot, sample_snapshot

from pagetide.monitor.snapshot import Snapshot
from pagetide.monitor.units import GIB, MIB
from pagetide.monitor.view.listing import Listing, Order
from pagetide.monitor.view.page import Page, render_live
from pagetide.monitor.view.state import LIMIT, RECALL, Action, Question, SizeInput, ViewState
from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols

NAMED = ("up", "down", "pageup", "pagedown", "home", "end", "tab", "enter", "escape", "backspace")
KEY = st.sampled_from((*NAMED, *"qjkmpurahRLyn?/0159GM")) | st.characters()


def press(view: ViewState, keys: str | list[str], snapshot: Snapshot) -> list[Action]:
    """The actions that these keys confirm."""
    return [action for key in keys if (action := view.press(key, snapshot)) is not None]


def drawn(view: ViewState, snapshot: Snapshot, width: int, height: int, symbols: Symbols = UNICODE) -> list[str]:
    """The page as text; the state hears what it had room for, as from the live view."""
    page: Page = render_live(snapshot, view, width=width, height=height, symbols=symbols)
    if view.help_open:
        view.help_scroll = page.start
    else:
        view.scroll = page.start
    view.process_rows = page.rows
    return ["".join(segment.text for segment in line) for line in page.lines.lines]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(SNAPSHOT, st.lists(KEY, max_size=8)), min_size=1, max_size=3),
    st.integers(1, 210),
    st.integers(1, 60),
    st.sampled_from([UNICODE, ASCII]),
)
def test_any_keys_on_any_snapshots(
    steps: list[tuple[Snapshot, list[str]]], width: int, height: int, symbols: Symbols
) -> None:
    """Nothing raises, the selection is on a row, every page fills the window exactly."""
    view = ViewState(Listing(min_bytes=None), can_act=True)
    for snapshot, keys in steps:
        for key in keys:
            action = view.press(key, snapshot)
            assert action is None or action.num_bytes >= 1
            leases = view.listing.leases(snapshot.leases, snapshot.devices)
            place = view.selected(snapshot)
            assert place is None if not (view.on_leases and leases) else place in range(len(leases))
            lines = drawn(view, snapshot, width, height, symbols)
            assert len(lines) == height
            for line in lines:
                assert cell_len(line) <= width and line.isprintable()
                line.encode("ascii" if symbols is ASCII else "utf-8")
            uses, _ = view.listing.uses(snapshot.devices)
            if not view.help_open:  # a page without the list does not clamp its place
                assert 0 <= view.scroll <= max(len(uses) - 1, 0)


def test_sort_keys_and_reverse() -> None:
    view, snapshot = ViewState(), sample_snapshot()
    for keys, order, descending in (
        ("", Order.MEMORY, True), ("p", Order.PID, False), ("r", Order.PID, True), ("u", Order.USER, False),
        ("m", Order.MEMORY, True), ("r", Order.MEMORY, False),
    ):  # fmt: skip
        press(view, keys, snapshot)
        assert (view.listing.order, view.listing.descending) == (order, descending)
    sizes = [use.process.used_bytes or 0 for use in view.listing.uses(snapshot.devices)[0]]
    assert sizes == sorted(sizes)


def test_scrolling_goes_by_lines_and_pages_and_stops_at_the_ends() -> None:
    view, snapshot = ViewState(), sample_snapshot(1, num_processes=50, host=False)
    drawn(view, snapshot, 80, 24)
    rows = view.process_rows
    assert 1 < rows < 50
    for key, start in (
        ("up", 0), ("j", 1), ("down", 2), ("k", 1), ("pagedown", 1 + rows), ("pageup", 1), ("end", 50 - rows),
        ("down", 50 - rows), ("up", 49 - rows), ("home", 0),
    ):  # fmt: skip
        press(view, [key], snapshot)
        lines = drawn(view, snapshot, 80, 24)
        assert view.scroll == start, key
        first = next(line for line in lines if "worker" in line)
        assert int(first.split()[1]) == 60_000 + start


@pytest.mark.parametrize(
    ("text", "engines"),
    [("QWEN", {"qwen3-32b"}), ("40961", {"llama-8b"}), ("grace", {None}), ("judge", set()), ("", None)],
)
def test_the_filter_finds_commands_users_pids_and_engines(text: str, engines: set[str | None] | None) -> None:
    view, snapshot = ViewState(), leased_snapshot(2)
    everything = view.listing.uses(snapshot.devices)[0]
    press(view, ["/", *text, "x", "backspace", "enter"], snapshot)
    found = view.listing.uses(snapshot.devices)[0]
    assert {use.process.engine for use in found} == engines if engines is not None else found == everything
    assert view.prompt is None and not view.leaving
    press(view, ["escape"], snapshot)
    assert view.listing.uses(snapshot.devices)[0] == everything


def test_q_in_the_filter_is_a_letter_and_in_the_help_goes_back() -> None:
    view, snapshot = ViewState(), sample_snapshot()
    press(view, "/q", snapshot)
    assert view.listing.text == "q" and not view.leaving
    press(view, ["escape", "?"], snapshot)
    assert view.listing.text == "" and view.help_open
    assert "recall memory from the selected lease" in "\n".join(drawn(view, snapshot, 100, 40))
    press(view, "q", snapshot)
    assert not view.help_open and not view.leaving
    press(view, "q", snapshot)
    assert view.leaving


@pytest.mark.parametrize("size", [(80, 24), (60, 15), (40, 10)])
def test_all_of_the_help_can_be_read_in_any_window(size: tuple[int, int]) -> None:
    view, snapshot = ViewState(), sample_snapshot()
    whole = drawn(ViewState(help_open=True), snapshot, size[0], 200)
    press(view, "?", snapshot)
    seen = set(drawn(view, snapshot, *size))
    for _ in range(100):
        press(view, "j", snapshot)
        seen |= set(drawn(view, snapshot, *size))
    assert {line for line in whole if line} <= seen


def test_an_action_is_asked_for_and_confirmed() -> None:
    view, snapshot = ViewState(can_act=True), leased_snapshot(2)
    press(view, ["tab", "down"], snapshot)
    lease = view.listing.leases(snapshot.leases, snapshot.devices)[1]
    assert lease.engine == "embed-small"
    press(view, "R", snapshot)
    assert isinstance(view.prompt, SizeInput) and view.prompt.default_bytes == lease.free_bytes
    assert press(view, [*"2 parsecs", "enter"], snapshot) == []
    assert isinstance(view.prompt, SizeInput) and "cannot read '2 parsecs'" in view.prompt.error
    assert "? 2 parsecs_  cannot read" in drawn(view, snapshot, 200, 24)[-1]
    assert drawn(view, snapshot, 80, 24)[-3:] == [
        " recall how much from 'embed-small' (pid 43210) [11.50 GiB]? 2 parsecs_",
        " cannot read '2 parsecs' as an amount of memory; write bytes (1073741824), or",
        " 1.5GiB, 512MiB, 2GB",
    ], "the reason has lines of its own where it does not fit"
    press(view, [*["backspace"] * 9, *"512MiB", "enter"], snapshot)
    assert view.prompt == Question(Action(RECALL, lease, 512 * MIB))
    assert drawn(view, snapshot, 80, 24)[-1] == " recall 512.00 MiB from 'embed-small' (pid 43210)? y or n"
    assert press(view, "y", snapshot) == [Action(RECALL, lease, 512 * MIB)]
    assert view.prompt is None
    press(view, [*"L30G", "enter"], snapshot)
    assert drawn(view, snapshot, 80, 24)[-1] == " limit 'embed-small' (pid 43210) to 30.00 GiB? y or n"
    assert press(view, "Y", snapshot) == [Action(LIMIT, lease, 30 * GIB)]


@pytest.mark.parametrize("key", ["n", "escape", "enter", "q", "R", "tab"])
def test_nothing_but_a_yes_sends(key: str) -> None:
    view, snapshot = ViewState(can_act=True), leased_snapshot(2)
    assert press(view, ["R", "enter", key, "y"], snapshot) == []
    assert view.prompt is None and not view.leaving
    assert press(view, ["L", "escape", "y"], snapshot) == []


def test_the_selection_stays_with_its_lease_and_moves_on_when_that_ends() -> None:
    view, snapshot = ViewState(), leased_snapshot(2)
    press(view, ["tab", "end"], snapshot)
    leases = view.listing.leases(snapshot.leases, snapshot.devices)
    assert view.selected(snapshot) == len(leases) - 1
    fewer = snapshot.with_leases(leases[1:])
    assert view.selected(fewer) == len(leases) - 2
    assert view.selected(snapshot.with_leases(leases[:1])) == 0
    assert view.selected(replace(snapshot, leases=())) is None


def test_where_nothing_can_be_sent_nothing_is_asked() -> None:
    view = ViewState(can_act=False)
    press(view, "R", leased_snapshot(1))
    assert view.prompt is None and view.failed and view.status == "nothing to recall: no monitor is attached"
    view = ViewState(can_act=True)
    press(view, "L", sample_snapshot(1))
    assert view.prompt is None and view.status == "nothing to limit: no engine holds a lease here"

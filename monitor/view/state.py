"""The state of the live view, changed by keys: listing, scroll, selected lease, filter, question. No drawing, no terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ...common.units import MIB, format_bytes, parse_bytes
from ..snapshot import LeaseUse, Snapshot
from .listing import Listing, Order

MAX_INPUT = 200  # characters
RECALL, LIMIT = "recall", "limit"
_ORDERS = {order.value[0]: order for order in Order}
_ACTIONS = {"R": RECALL, "L": LIMIT}
_ALIASES = {"j": "down", "k": "up"}
_MOVES = ("up", "down", "pageup", "pagedown", "home", "end")


@dataclass(frozen=True, slots=True)
class Action:
    """A command for the broker, confirmed by the user."""

    kind: str  # RECALL or LIMIT
    lease: LeaseUse
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FilterInput:
    """The filter is being typed."""


@dataclass(frozen=True, slots=True)
class SizeInput:
    """The size for an action is being typed."""

    kind: str
    lease: LeaseUse
    default_bytes: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """An action waits for a yes."""

    action: Action


Prompt: TypeAlias = FilterInput | SizeInput | Question
LeaseKey: TypeAlias = tuple[str, int, str]


@dataclass(slots=True)
class ViewState:
    """Mutable. `press` applies a key; `process_rows` is how many processes the last page had room for."""

    listing: Listing = field(default_factory=Listing)
    can_act: bool = False  # whether there is a broker for actions
    leaving: bool = False
    help_open: bool = False
    events_open: bool = False
    help_scroll: int = 0
    scroll: int = 0  # processes above the first one shown
    process_rows: int = 1
    on_leases: bool = False  # whether the arrows move the selected lease instead of the processes
    prompt: Prompt | None = None
    status: str = ""
    failed: bool = False  # whether the status is an error
    _selected: LeaseKey | None = None
    _min_bytes: int | None = 0  # while all processes are shown, the size below which they were hidden

    @property
    def speaks(self) -> bool:
        """Whether the last line is more than a hint."""
        return self.prompt is not None or bool(self.status)

    def selected(self, snapshot: Snapshot) -> int | None:
        """The place of the selected lease in the list; None if the list is empty or the processes have the arrows."""
        leases = self.listing.leases(snapshot.leases, snapshot.devices)
        if not self.on_leases or not leases:
            return None
        places = [place for place, lease in enumerate(leases) if _key(lease) == self._selected]
        return places[0] if places else 0

    def press(self, key: str, snapshot: Snapshot) -> Action | None:
        """Apply a key, as `Keys.read` names it. Returns an action that the user has confirmed."""
        self.status, self.failed = "", False
        match self.prompt:
            case FilterInput():
                self._edit_filter(key)
            case SizeInput() as prompt:
                self._edit_size(prompt, key)
            case Question(action):
                self.prompt = None
                if key in ("y", "Y"):
                    return action
                self.say("nothing was sent")
            case None:
                self._command(_ALIASES.get(key, key), snapshot)
        return None

    def say(self, text: str, *, failed: bool = False) -> None:
        """Show `text` in the last line until the next key."""
        self.status, self.failed = text, failed

    def _command(self, key: str, snapshot: Snapshot) -> None:
        if self.help_open:
            self._help_command(key)
        elif key in _MOVES:
            self._move(key, snapshot)
        elif key in _ACTIONS:
            self._ask(_ACTIONS[key], snapshot)
        elif (command := _COMMANDS.get(key)) is not None:
            command(self)
        elif key.lower() in _ORDERS:
            self.listing = replace(self.listing, order=_ORDERS[key.lower()], reverse=False)
            self.scroll = 0

    def _help_command(self, key: str) -> None:
        if key in ("?", "h", "H", "q", "Q", "escape", "enter"):
            self.help_open, self.help_scroll = False, 0
        elif key in _MOVES:
            # The page clamps this to its length.
            self.help_scroll = max(0, _moved(key, self.help_scroll, self.process_rows, 1 << 16))

    def _move(self, key: str, snapshot: Snapshot) -> None:
        if (place := self.selected(snapshot)) is not None:
            leases = self.listing.leases(snapshot.leases, snapshot.devices)
            place = _moved(key, place, max(self.process_rows, 1), len(leases) - 1)
            self._selected = _key(leases[place])
            return
        uses, _ = self.listing.uses(snapshot.devices)
        self.scroll = _moved(key, self.scroll, max(self.process_rows, 1), max(len(uses) - self.process_rows, 0))

    def _ask(self, kind: str, snapshot: Snapshot) -> None:
        """Ask for the size, for the selected lease; the first of the list if none is selected."""
        if not self.can_act or not snapshot.leases:
            why = "no engine holds a lease here" if self.can_act else "no monitor is attached"
            return self.say(f"nothing to {kind}: {why}", failed=True)
        leases = self.listing.leases(snapshot.leases, snapshot.devices)
        if not leases:
            return self.say(f"nothing to {kind}: no lease matches the filter", failed=True)
        self.on_leases = True
        lease = leases[self.selected(snapshot) or 0]
        self._selected = _key(lease)
        above = max(lease.held_bytes - lease.min_bytes, 0)
        default = lease.held_bytes if kind == LIMIT else lease.spare_bytes or above // 2
        self.prompt = SizeInput(kind, lease, max(default, MIB))
        return None

    def _edit_filter(self, key: str) -> None:
        text = self.listing.text
        if key == "escape":
            text, self.prompt = "", None
        elif key == "enter":
            self.prompt = None
        self.listing = replace(self.listing, text=_edited(text, key))
        self.scroll = 0

    def _edit_size(self, prompt: SizeInput, key: str) -> None:
        if key == "escape":
            self.prompt = None
            self.say("nothing was sent")
        elif key == "enter":
            try:
                num_bytes = parse_bytes(prompt.text) if prompt.text.strip() else prompt.default_bytes
            except ValueError as error:
                self.prompt = replace(prompt, error=str(error))
            else:
                self.prompt = Question(Action(prompt.kind, prompt.lease, num_bytes))
        else:
            self.prompt = replace(prompt, text=_edited(prompt.text, key), error="")

    def quit(self) -> None:
        """End the view."""
        self.leaving = True

    def open_help(self) -> None:
        """Show the help page."""
        self.help_open = True

    def toggle_events(self) -> None:
        """Show the newest events, or hide them again."""
        self.events_open = not self.events_open

    def start_filter(self) -> None:
        """Let the filter be typed."""
        self.prompt = FilterInput()

    def clear_filter(self) -> None:
        """List everything again."""
        self.listing, self.scroll = replace(self.listing, text=""), 0

    def reverse(self) -> None:
        """Turn the order around."""
        self.listing, self.scroll = replace(self.listing, reverse=not self.listing.reverse), 0

    def toggle_small(self) -> None:
        """Show the small processes, or hide them again."""
        before = self.listing.min_bytes
        hide = before == 0
        self.listing = replace(self.listing, min_bytes=(self._min_bytes or None) if hide else 0)
        self._min_bytes, self.scroll = before, 0

    def switch(self) -> None:
        """Give the arrows to the leases, or back to the processes."""
        self.on_leases = not self.on_leases


_COMMANDS: dict[str, Callable[[ViewState], None]] = {
    "q": ViewState.quit,
    "Q": ViewState.quit,
    "?": ViewState.open_help,
    "h": ViewState.open_help,
    "H": ViewState.open_help,
    "/": ViewState.start_filter,
    "escape": ViewState.clear_filter,
    "r": ViewState.reverse,
    "a": ViewState.toggle_small,
    "e": ViewState.toggle_events,
    "tab": ViewState.switch,
}


def action_text(action: Action) -> str:
    """ "recall 512.00 MiB from 'llama-8b' (pid 40961)"."""
    lease, size = action.lease, format_bytes(action.num_bytes)
    engine = f"{lease.engine!r} (pid {lease.pid})"
    return f"recall {size} from {engine}" if action.kind == RECALL else f"limit {engine} to {size}"


def _key(lease: LeaseUse) -> LeaseKey:
    return lease.device_uuid, lease.pid, lease.engine


def _moved(key: str, place: int, page: int, last: int) -> int:
    """`place` after a move, between 0 and `last`."""
    steps = {"up": -1, "down": 1, "pageup": -page, "pagedown": page, "home": -place, "end": last - place}
    return max(0, min(place + steps[key], last))


def _edited(text: str, key: str) -> str:
    """`text` after a key: a character is added, backspace removes one."""
    if key == "backspace":
        return text[:-1]
    return (text + key)[:MAX_INPUT] if len(key) == 1 and key.isprintable() else text

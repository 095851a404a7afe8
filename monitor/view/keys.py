"""Single key presses from the terminal, without waiting for a line."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# An ESC that nothing follows for so long is the key itself, not the begin of a sequence
ESCAPE_DELAY_S = 0.1

# Input from arrow and function keys, pasted text and the terminal itself: ESC [ ... letter, and ESC O letter (ECMA-48).
_SEQUENCE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|O(.))", re.DOTALL)
_BEGUN = re.compile(r"\x1b(?:\[\[|\[[0-?]*[ -/]*|O)?\Z")
_LINUX_FUNCTION_KEY = re.compile(r"\x1b\[\[.")  # the console's F1 to F5: ESC [ [ letter
_LETTERS = {"A": "up", "B": "down", "H": "home", "F": "end", "Z": "tab"}
_NUMBERS = {"1": "home", "7": "home", "4": "end", "8": "end", "5": "pageup", "6": "pagedown"}
_CONTROLS = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}


class Keys:
    """The keys typed into terminal `fd`. Call `read` when it is readable, else it blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._begun = ""  # the start of an incomplete sequence

    @property
    def escape_pending(self) -> bool:
        """Whether an ESC came last: the key, if nothing follows within `ESCAPE_DELAY_S`; then call `take_escape`."""
        return self._begun == "\x1b"

    def take_escape(self) -> list[str]:
        """The escape key that was pending."""
        pending, self._begun = self.escape_pending, "" if self.escape_pending else self._begun
        return ["escape"] if pending else []

    def read(self) -> list[str] | None:
        """The keys typed since the last call; None at the end of input.

        A printable key is its character. Others are "up", "down", "pageup", "pagedown", "home", "end", "tab", "enter",
        "backspace" and "escape"; those without a name are left out.
        """
        if not (typed := os.read(self.fd, 4096)):
            return None
        text = self._begun + self._decoder.decode(typed)
        begun = _BEGUN.search(text)
        self._begun = begun[0] if begun else ""
        text = text[: len(text) - len(self._begun)]
        keys: list[str] = []
        position = 0
        while position < len(text):
            if function_key := _LINUX_FUNCTION_KEY.match(text, position):
                position = function_key.end()
            elif sequence := _SEQUENCE.match(text, position):
                position = sequence.end()
                keys += _named(sequence)
            else:
                keys += _plain(text[position])
                position += 1
        return keys


def _named(sequence: re.Match[str]) -> list[str]:
    parameters, final, application = sequence.groups()
    if final == "~":
        name = _NUMBERS.get(parameters.split(";")[0])
    else:
        name = _LETTERS.get(application or final) if not (parameters or "").startswith(("<", "?")) else None
    return [] if name is None else [name]


def _plain(character: str) -> list[str]:
    if character == "\x1b":
        return ["escape"]
    if character in _CONTROLS:
        return [_CONTROLS[character]]
    return [character] if character.isprintable() else []


@contextmanager
def keys_of(fd: int) -> Iterator[Keys | None]:
    """Reads the keys of `fd` unbuffered and without echo; restores the terminal at the end. None if `fd` is no terminal.

    Ctrl-C and Ctrl-Z remain signals.
    """
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield None
        return
    if not os.isatty(fd):
        yield None
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)

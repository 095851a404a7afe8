"""Single key presses from the terminal, without waiting for a line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Input from arrow and function keys, pasted text and the terminal itself: ESC [ ... letter, and ESC O letter (ECMA-48).
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)", re.DOTALL)
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")


class Keys:
    """The keys typed into terminal `fd`. Call `read` when it is readable, else it blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._begun = b""  # the start of an incomplete sequence

    def read(self) -> str | None:
        """The characters typed since the last call, without escape sequences of special keys; None at the end of input."""
        if not (typed := os.read(self.fd, 4096)):
            return None
        typed = _SEQUENCE.sub(b"", self._begun + typed)
        begun = _BEGUN.search(typed)
        self._begun = begun[0] if begun else b""
        return typed[: len(typed) - len(self._begun)].replace(b"\x1b", b"").decode(errors="ignore")


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

"""Single keys from the terminal that a program is typed into, as they are pressed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# What arrow and function keys, pasted text and the terminal itself send: ESC [ ... letter, and ESC O letter (ECMA-48).
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)", re.DOTALL)
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")


class Keys:
    """The keys typed into terminal `fd`. `read` after it was found readable, else it waits for one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._begun = b""  # the beginning of a sequence whose end is still to come

    def read(self) -> str | None:
        """The letters and signs typed since the last call, without what arrow keys and their like send; None at the end."""
        if not (typed := os.read(self.fd, 4096)):
            return None
        typed = _SEQUENCE.sub(b"", self._begun + typed)
        begun = _BEGUN.search(typed)
        self._begun = begun[0] if begun else b""
        return typed[: len(typed) - len(self._begun)].replace(b"\x1b", b"").decode(errors="ignore")


@contextmanager
def keys_of(fd: int) -> Iterator[Keys | None]:
    """The keys of `fd`, one by one and not shown; as it was before in the end. None where it is no terminal.

    Ctrl-C and Ctrl-Z go on being signals.
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

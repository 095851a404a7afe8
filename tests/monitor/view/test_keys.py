"""Keys of a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Iterator

import pytest

from pagetide.monitor.view.keys import Keys, keys_of


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(the end that types, the end that a program reads)."""
    typing, reading = pty.openpty()
    yield typing, reading
    os.close(typing)
    os.close(reading)


def typed(terminal: tuple[int, int], keys: Keys, text: bytes) -> list[str] | None:
    os.write(terminal[0], text)
    return keys.read()


def test_keys_come_one_by_one_and_are_not_shown(terminal: tuple[int, int]) -> None:
    with keys_of(terminal[1]) as keys:
        assert keys is not None
        assert typed(terminal, keys, b"q") == ["q"]  # without a line's end
        assert typed(terminal, keys, b"mp\xc3\xa9") == ["m", "p", "é"]
        assert typed(terminal, keys, b"m\xc3") == ["m"]
        assert typed(terminal, keys, b"\xa9\r\t\x7f\x01") == ["é", "enter", "tab", "backspace"]
        flags = termios.tcgetattr(terminal[1])[3]
        assert flags & termios.ISIG
        assert not flags & (termios.ECHO | termios.ICANON)


@pytest.mark.parametrize(
    "sequence",
    [b"\x1b[C", b"\x1b[1;5D", b"\x1b[3~", b"\x1bOq", b"\x1b[I", b"\x1b[200~", b"\x1b[<0;10;5M", b"\x1b[?1;2c"],
)
def test_other_keys_are_no_letters(terminal: tuple[int, int], sequence: bytes) -> None:
    with keys_of(terminal[1]) as keys:
        assert keys is not None
        assert typed(terminal, keys, b"u" + sequence + b"m") == ["u", "m"]
        assert typed(terminal, keys, sequence[:-1]) == []  # the rest comes later, as over a slow line
        assert typed(terminal, keys, sequence[-1:] + b"p") == ["p"]


@pytest.mark.parametrize(
    ("sequence", "name"),
    [
        (b"\x1b[A", "up"), (b"\x1bOA", "up"), (b"\x1b[1;2B", "down"), (b"\x1b[5~", "pageup"), (b"\x1b[6~", "pagedown"),
        (b"\x1b[H", "home"), (b"\x1b[1~", "home"), (b"\x1bOF", "end"), (b"\x1b[8~", "end"), (b"\x1b[Z", "tab"),
    ],
)  # fmt: skip
def test_keys_that_move_have_names_however_they_are_split(
    terminal: tuple[int, int], sequence: bytes, name: str
) -> None:
    with keys_of(terminal[1]) as keys:
        assert keys is not None
        assert typed(terminal, keys, b"j" + sequence + sequence + b"k") == ["j", name, name, "k"]
        for byte in range(len(sequence) - 1):
            assert typed(terminal, keys, sequence[byte : byte + 1]) == []
        assert typed(terminal, keys, sequence[-1:] + b"x") == [name, "x"]


def test_function_keys_of_the_linux_console_are_no_letters(terminal: tuple[int, int]) -> None:
    with keys_of(terminal[1]) as keys:
        assert keys is not None
        assert typed(terminal, keys, b"a\x1b[[Ab") == ["a", "b"]
        assert typed(terminal, keys, b"\x1b[[") == []
        assert typed(terminal, keys, b"Bq") == ["q"]


def test_the_escape_key_keeps_no_other_key_back(terminal: tuple[int, int]) -> None:
    with keys_of(terminal[1]) as keys:
        assert keys is not None
        assert typed(terminal, keys, b"\x1b") == [] and keys.escape_pending
        assert typed(terminal, keys, b"q") == ["escape", "q"]
        assert typed(terminal, keys, b"\x1b") == []
        assert keys.take_escape() == ["escape"] and keys.take_escape() == []


def test_the_terminal_is_as_it_was_before(terminal: tuple[int, int]) -> None:
    before = termios.tcgetattr(terminal[1])
    with keys_of(terminal[1]):
        assert termios.tcgetattr(terminal[1]) != before
    assert termios.tcgetattr(terminal[1]) == before

    def fail() -> None:
        with keys_of(terminal[1]):
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert termios.tcgetattr(terminal[1]) == before


def test_what_is_no_terminal_has_no_keys() -> None:
    reading, writing = os.pipe()
    try:
        with keys_of(reading) as keys:
            assert keys is None
    finally:
        os.close(reading)
        os.close(writing)


def test_the_end_of_the_keys_is_told() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        assert Keys(reading).read() is None
    finally:
        os.close(reading)

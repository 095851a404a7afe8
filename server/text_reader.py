"""A text that arrives in pieces, read by generators: each yields where it needs more text, and gets it by `send`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, "str | None", Result]

MOST_DEPTH = 100  # of lists and objects in each other
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_IDENTIFIER = re.compile(r"\w*")
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*+") for quote in "\"'"}
_PYTHON_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|\n|(.))", re.DOTALL)
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}


class MalformedText(Exception):
    """The text is not in the notation that is read."""


class Literals:
    """A set of fixed texts to look for. Of several at the same place the longest counts."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._beginnings = {text[:size] for text in self.texts for size in range(1, len(text))}
        self._initials = {text[0] for text in self.texts}
        self.longest = max(map(len, self.texts), default=0)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them in `text` from `at` on."""
        return self._pattern.search(text, at)

    def match(self, text: str, at: int) -> re.Match[str] | None:
        """The one that stands at `at`."""
        return self._pattern.match(text, at)

    def is_begun(self, rest: str) -> bool:
        """Whether `rest` may become one of them, or a longer one."""
        return (not rest and bool(self.texts)) or rest in self._beginnings

    def begun(self, text: str, at: int) -> int:
        """Characters at the end of `text`, from `at` on, that may begin one of them."""
        tail = text[max(at, len(text) - self.longest) :]
        if self._initials.isdisjoint(tail):
            return 0
        return next((size for size in range(len(tail), 0, -1) if tail[-size:] in self._beginnings), 0)


class TextReader:
    """The text that has arrived and was not read. Text that was read is dropped, so that the work grows with the text alone.

    Attributes:
        text, at: The text, and the place up to which it was read.
        ended: No more text comes.
        is_cut: The text ends where it is cut off: perhaps amid a fixed text.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended, self.is_cut = "", 0, False, False
        self._record: list[str] | None = None

    def take(self, end: int) -> str:
        """Read up to `end`."""
        taken, self.at = self.text[self.at : end], end
        if self._record is not None:
            self._record.append(taken)
        return taken

    def record(self) -> None:
        """Keep what is read from here on, for `recorded`."""
        self._record = []

    def recorded(self) -> str:
        """What was read since `record`, which ends."""
        record, self._record = self._record or [], None
        return "".join(record)

    @property
    def holds(self) -> bool:
        """Whether there is text of which more decides what it is."""
        return self._record is not None or self.at < len(self.text)

    def put_back(self, taken: str, size: int) -> str:
        """Read the last `size` characters of what was read once more. The rest of it."""
        self.text, self.at = taken[-size:] + self.text[self.at :], 0
        return taken[:-size]

    def more(self) -> Reading[bool]:
        """Wait for more text. False at the end."""
        if self.ended:
            return False
        new = yield
        self.ended = new is None
        self.text, self.at = self.text[self.at :] + (new or ""), 0
        return not self.ended

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def pattern(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest text of characters that `pattern` allows. It matches any text of them, and the empty one."""
        parts = []
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            parts.append(self.take(found.end()))
            if self.at < len(self.text) or not (yield from self.more()):
                return "".join(parts)

    def space(self) -> Reading[str]:
        """The white space that comes next."""
        return (yield from self.pattern(_SPACE))

    def next(self) -> Reading[str]:
        """The next character that is no white space, which is skipped; "" at the end."""
        yield from self.space()
        return (yield from self.peek())

    def sees(self, literals: Literals) -> Reading[str]:
        """The literal that comes next; "" if none does."""
        while literals.is_begun(self.text[self.at : self.at + literals.longest]):
            if not (yield from self.more()):
                break
        found = literals.match(self.text, self.at)
        return "" if found is None else found[0]

    def literal(self, literals: Literals) -> Reading[str]:
        """As `sees`, and read it."""
        found = yield from self.sees(literals)
        return self.take(self.at + len(found))

    def find(self, literals: Literals, give: Callable[[str], object]) -> Reading[str]:
        """Read up to one of the literals. `give` gets the text before it in parts. "" at the end."""
        while True:
            found = literals.search(self.text, self.at)
            hold = len(self.text) - (0 if self.ended else literals.begun(self.text, self.at))
            end = hold if found is None else min(found.start(), hold)
            if end > self.at:
                give(self.take(end))
            if found is not None and found.start() < hold:
                return found[0]
            if self.ended:
                return ""
            if not (yield from self.more()) and found is None:
                self.drop_begun(literals)

    def drop_begun(self, literals: Literals, least: int = 2) -> None:
        """Leave out the beginning of a literal, of `least` characters, that the end of a text cut off."""
        rest = self.text[self.at :]
        if self.is_cut and len(rest) >= least and not rest[0].isalnum() and literals.is_begun(rest):
            self.at = len(self.text)

    def until(self, literals: Literals, give: Callable[[str], object]) -> Reading[str]:
        """As `find`, and read the literal too."""
        found = yield from self.find(literals, give)
        return self.take(self.at + len(found))


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written.

    Attributes:
        quotes: What begins and ends a text.
        words: The names of values.
        escapes: Whether a backslash stands before a quote within a text.
        bare_keys: Whether keys may stand without quotes.
    """

    quotes: Literals
    words: dict[str, Any]
    escapes: Literal["json", "python"] | None
    bare_keys: bool = False


_JSON_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}
JSON = Notation(Literals(['"']), _JSON_WORDS, "json")
PYTHON = Notation(Literals(['"', "'"]), {**_JSON_WORDS, "None": None, "True": True, "False": False}, "python")
GEMMA = Notation(Literals(['<|"|>']), _JSON_WORDS, None, bare_keys=True)
_COLON = Literals([":"])
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


def read_value(reader: TextReader, notation: Notation, keys: Collection[str] | None = None) -> Reading[Any]:
    """A value, up to its last character. In Python's notation it may be the arguments of a call, in parentheses.

    Args:
        keys: Those that an object may have which is the value itself; None: any.

    Raises MalformedText at the first character with which the text is no value, and where the text ends before the value.
    """
    stack: list[tuple[Any, str]] = []  # the containers that are open, and what closes each
    places: list[str] = []  # the keys of the values that come next in those that are objects
    while True:
        mark = yield from reader.next()
        value: Any
        if mark and mark in ("{[(" if notation is PYTHON and not stack else "{["):
            if len(stack) == MOST_DEPTH:
                raise MalformedText
            reader.take(reader.at + 1)
            value, closer = [] if mark == "[" else {}, _CLOSERS[mark]
            stack.append((value, closer))
            if (yield from reader.next()) != closer:
                if mark != "[":
                    places.append((yield from _read_key(reader, notation, closer, value, keys if len(stack) == 1 else None)))
                continue
            reader.take(reader.at + 1)
            stack.pop()
        elif (yield from reader.literal(notation.quotes)):
            value = yield from _read_string(reader, notation, reader.text[reader.at - 1])
        else:
            value = _value_of((yield from reader.pattern(_WORD)), notation)
        while stack:
            container, closer = stack[-1]
            if isinstance(container, dict):
                container[places.pop()] = value
            else:
                container.append(value)
            mark = yield from reader.next()
            if mark not in (closer, ","):
                raise MalformedText
            reader.take(reader.at + 1)
            if mark == closer:
                value, _ = stack.pop()
                continue
            if closer != "]":
                yield from reader.next()
                places.append((yield from _read_key(reader, notation, closer, container, keys if len(stack) == 1 else None)))
            break
        else:
            return value


def _read_key(
    reader: TextReader, notation: Notation, closer: str, container: dict[str, Any], allowed: Collection[str] | None
) -> Reading[str]:
    """A key and what stands behind it. Raises MalformedText for a key that is there already."""
    behind = ":"
    if closer == ")":
        key, behind = (yield from reader.pattern(_IDENTIFIER)), "="
    elif (yield from reader.literal(notation.quotes)):
        key = yield from _read_string(reader, notation, reader.text[reader.at - 1])
    elif notation.bare_keys:
        parts: list[str] = []
        yield from reader.find(_COLON, parts.append)
        key = "".join(parts).strip()
    else:
        raise MalformedText
    if (yield from reader.next()) != behind or key in container or not (key or closer == "}"):
        raise MalformedText
    if allowed is not None and key not in allowed:
        raise MalformedText
    reader.take(reader.at + 1)
    return key


def _read_string(reader: TextReader, notation: Notation, quote: str) -> Reading[str]:
    """The text behind an opening quote, and its closing one."""
    parts: list[str] = []
    if notation.escapes is None:
        if not (yield from reader.until(notation.quotes, parts.append)):
            raise MalformedText
        return "".join(parts)
    while True:
        parts.append((yield from reader.pattern(_IN_STRING[quote])))
        mark = yield from reader.peek()
        if not mark:
            raise MalformedText
        reader.take(reader.at + 1)
        if mark == quote:
            break
        if not (yield from reader.peek()):
            raise MalformedText
        parts.append(mark + reader.take(reader.at + 1))
    raw = "".join(parts)
    if notation.escapes == "python":
        return _PYTHON_ESCAPE.sub(_unescaped, raw) if "\\" in raw else raw
    try:
        text: str = json.loads(f'"{raw}"', strict=False)  # models write line ends as they are
    except ValueError:
        raise MalformedText from None
    return text


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    if code:
        return chr(int(code, 16))
    if found[3] is None:
        return ""
    return _PYTHON_ESCAPES.get(found[3], found[3] if found[3] in "\\'\"" else found[0])


def _value_of(word: str, notation: Notation) -> Any:
    """The value that a word or a number says. Raises MalformedText."""
    if word in notation.words:
        return notation.words[word]
    found = _NUMBER.fullmatch(word)
    try:
        value: int | float | None = None if found is None else float(word) if found[1] or found[2] else int(word)
    except ValueError:  # of too many digits
        value = None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise MalformedText
    return value

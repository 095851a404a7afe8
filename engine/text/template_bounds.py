"""Limits the time and memory of rendering a chat template, by counting the template's operations while it runs.

Jinja's sandbox restricts what a template can access, not how long it loops or how large its values are: `"a" * 10**12`.
The template's syntax tree is therefore changed before compilation (`template_tree.py`): each operation of non-constant
cost becomes a call of a function of this module.

    {% for m in x %}...    turned() at the beginning of each iteration
    a + b, a * b, a ** b   combined("+", a, b)
    value | name(...)      filtered(context, "name", value, ...)
    f(...)                 called(context, f, ...)
    a ~ b, a[1:], [a, b]   joined(a, b), sliced(a, 1), made([a, b])
    {{ x }}, x in y        written(x), weighed(x) in weighed(y)

Each function charges the budget of this thread's rendering: the bytes of new values, and processor time. Where a number or a
product determines a result's size (repetition, width, replacement, power), the size is computed and checked first. Operations
that are not counted have constant cost, so the limits also hold for malicious templates.
"""

from __future__ import annotations

import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, markup_join, str_join
from jinja2.utils import Namespace

MOST_MADE_BYTES = 256 << 20  # of all values that one rendering makes, kept or not
MOST_RENDER_S = 2.0  # processor time of the thread
_STEP_BYTES = 64  # minimum charge of an operation
_LOOK_AT_CLOCK = 16  # operations between readings of the clock, which is a system call
_LOOK_AROUND = 1024  # values between checks while a container is weighed
_MOST_BITS = 1 << 16  # of an integer
_MOST_PRECISION = 1000  # digits to round to
_PIECE_BYTES = 96  # of a short text in a list
_ESCAPED = 10  # most characters that an escaped character becomes
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_SIGNS: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod}
_CONTAINERS = (list, tuple, dict, Namespace)
# Filters with a cost independent of the contents of a container's items.
_SHALLOW = frozenset({
    "length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "default", "d",
    "items", "reverse", "attr", "random",
})  # fmt: skip
_ITEM_BY_ITEM = frozenset({"map", "select", "reject", "selectattr", "rejectattr"})
_SLOW = frozenset({"striptags", "urlize", "wordwrap", "pprint"})  # may take time quadratic in the length of a text
_ESCAPES = frozenset({"e", "escape", "forceescape", "tojson", "urlencode", "xmlattr"})
# Split a text into its characters.
_TAKES_APART = frozenset({"list", "reverse", "sort", "unique", "batch", "slice", "groupby"})
_NOT_HAD = frozenset({"encode", "translate", "maketrans", "to_bytes", "from_bytes"})  # methods
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # an argument as width, or 10,000 and more
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")


class Exceeded(Exception):
    """A rendering exceeds its limits."""


class _Budget:
    """The remaining bytes and time of one rendering. Used by one thread."""

    def __init__(self) -> None:
        self.left_bytes = MOST_MADE_BYTES
        self._deadline = time.thread_time() + MOST_RENDER_S  # processor time: a busy machine does not shorten it
        self._steps = 0

    def spend(self, num_bytes: int = 0) -> None:
        """Charge one operation that has made `num_bytes`. Raises Exceeded."""
        self.left_bytes -= num_bytes + _STEP_BYTES
        self.afford(0)
        self._steps += 1
        if self._steps % _LOOK_AT_CLOCK == 0:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Raises Exceeded after the deadline."""
        if time.thread_time() > self._deadline:
            raise Exceeded(f"it takes more than {MOST_RENDER_S:g} s of processor time")

    def afford(self, num_bytes: int) -> None:
        """Raises Exceeded if `num_bytes` more would exceed the budget. Charges nothing."""
        if num_bytes > self.left_bytes:
            raise Exceeded(f"its values take more than {MOST_MADE_BYTES >> 20} MiB")


class _Local(threading.local):
    budget: _Budget


_local = _Local()


@contextmanager
def bounded() -> Iterator[None]:
    """A context in which this thread may render one template that `count_operations` has changed."""
    _local.budget = _Budget()
    try:
        yield
    finally:
        del _local.budget


# -- calls from changed templates --------------------------------------------------------------------------------------


def turned() -> bool:
    """Count a loop iteration."""
    _local.budget.spend()
    return True


def made(value: Any) -> Any:
    """Charge and return `value`, which the template has made."""
    if isinstance(value, GeneratorType):
        return _counted(value)
    if type(value) is tuple:
        _local.budget.spend(_weight(value))  # all of it: it may become a key, and hashing reads all items
    else:
        _local.budget.spend(sys.getsizeof(value, _STEP_BYTES))
    return value


def weighed(value: Any) -> Any:
    """Check that `value` is small enough to be read entirely, as comparisons do, and return it."""
    if isinstance(value, _CONTAINERS):
        _weight(value)
    _local.budget.spend()
    return value


def written(value: Any) -> Any:
    """Charge and return `value`, which is written to the output."""
    if isinstance(value, str):
        _local.budget.spend(len(value))
    else:
        _local.budget.spend(_weight(value))
    return value


def combined(sign: str, left: Any, right: Any) -> Any:
    """`left sign right`."""
    budget = _local.budget
    if isinstance(left, int) and isinstance(right, int):
        bits, more = left.bit_length(), right.bit_length()
        if (sign == "**" and right > 0 and bits * right > _MOST_BITS) or (sign == "*" and bits + more > _MOST_BITS):
            raise Exceeded(f"it makes a number of more than {_MOST_BITS:,} bits")
    elif sign == "*":
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            budget.afford((sys.getsizeof(sequence) - sys.getsizeof(type(sequence)())) * times)
    elif sign == "%" and isinstance(left, str):
        budget.afford(_format_bytes(left, _WIDE_PERCENT, "%", (right,)))
    elif sign == "+":
        budget.afford(sys.getsizeof(left, 0) + sys.getsizeof(right, 0))
    return made(_SIGNS[sign](left, right))


def joined(context: Context, *values: Any) -> Any:
    """`a ~ b ~ ...`"""
    _local.budget.afford(sum(map(_weight, values)))
    return made((markup_join if context.eval_ctx.autoescape else str_join)(values))


def sliced(context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`"""
    return made(context.environment.getitem(value, slice(start, stop, step)))


def filtered(context: Context, name: str, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`value | name(*args, **kwargs)`"""
    budget = _local.budget
    budget.spend()
    if name == "map" and args:  # with the name of another filter, which is counted too
        return _counted(filtered(context, args[0], item, *args[1:], **kwargs) for item in (value or ()))
    if name not in _SHALLOW:
        value = list(_counted(value)) if isinstance(value, GeneratorType) else value
        budget.afford(_weight(value) + _filter_bytes(name, value, args, kwargs))
    for given in (*args, *kwargs.values()):
        weighed(given)
    if name in _ITEM_BY_ITEM and value:
        value = _counted(value)
    if name in _TAKES_APART and isinstance(value, str):
        budget.spend(_PIECE_BYTES * len(value))
    return made(context.environment.call_filter(name, value, args, kwargs, context=context))


def called(context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`"""
    budget = _local.budget
    budget.spend()
    name = getattr(function, "__name__", None)
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    if isinstance(owner, str | bytes | int | float):
        if name in _NOT_HAD:
            raise SecurityError(f"chat templates have no method {name!r} of {type(owner).__name__}")
        if name == "join" and args:
            args = (list(_counted(args[0])), *args[1:])
        if isinstance(owner, str):
            budget.afford(_method_bytes(name, owner, args, kwargs))
            budget.spend(_PIECE_BYTES * _num_pieces(name, owner, args))
    elif function is DEFAULT_NAMESPACE["lipsum"]:
        raise SecurityError("chat templates have no lipsum()")
    elif name == "strftime_now":
        budget.afford(256 * _most_text(args, kwargs))  # Python allows 256 times the format's length
    return made(context.environment.call(context, function, *args, **kwargs))  # type: ignore[attr-defined]  # a sandbox's


def _counted(items: Any) -> Iterator[Any]:
    """The same items, each counted as an operation."""
    for item in items:
        _local.budget.spend()
        yield item


def _weight(value: Any) -> int:
    """Bytes of a value and of all values in it. Repeated values count each time, since writing, comparing and hashing read them
    each time. Raises Exceeded as soon as the sum exceeds the budget.
    """
    if isinstance(value, str):
        return sys.getsizeof(value)
    budget, total, seen, todo = _local.budget, 0, 0, [value]
    while todo:
        one = todo.pop()
        total += sys.getsizeof(one, _STEP_BYTES)
        seen += 1
        if seen % _LOOK_AROUND == 0:
            budget.afford(total)
            budget.look_at_clock()
        if isinstance(one, Namespace):
            one = object.__getattribute__(one, "_Namespace__attrs")
        if isinstance(one, dict):
            todo.extend(one)
            todo.extend(one.values())
        elif isinstance(one, list | tuple):
            todo.extend(one)
    budget.afford(total)
    return total


# -- sizes of results --------------------------------------------------------------------------------------------------


def _filter_bytes(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Upper bound of a filter's result in bytes, if that can exceed a small multiple of its value's."""
    width, text = _most_number(args, kwargs), _most_text(args, kwargs)
    length = len(value) if isinstance(value, str | list | tuple | dict) else 1
    match name:
        case "format":
            return _format_bytes(str(value), _WIDE_PERCENT, "%", (*args, *kwargs.values()))
        case "replace":
            return _replaced_bytes(str(value), args)
        case "join" | "batch" | "slice" | "center" | "truncate":
            return length * text + width * _STEP_BYTES
        case "indent":
            return (1 + str(value).count("\n")) * (width + text)
        case "tojson" if width or text:
            return _weight(value) * (_ESCAPED + width + text)
        case "round" if width > _MOST_PRECISION:
            raise Exceeded(f"it rounds to more than {_MOST_PRECISION:,} digits")
        case "sum":
            return _weight(value) * length if isinstance(value, list | tuple) and _most_items(args, kwargs) else 0
        case _ if name in _SLOW:
            return ((length if isinstance(value, str) else _weight(value)) + text) ** 2
        case _ if name in _ESCAPES:
            return _ESCAPED * _weight(value)
    return 0


def _method_bytes(name: str | None, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Upper bound of a string method's result in bytes, if that can exceed a small multiple of the string's."""
    match name:
        case "format" | "format_map":
            return _format_bytes(owner, _WIDE_BRACES, "{", (*args, *kwargs.values()))
        case "join":
            return _weight(list(args)) + len(owner) * sum(len(items) for items in args)
        case "replace":
            return _replaced_bytes(owner, args)
        case "expandtabs":
            return (1 + owner.count("\t")) * max(8, _most_number(args, kwargs))
        case "striptags":  # of Markup
            return len(owner) ** 2
    return _most_number(args, kwargs) if name in ("center", "ljust", "rjust", "zfill") else 0


def _num_pieces(name: str | None, owner: str, args: tuple[Any, ...]) -> int:
    """Upper bound of the number of strings that a method splits a string into."""
    if name == "splitlines":
        return sum(map(owner.count, _LINE_ENDS))
    if name in ("split", "rsplit"):
        separator = args[0] if args else None
        return owner.count(separator) if isinstance(separator, str) and separator else len(owner) // 2
    return 0


def _format_bytes(text: str, wide: re.Pattern[str], mark: str, given: tuple[Any, ...]) -> int:
    """Upper bound of a format's bytes, with the largest of `given` in each field."""
    if wide.search(text):
        raise Exceeded("it formats to a width of more than 9,999 characters, or to a computed width")
    return text.count(mark) * (max(map(_weight, given), default=0) + 10_000) if given else 0


def _replaced_bytes(text: str, args: tuple[Any, ...]) -> int:
    old, new = (args[0], args[1]) if len(args) > 1 else ("", "")
    return text.count(old) * len(new) if isinstance(old, str) and isinstance(new, str) else 0


def _most_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return max((abs(v) for v in (*args, *kwargs.values()) if isinstance(v, int)), default=0)


def _most_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return max((len(v) for v in (*args, *kwargs.values()) if isinstance(v, str)), default=0)


def _most_items(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, list | tuple | str) for v in (*args[1:], *kwargs.values()))

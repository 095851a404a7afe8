"""Bounds on what a chat template may take: a Jinja template whose every operation is counted while it runs.

Templates come with models, and what they do follows from messages that come from anywhere. Jinja's sandbox keeps a template out
of Python's insides, but not from looping without end, nor from making `"a" * 10**12`. So the template's syntax tree is changed
before it is compiled: each operation whose cost is not constant goes through a function of this module.

    {% for m in x %}...    turned() at the beginning of each turn
    a + b, a * b, a ** b   combined("+", a, b)     what it would come to is looked at first, here and in the next two
    value | name(...)      filtered(context, "name", value, ...)
    f(...)                 called(context, f, ...)
    a ~ b, a[1:], [a, b]   joined(a, b), sliced(a, 1), made([a, b])
    {{ x }}, x in y        written(x), weighed(x) in weighed(y)

Each of them spends from the budget of the rendering that runs in this thread: the bytes of what it makes, and its time on the
processor. The bounds hold for templates that mean harm too: nothing that is not counted can make more than a constant amount.
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

from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, markup_join, str_join
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_MADE_BYTES = 256 << 20  # of all values that one rendering makes, whether it keeps them or not
MOST_RENDER_S = 2.0  # of this thread on a processor
_STEP_BYTES = 64  # what each operation counts at least
_LOOK_AT_CLOCK = 16  # operations from one look to the next: it is a system call
_LOOK_AROUND = 1024  # values from one look to the next, on the way through a container
_MOST_BITS = 1 << 16  # of an integer
_MOST_PRECISION = 1000  # digits to round to
_PIECE_BYTES = 96  # of a short text in a list
_ESCAPED = 10  # characters, at most, that an escaped one becomes
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod,
}  # fmt: skip
_CONTAINERS = (list, tuple, dict, Namespace)
# Filters that look at a container itself, and not at all within it.
_SHALLOW = frozenset({
    "length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "default", "d",
    "items", "reverse", "attr", "random",
})  # fmt: skip
_ITEM_BY_ITEM = frozenset({"map", "select", "reject", "selectattr", "rejectattr"})
_SLOW = frozenset({"striptags", "urlize", "wordwrap", "pprint"})  # may take the square of a text's length
_ESCAPES = frozenset({"e", "escape", "forceescape", "tojson", "urlencode", "xmlattr"})
_TAKES_APART = frozenset(
    {"list", "reverse", "sort", "unique", "batch", "slice", "groupby"}
)  # a text into its characters
_CHEAP_TESTS = frozenset({
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true", "false",
    "integer", "float", "callable", "sameas", "filter", "test", "odd", "even", "divisibleby",
})  # fmt: skip
_NOT_HAD = frozenset({"encode", "translate", "maketrans", "to_bytes", "from_bytes"})  # methods
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # a width that is an argument, or 10,000 and more
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{5})")


class Exceeded(Exception):
    """A rendering takes more than it may."""


class _Budget:
    """What one rendering may still take. Of one thread."""

    def __init__(self) -> None:
        self.left_bytes = MOST_MADE_BYTES
        self._deadline = time.thread_time() + MOST_RENDER_S  # which a busy machine does not shorten
        self._steps = 0

    def spend(self, num_bytes: int = 0) -> None:
        """Count one operation, and the bytes that it has made."""
        self.left_bytes -= num_bytes + _STEP_BYTES
        self.afford(0)
        self._steps += 1
        if self._steps % _LOOK_AT_CLOCK == 0:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Raises Exceeded where the time is over."""
        if time.thread_time() > self._deadline:
            raise Exceeded(f"it takes more than {MOST_RENDER_S:g} s of computing")

    def afford(self, num_bytes: int) -> None:
        """Raises Exceeded where so many bytes more would be too many."""
        if num_bytes > self.left_bytes:
            raise Exceeded(f"what it makes comes to more than {MOST_MADE_BYTES >> 20} MiB")


class _Local(threading.local):
    budget: _Budget


_local = _Local()


@contextmanager
def bounded() -> Iterator[None]:
    """Within, and in this thread, a template changed by `count_operations` may be rendered, once."""
    _local.budget = _Budget()
    try:
        yield
    finally:
        del _local.budget


# -- what a changed template calls -------------------------------------------------------------------------------------


def turned() -> bool:
    """A turn of a loop begins."""
    _local.budget.spend()
    return True


def made(value: Any) -> Any:
    """`value`, which is new."""
    if isinstance(value, GeneratorType):
        return _counted(value)
    if type(value) is tuple:
        _local.budget.spend(_weight(value))  # it may become a key, whose hash is that of all within
    else:
        _local.budget.spend(sys.getsizeof(value, _STEP_BYTES))
    return value


def weighed(value: Any) -> Any:
    """`value`, all of which is to be looked at."""
    if isinstance(value, _CONTAINERS):
        _weight(value)
    _local.budget.spend()
    return value


def written(value: Any) -> Any:
    """`value`, which is to be written out."""
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
    if name == "map" and args:  # with another filter, which is to be counted too
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
        budget.afford(256 * _most_text(args, kwargs))  # as wide as the C library makes a field
    return made(context.environment.call(context, function, *args, **kwargs))  # type: ignore[attr-defined]  # a sandbox's


def _counted(items: Any) -> Iterator[Any]:
    """The same items, each an operation."""
    for item in items:
        _local.budget.spend()
        yield item


def _weight(value: Any) -> int:
    """Bytes that a value comes to where it is written out, compared or hashed: what it has several times counts each time.

    Raises Exceeded as soon as that is more than is left.
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


# -- how much an operation may add -------------------------------------------------------------------------------------


def _filter_bytes(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that a filter's result may have beyond a few times its value."""
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
    """Bytes that the result of a text's method may have beyond a few times the text."""
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
    """Texts that a method cuts a text into."""
    if name == "splitlines":
        return sum(map(owner.count, _LINE_ENDS))
    if name in ("split", "rsplit"):
        separator = args[0] if args else None
        return owner.count(separator) if isinstance(separator, str) and separator else len(owner) // 2
    return 0


def _format_bytes(text: str, wide: re.Pattern[str], mark: str, given: tuple[Any, ...]) -> int:
    """Of a format with any of the values that are `given` in each of its fields."""
    if wide.search(text):
        raise Exceeded("it formats to a width of more than 9,999 characters, or to one that is computed")
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


# -- the change of the syntax tree -------------------------------------------------------------------------------------


def count_operations(template: nodes.Template) -> nodes.Template:
    """`template`, changed in place so that it spends from the budget of `bounded`, and cannot be rendered without one."""
    changed: nodes.Template = _Counting().visit(template)
    return changed


def _call(
    function: Callable[..., Any], arguments: list[nodes.Expr], like: nodes.Call | nodes.Filter | None = None
) -> nodes.Call:
    name = nodes.ImportedName(f"{__name__}.{function.__name__}")
    if like is None:
        return nodes.Call(name, arguments, [], None, None)
    return nodes.Call(name, [*arguments, *like.args], like.kwargs, like.dyn_args, like.dyn_kwargs)


class _Counting(NodeTransformer):
    """Puts the functions of this module into the place of operations. Inner nodes are changed before outer ones."""

    def __init__(self) -> None:
        self._blocks = 0  # that were captured to be filtered

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_call(turned, [])), *node.body]
        if node.test is not None:
            node.test = nodes.And(_call(turned, []), node.test)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        return _call(called, [nodes.ContextReference(), node.node], node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        assert node.node is not None  # filters of blocks are given theirs below
        return _call(filtered, [nodes.ContextReference(), nodes.Const(node.name), node.node], node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> list[nodes.Node]:
        """`{% filter f %}...{% endfilter %}` is what a variable of this content is, filtered."""
        name = self._captured(node.filter)
        block = nodes.AssignBlock(nodes.Name(name, "store"), None, node.body)
        return [self.visit(block), self.visit(nodes.Output([node.filter]))]

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node | list[nodes.Node]:
        if node.filter is None:
            return self.generic_visit(node)
        name = self._captured(node.filter)
        block = nodes.AssignBlock(nodes.Name(name, "store"), None, node.body)
        return [self.visit(block), self.visit(nodes.Assign(node.target, node.filter))]

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_call(written, [child]) for child in node.nodes]
        return node

    def visit_Add(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _call(combined, [nodes.Const(node.operator), node.left, node.right])

    visit_Mul = visit_Pow = visit_Mod = visit_Add

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(joined, [nodes.ContextReference(), *node.nodes])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            parts = [
                nodes.Const(None) if part is None else part for part in (node.arg.start, node.arg.stop, node.arg.step)
            ]
            return _call(sliced, [nodes.ContextReference(), node.node, *parts])
        if not isinstance(node.arg, nodes.Const):
            node.arg = _call(weighed, [node.arg])
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        if not searches and any(isinstance(side, nodes.Const) for side in sides):
            return self.generic_visit(node)  # no more is compared than stands in the template
        node.expr = self._to_be_looked_at(node.expr)
        for operand in node.ops:
            operand.expr = self._to_be_looked_at(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        if node.name in _CHEAP_TESTS:
            return self.generic_visit(node)
        node.node = self._to_be_looked_at(node.node)
        node.args = [self._to_be_looked_at(argument) for argument in node.args]
        return node

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call(made, [node])

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def _to_be_looked_at(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Const) or _is_list_of_constants(node):
            return node
        return _call(weighed, [self.visit(node)])

    def _captured(self, outer: nodes.Filter) -> str:
        """The name of a variable that the innermost of the filters takes, in the place of the block that it stands at."""
        self._blocks += 1
        name = f"_captured_block_{self._blocks}"
        while isinstance(outer.node, nodes.Filter):
            outer = outer.node
        outer.node = nodes.Name(name, "load")
        return name


def _is_list_of_constants(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)

"""Unknown keyword arguments: an error that says what to write instead, by the table of vLLM's and transformers' names.

The table is `configs/migrating.yaml`, which also makes docs/migrating.md (docs/decisions/0042-names-of-other-libraries.md).
It is read when an unknown name is given.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache, wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from .. import configs
from ..common.yaml_file import read_yaml

TABLE = Path(configs.__file__ or "").with_name("migrating.yaml")

MOST_NAMED = 8  # arguments in an error about others

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S")
A = TypeVar("A")

_parameters: dict[str, frozenset[str]] = {}  # the argument names of each decorated call, such as "LLM.generate"


class UnknownArgument(TypeError, ValueError):
    """A call has no argument of that name.

    A TypeError, as Python raises it, and a ValueError, like pagetide's other errors for bad input.
    """


class Row(NamedTuple):
    """A row of the table: other libraries' names, the calls that they belong to, and what to write instead."""

    names: tuple[str, ...]
    calls: tuple[str, ...]
    kind: str
    answer: str

    def is_of(self, call: str) -> bool:
        """Whether the row is about `call`: it is listed, or its method is."""
        return call in self.calls or call.rpartition(".")[2] in self.calls


@cache
def rows() -> tuple[Row, ...]:
    """The rows of the table that have names."""
    _, tables = read_yaml(TABLE)
    return tuple(
        Row(tuple(row["names"]), tuple(table["for"]), row.get("kind", "error"), _answer(row))
        for table in tables.values()
        for row in table["rows"]
        if "names" in row
    )


def explains_arguments(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an unknown keyword argument, or too many by position, raise UnknownArgument. The signature stays as it is.

    A function with `**` arguments accepts all names except arguments of other calls, and names that the table answers for it or
    for SamplingParams.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        most = sys.maxsize if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
        takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD) - {"self"}
        _parameters[call] = names

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not names.issuperset(kwargs):
                for name in kwargs:
                    if name not in names and not (takes_others and _is_free(call, name)):
                        raise unknown_argument(call, name, names)
            if len(args) > most:
                raise _too_many(call, positional, names)
            return function(*args, **kwargs)

        if inspect.iscoroutinefunction(function) and sys.version_info >= (3, 12):
            return inspect.markcoroutinefunction(checked)
        return checked

    return decorate


def takes(call: str, arguments: Callable[P, A]) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """A decorator of a constructor: it has the parameters of the dataclass `arguments`, and is called with an object of it."""

    def decorate(function: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        def init(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            function(self, arguments(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.Signature([own, *inspect.signature(arguments).parameters.values()])
        init.__signature__ = signature  # type: ignore[attr-defined]  # what inspect and `explains_arguments` read
        return explains_arguments(call)(init)

    return decorate


def explains_names(call: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: a missing attribute of kind `method` in the table raises an AttributeError with its answer."""

    def decorate(cls: type[T]) -> type[T]:
        def missing(self: T, name: str) -> Any:
            if hasattr(cls, name):  # a property that raised AttributeError: its own error
                return object.__getattribute__(self, name)
            found = None if name.startswith("_") else _row(name, call, "method")
            said = f": {found.answer}" if found is not None else ""
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{said}", name=name, obj=self)

        cls.__getattr__ = missing  # type: ignore[attr-defined]  # unknown to type checkers, which report the attribute
        return cls

    return decorate


def unknown_argument(call: str, name: str, known: Collection[str]) -> UnknownArgument:
    """The error for an argument that `call` does not have."""
    said = answer(call, name)
    if said is None:
        near = get_close_matches(name, sorted(known), n=1)
        said = f"did you mean {near[0]!r}?" if near else None
    return UnknownArgument(f"{call} has no argument {name!r}" + (f": {said}" if said else ""))


def answer(call: str, name: str) -> str | None:
    """What to write instead of argument `name` of `call`; None if neither the table nor another call has the name."""
    if (row := _row(name, call, "error")) is not None:
        return row.answer
    owners = [owner for owner, names in _parameters.items() if name in names]
    owner = min(owners, key=lambda one: one.startswith("Async"), default=None)  # LLM's first
    if owner == "SamplingParams":
        return f"it is an argument of SamplingParams: write generate(prompts, SamplingParams({name}=...))"
    if owner is not None:
        return f"it is an argument of {owner}"
    row = _row(name, None, "error")
    return None if row is None else f"as for {row.calls[0]}: {row.answer}"


def table_answer(name: str) -> str | None:
    """What to use instead of a flag or a setting with the name of an argument in the table; None if it has no such name."""
    row = _row(name, None, "error")
    return None if row is None else re.sub(r"^write ([^(]+?)(?= \(|$)", r"use \1 instead", row.answer)


def _too_many(call: str, positional: Collection[str], names: Collection[str]) -> UnknownArgument:
    """The error for more arguments by position than `call` has."""
    given = [name for name in positional if name != "self"]
    others = sorted(set(names).difference(given))
    shown = [f"{name}=" for name in others[:MOST_NAMED]] + ["..."] * (len(others) > MOST_NAMED)
    by_keyword = f"; write the others by keyword: {', '.join(shown)}" if others else ""
    return UnknownArgument(f"{call} takes {', '.join(given[:MOST_NAMED]) or 'nothing'} by position{by_keyword}")


def _is_free(call: str, name: str) -> bool:
    """Whether a name that may be any is not a misplaced argument."""
    taken = any(name in names for names in _parameters.values())
    return not (taken or _row(name, call, "error") or _row(name, "SamplingParams", "error"))


def _row(name: str, call: str | None, kind: str) -> Row | None:
    return next((row for row in rows() if name in row.names and row.kind == kind and (call is None or row.is_of(call))), None)


def _answer(row: dict[str, Any]) -> str:
    """The text of a row for an error: its `answer`, or its cells."""
    here, note = row.get("here"), row.get("note")
    text = row.get("answer") or (note if here is None else f"write {here}{f' ({note})' if note else ''}")
    return str(text).replace("`", "")

"""The parser of both command lines: errors of one line, which name the nearest flag or command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, NoReturn


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, which name the nearest flag or command, or what is known of a flag."""

    _given: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but an unknown flag is an error here, where the flags of this (sub)command are known."""
        self._given = tuple(sys.argv[1:] if args is None else args)
        found, others = super().parse_known_args(self._given, namespace)
        unknown = [text for text in others if text.startswith("-") and text != "-"]
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return found, others

    def error(self, message: str) -> NoReturn:
        """Print the message on one line, and exit with status 2."""
        if refused := re.search(r"invalid choice: '([^']*)' \(", message):
            flags = [text.partition("=")[0] for text in self._given if text.startswith("--") and text != "--"]
            names = list(self._names())
            unknown = [flag for flag in flags if not any(name.startswith(flag) for name in names)]
            # The value of an unknown flag was taken for a command
            message = self._unknown(unknown[0]) if unknown else message + _nearest(refused[1], names)
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def what_is_known(self, flag: str) -> str | None:
        """What to do instead of giving an unknown flag; None: the nearest one is named."""
        return None

    def _unknown(self, flag: str) -> str:
        known = self.what_is_known(flag)
        return f"unknown flag {flag}" + (f": {known}" if known else _nearest(flag, self._names()))

    def _names(self) -> Iterator[str]:
        """All flags and commands, those of the commands included."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices
                for command in action.choices.values():
                    yield from command._names()


def _nearest(name: str, names: Iterable[str]) -> str:
    alike = [known for known in names if known.startswith("-") == name.startswith("-") and len(known) > 2]
    near = get_close_matches(name, alike, 1)
    return f": did you mean {near[0]}?" if near else ""

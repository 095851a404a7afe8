"""The command line's parser: errors for unknown flags name the nearest one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, which name the nearest flag, or what the Python API answers."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but an unknown flag is an error here, where the flags of this (sub)command are known."""
        found, others = super().parse_known_args(args, namespace)
        unknown = [text for text in others if text.startswith("-") and text != "-"]
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return found, others

    def error(self, message: str) -> NoReturn:
        """Print the message on one line, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _unknown(self, flag: str) -> str:
        from difflib import get_close_matches

        known = [name for name in self._option_string_actions if name.startswith("--")]
        said = _as_flags(_answer(flag), known)
        if said is None:
            near = get_close_matches(flag, known, n=1)
            said = f"did you mean {near[0]}?" if near else None
        return f"unknown flag {flag}" + (f": {said}" if said else "")


def _answer(flag: str) -> str | None:
    """What the Python API answers for an argument of this name, by the table of other libraries' names."""
    from .api.arguments import table_answer

    return table_answer(flag.lstrip("-").replace("-", "_"))


def _as_flags(text: str | None, known: Sequence[str]) -> str | None:
    """`text` with the arguments that are flags here written as flags."""
    if text is None:
        return None
    return re.sub(r"[a-z_]+", lambda word: flag if (flag := f"--{word[0].replace('_', '-')}") in known else word[0], text)

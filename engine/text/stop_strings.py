"""Incremental search for stop strings: whether one is complete, and how much text is held back because one may have begun.

The cost per character does not depend on the number of stop strings.

The stop strings form an automaton (Aho and Corasick, "Efficient string matching", 1975). Its states are their prefixes. After
each character the state is the longest prefix that the text ends with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_START = 0  # the empty prefix


class StopPatterns:
    """The automaton of a set of stop strings. Read-only, shared by all continuations of a prompt."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]  # by state: the next state for each character
        self._depth = [0]  # characters of a state's prefix
        self._longest = [0]  # characters of the longest stop string that a state's prefix ends with
        for stop in self.stops:
            state = _START
            for character in stop:
                state = self._next[state].setdefault(character, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._depth.append(0)
                    self._longest.append(0)
            self._longest[state] = len(stop)
        # By state: the state of its longest proper suffix that is a prefix of a stop string.
        self._shorter = [_START] * len(self._next)
        self._link()
        self.initials = frozenset(self._next[_START])

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Amortized constant time."""
        while (found := self._next[state].get(character)) is None:
            if state == _START:
                return _START
            state = self._shorter[state]
        return found

    def complete(self, state: int) -> int:
        """Characters of the longest stop string that ends here; 0 if none does."""
        return self._longest[state]

    def begun(self, state: int) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return self._depth[state]

    def _link(self) -> None:
        """Compute depths, suffix states and matches, shorter prefixes first."""
        todo = deque([_START])
        while todo:
            state = todo.popleft()
            for character, longer in self._next[state].items():
                self._depth[longer] = self._depth[state] + 1
                if state != _START:
                    self._shorter[longer] = self.step(self._shorter[state], character)
                self._longest[longer] = self._longest[longer] or self._longest[self._shorter[longer]]
                todo.append(longer)


class StopStrings:
    """Cuts incremental text before the first stop string.

    The first to be complete counts; of several complete at once, the one that begins first. The text ends at the
    same place for any split into pieces.
    """

    def __init__(self, stops: Sequence[str] | StopPatterns) -> None:
        self._patterns = stops if isinstance(stops, StopPatterns) else StopPatterns(stops)
        self._state = _START
        self._held = ""
        self._hit = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Returns the text that can be shown, and whether a stop string has been found."""
        patterns = self._patterns
        if self._hit or not patterns.stops:
            return ("" if self._hit else text), self._hit
        if self._state == _START and patterns.initials.isdisjoint(text):
            return text, False
        state, text, begin = self._state, self._held + text, len(self._held)
        for place in range(begin, len(text)):
            state = patterns.step(state, text[place])
            if length := patterns.complete(state):
                self._hit, self._held = True, ""
                return text[: place + 1 - length], True
        free = len(text) - patterns.begun(state)
        self._state, self._held = state, text[free:]
        return text[:free], False

    def flush(self) -> str:
        """The text held back as a possible beginning of a stop string. Call it when no text follows."""
        held, self._held = self._held, ""
        return held

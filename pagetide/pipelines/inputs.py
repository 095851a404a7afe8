"""The inputs of a pipeline: a prompt, a list of prompts, or a stream; each prompt a string or a chat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import GeneratorType
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat: messages with at least "role" and "content". Raises ValueError for others."""

    messages: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("a chat has at least one message, got none")
        for message in self.messages:
            if not _is_message(message):
                raise ValueError(f"each message of a chat has a 'role' and a 'content', got {message!r:.80}")


Prompt = str | Conversation


@dataclass(frozen=True, slots=True)
class One:
    """A single prompt; its result is a list of its continuations."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Several:
    """A list of prompts; its result is a list of such lists."""

    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class Streamed:
    """Prompts that are taken when needed and answered one by one; `open` starts again if the source allows it."""

    open: Callable[[], Iterator[Prompt]]
    length: int | None  # None: unknown


def read_inputs(given: Any) -> One | Several | Streamed:
    """Classify the input as transformers' pipelines do; a data set or any other iterable is a stream.

    Raises ValueError for unsupported inputs. Elements of a stream are checked when they are taken.
    """
    if isinstance(given, str) or _is_their_chat(given):
        return One(_prompt(given))
    if isinstance(given, bytes | Mapping):
        raise ValueError(f"a pipeline takes a string, a chat, a list of them, a data set or a generator, got {given!r:.80}")
    if isinstance(given, GeneratorType):
        return _read_generator(given)
    if isinstance(given, list | tuple):
        if given and _is_message(given[0]):
            return One(Conversation(given))
        return Several([_prompt(element) for element in given])
    if _is_column(given) and len(given) and _is_chat(given[0]):
        return Several([_prompt(element) for element in _elements(given)])
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise ValueError(
            f"a pipeline takes a string, a chat, a list of them, a data set or a generator, got {type(given).__name__}"
        )
    return Streamed(lambda: map(_prompt, _elements(given)), len(given) if isinstance(given, Sized) else None)


def _read_generator(given: Any) -> One | Several | Streamed:
    """Look at the first element to tell a generated chat (messages) from a stream of prompts."""
    try:
        first = next(given)
    except StopIteration:
        return Several([])
    rest = itertools.chain([first], given)
    if _is_message(first):
        return One(Conversation(list(rest)))
    return Streamed(lambda: map(_prompt, rest), None)


def _elements(given: Any) -> Iterator[Any]:
    """The elements of a data set, by index if it has a length: not all data sets end with an IndexError."""
    if isinstance(given, Sized) and hasattr(given, "__getitem__"):
        return (given[i] for i in range(len(given)))
    return iter(given)


def _prompt(given: Any) -> Prompt:
    if isinstance(given, str | Conversation):
        return given
    if _is_their_chat(given):
        return Conversation(given.messages)
    if _is_chat(given):
        return Conversation(given)
    if isinstance(given, list | tuple) and not given:
        raise ValueError("the prompt is empty: leave it out of the batch, or give '' to start with the BOS token")
    column = "; for a column of a data set give transformers' KeyDataset(dataset, column)"
    raise ValueError(
        f"a prompt is a string or a chat, which is a list of messages with 'role' and 'content', got {given!r:.80}"
        + (column if isinstance(given, Mapping) else "")
    )


def _is_chat(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and _is_message(given[0])


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and "role" in given and "content" in given


def _is_their_chat(given: Any) -> bool:
    """Whether it is transformers' Chat."""
    return type(given).__name__ == "Chat" and hasattr(given, "messages")


def _is_column(given: Any) -> bool:
    """Whether it is transformers' KeyDataset; transformers' pipelines answer its chats all at once."""
    return type(given).__name__ == "KeyDataset" and hasattr(given, "key")

"""Conversations as text, by a tokenizer's chat template: rendered by transformers, within bounds that hold for any template."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ..scheduler.errors import RequestRejected
from .template_bounds import Exceeded, bounded, count_operations

MOST_TEMPLATE_CHARACTERS = 256 << 10
LONGEST_MESSAGE = 400  # characters of what a template says against a conversation, which may be all of it

# Parameters of `apply_chat_template` that say what the template is given. All others say what is done, and by which template.
_SEEN = ("tools", "documents", "add_generation_prompt", "continue_final_message")
# Names by which the conversation itself is handed on.
_CONVERSATION = ("messages", "conversation", "conversations")

_compiling = threading.Lock()


def options_from_data(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` of a request, which come from anyone: what its template may see, such as `enable_thinking`.

    Raises RequestRejected for a parameter of the tokenizer's `apply_chat_template` that is for the program to set: it would
    bring a template of the request's own, or have something else done than rendering.
    """
    named = inspect.signature(tokenizer.apply_chat_template).parameters if tokenizer is not None else {}
    for name in options:
        if name in _CONVERSATION or (name in named and name not in _SEEN):
            raise RequestRejected(
                f"chat_template_kwargs cannot set {name!r:.80}: a request may give {', '.join(_SEEN)}, and what its model's "
                "own chat template asks for by name"
            )
    return dict(options)


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """A conversation as text, with `options` of `apply_chat_template`, all of them: they come from the program.

    Raises:
        RequestRejected: as `within_bounds`, and for messages that the template refuses.
    """
    with within_bounds(tokenizer, {"add_generation_prompt": True, **options}) as settings:
        try:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **settings)
        except Exceeded:
            raise
        except Exception as error:  # jinja's errors, and what templates raise on purpose
            raise RequestRejected(f"the chat template refuses these messages: {_shortened(error)}") from error
    return text


@contextmanager
def within_bounds(tokenizer: Any, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Options with which the tokenizer's `apply_chat_template` may be called once, within: what is rendered makes no more than
    MOST_MADE_BYTES, in no more than MOST_RENDER_S seconds of computing.

    Raises:
        RequestRejected: no template, one that cannot be read, or a rendering beyond these bounds.
    """
    settings = dict(options)
    if _is_transformers(tokenizer):  # others render without Jinja, in code of a library
        try:
            source = tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools"))
        except ValueError as error:
            raise RequestRejected(f"there is no chat template to use: {error}") from error
        if not isinstance(source, str):
            raise RequestRejected(f"a chat template is a text, got {source!r:.80}")
        settings["chat_template"] = _counting(source)
    try:
        with bounded():
            yield settings
    except Exceeded as error:
        raise RequestRejected(
            f"the chat template cannot be rendered with these messages: {error}; send shorter or fewer ones"
        ) from error


def _is_transformers(tokenizer: Any) -> bool:
    """Whether the tokenizer renders as transformers' own do."""
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return own is PreTrainedTokenizerBase.apply_chat_template


@lru_cache(maxsize=32)
def _counting(source: str) -> Any:
    """A template that counts its operations: a syntax tree, which Jinja compiles in the place of its source.

    Raises RequestRejected for what is no template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(source) > MOST_TEMPLATE_CHARACTERS:
        raise RequestRejected(
            f"the chat template has {len(source):,} characters, and may have {MOST_TEMPLATE_CHARACTERS:,} at most"
        )
    try:
        with _compiling:
            environment = _compile_jinja_template("").environment  # as transformers makes it for any template
            tree = count_operations(_tree(environment, source))
            _compile_jinja_template(tree)
    except Exception as error:
        raise RequestRejected(f"the chat template cannot be used: {_shortened(error)}") from error
    return tree


def _tree(environment: Any, source: str) -> Any:
    """The syntax tree of `source`, which has the source's words too: transformers looks for names of fields in them."""
    from jinja2 import nodes

    # Jinja refuses classes of nodes that its compiler would not know. This one is a Template in name and in all it does.
    kind: Any = type.__new__(
        type(nodes.Template), "Template", (nodes.Template,), {"__contains__": lambda self, words: words in source}
    )
    parsed = environment.parse(source)
    tree = kind(parsed.body, lineno=1)
    return tree.set_environment(environment)


def _shortened(error: Exception) -> str:
    text = f"{error}" or type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} ..."

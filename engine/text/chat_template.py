"""Renders conversations with a tokenizer's chat template, by transformers, with limits on time and memory."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ...scheduler.request import RequestRejected
from .template_bounds import Exceeded, bounded
from .template_tree import count_operations

MOST_TEMPLATE_CHARACTERS = 256 << 10
LONGEST_MESSAGE = 400  # characters of a template's error, which may contain the conversation

# Parameters of `apply_chat_template` that are input of the template. The others select the template or the result type.
_SEEN = ("tools", "documents", "add_generation_prompt", "continue_final_message")
NESTED = "chat_template_kwargs"  # vLLM's argument that holds more options
# Names under which transformers passes the conversation.
_CONVERSATION = ("messages", "conversation", "conversations")

_compiling = threading.Lock()


def options_from_data(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The `chat_template_kwargs` of an untrusted request, as options for `rendered`: template variables such as
    `enable_thinking`, and tools, documents, add_generation_prompt and continue_final_message.

    Raises RequestRejected for any other parameter of the tokenizer's `apply_chat_template`, such as `chat_template`.
    """
    named = inspect.signature(tokenizer.apply_chat_template).parameters if tokenizer is not None else {}
    for name in options:
        if name in (*_CONVERSATION, NESTED, "self") or (name in named and name not in _SEEN):
            raise RequestRejected(
                f"chat_template_kwargs cannot set {name!r:.80}: a request may give {', '.join(_SEEN)}, and what its model's "
                "own chat template asks for by name"
            )
    return dict(options)


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """A conversation as text. `options` are any of `apply_chat_template`, from a trusted caller.

    transformers leaves out keys with None. For a template that tests the content of a message for None, missing values are None
    where the content of a message is.

    Raises:
        RequestRejected: as `within_bounds`, and for messages that the template refuses.
    """
    missing_is_none = any(message.get("content", "") is None for message in messages)
    with within_bounds(tokenizer, {"add_generation_prompt": True, **options}, missing_is_none) as settings:
        try:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **settings)
        except Exceeded:
            raise
        except Exception as error:  # jinja's errors, and those raised by templates
            raise RequestRejected(f"the chat template refuses these messages: {_shortened(error)}") from error
    return text


@contextmanager
def within_bounds(tokenizer: Any, options: Mapping[str, Any], missing_is_none: bool = False) -> Iterator[dict[str, Any]]:
    """A context for one call of the tokenizer's `apply_chat_template`. Yields the options to pass instead.

    With `missing_is_none` the template's test for None is true of undefined values too. The rendering creates values of at
    most MOST_MADE_BYTES, in at most MOST_RENDER_S seconds of processor time.

    Raises:
        RequestRejected: there is no template, it cannot be parsed, or its rendering exceeds these limits.
    """
    settings = dict(options)
    if (source := template_source(tokenizer, settings)) is not None:
        settings["chat_template"] = _counting(source, missing_is_none)
    try:
        with bounded():
            yield settings
    except Exceeded as error:
        raise RequestRejected(
            f"the chat template cannot be rendered with these messages: {error}; send shorter or fewer ones"
        ) from error


def template_source(tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """The template that renders a conversation: that of the options, or of several named ones "tool_use" with tools, and
    "default" without.

    None for a tokenizer that renders without Jinja, such as mistral-common's. Raises RequestRejected if there is no template.
    """
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    if own is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    try:
        source = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except ValueError as error:
        raise RequestRejected(f"there is no chat template to use: {error}") from error
    if not isinstance(source, str):
        raise RequestRejected(f"a chat template is a text, got {source!r:.80}")
    return source


def tool_template(tokenizer: Any) -> str | None:
    """The source of the template for conversations with tools; None without one."""
    named = getattr(tokenizer, "chat_template", None)
    return named.get("tool_use", named.get("default")) if isinstance(named, Mapping) else named


@lru_cache(maxsize=32)
def _counting(source: str, missing_is_none: bool) -> Any:
    """The syntax tree of a template, modified to count its operations, and as `within_bounds` says. Jinja accepts it in place
    of the source.

    Raises RequestRejected if `source` is not a valid template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(source) > MOST_TEMPLATE_CHARACTERS:
        raise RequestRejected(
            f"the chat template has {len(source):,} characters, and may have {MOST_TEMPLATE_CHARACTERS:,} at most"
        )
    try:
        with _compiling:
            environment = _compile_jinja_template("").environment  # the same for all templates
            tree = count_operations(_tree(environment, source, missing_is_none))
            _compile_jinja_template(tree)
    except Exception as error:
        raise RequestRejected(f"the chat template cannot be used: {_shortened(error)}") from error
    return tree


def _tree(environment: Any, source: str, missing_is_none: bool) -> Any:
    """The syntax tree of `source`, as an object that answers `name in tree`: transformers searches the source for fields."""
    from jinja2 import nodes

    # Jinja forbids new node classes, which its compiler would not know. This one has a Template's name and behaviour.
    kind: Any = type.__new__(
        type(nodes.Template), "Template", (nodes.Template,), {"__contains__": lambda self, words: words in source}
    )
    parsed = environment.parse(source)
    for test in parsed.find_all(nodes.Test) if missing_is_none else ():
        if test.name == "none":
            test.node = nodes.Filter(test.node, "default", [nodes.Const(None)], [], None, None)
    tree = kind(parsed.body, lineno=1)
    return tree.set_environment(environment)


def _shortened(error: Exception) -> str:
    text = f"{error}" or type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} ..."

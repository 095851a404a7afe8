"""Turns the messages of any API into what chat templates read: one text as content, and tool calls in the template's form.

For the choices see docs/decisions/0057-messages-of-any-api.md.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...scheduler.request import RequestRejected
from .chat_template import rendered, template_source
from .detokenizer import special_tokens

log = logging.getLogger(__name__)

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # by type, the key
_PROBE = "20406080"  # digits, which filters such as `upper` leave as they are


def template_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The messages as the tokenizer's chat template expects them. Keys that are not named here stay as they are; transformers
    gives the reasoning of a message all names that templates read.

    - `content`: parts of text are joined with line ends, as vLLM and llama.cpp do; None and no content become "". A template
      that shows a role's text only as parts gets parts, and one that shows calls only beside no content gets none.
    - `role`: "developer" becomes "system", unless the template knows it.
    - Arguments of tool calls: an object, or a JSON text for a template that cannot take an object. Text that is not JSON object
      stays as it is.

    Raises RequestRejected for messages without a role, and for content that is no text.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestRejected(f"a conversation is a list of {{'role': ..., 'content': ...}}, got {messages!r:.80}")
    source = template_source(tokenizer, options)
    reference = weakref.ref(tokenizer) if source is not None else None
    found = [_message(message, reference, source or "") for message in messages]
    for message, given in zip(found, messages, strict=True):
        if isinstance(calls := message.get("tool_calls"), list) and calls:
            as_text, without_content = (False, False) if reference is None else _form_of_calls(reference, source or "")
            message["tool_calls"] = [_call(call, as_text) for call in calls]
            if without_content and not any(_texts(given.get("content"))):
                message["content"] = None
    return found


def _message(message: Mapping[str, Any], tokenizer: weakref.ref[Any] | None, source: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestRejected(f"a message must have a role, got {message!r:.80}")
    if role == "developer" and role not in source:
        role = "system"
    texts = _texts(message.get("content"))
    in_parts = tokenizer is not None and _reads_parts(tokenizer, source, role)
    return {**message, "role": role, "content": _parts(*(texts or [""])) if in_parts else "\n".join(texts)}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _texts(content: Any) -> list[str]:
    """The texts in the content of a message. Raises RequestRejected for anything else."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, Sequence):
        raise RequestRejected(f"the content of a message is a text or a list of parts, got {content!r:.80}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            what = f"content of type {kind!r:.80}" if isinstance(kind, str) else f"the part {part!r:.80}"
            raise RequestRejected(f"{what} is not supported: only text is")
        texts.append(text)
    return texts


def _call(call: Any, as_text: bool) -> Any:
    """A tool call with its arguments as an object, or as a text. The function may be the call itself, as in transformers."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], as_text)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and not as_text:
        return {**call, "arguments": _object(arguments)}
    if isinstance(arguments, Mapping) and as_text:
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "arguments": "{}" if as_text else {}} if arguments is None else dict(call)


def _object(arguments: str) -> Any:
    """The object that a JSON text says; other texts as they are."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def turn_end(tokenizer: Any) -> int | None:
    """The special token that ends an assistant's turn in the tokenizer's chat template; None without one.

    Some templates write it only before another message, where a token that begins messages must not be taken for it.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    user, system = {"role": "user", "content": _PROBE}, {"role": "system", "content": "a"}
    for after in ([], [{"role": "user", "content": "a"}]):
        for before in ([], [system]):
            messages = [*before, user, {**user, "role": "assistant"}, *after]
            try:
                text = rendered(tokenizer, template_messages(tokenizer, messages, {}), {"add_generation_prompt": False})
            except (RequestRejected, TypeError):  # TypeError: a tokenizer with another `apply_chat_template`
                continue
            special = special_tokens(tokenizer)
            opening, *shown = text.split(_PROBE)
            behind = shown[-1].lstrip() if len(shown) > 1 else ""
            token = next((token for token in special if behind.startswith(token)), None)
            if token is not None and not (after and _opens(token, opening, special)):
                return special[token]
    return None


def _opens(token: str, opening: str, special: Mapping[str, int]) -> bool:
    """Whether a token begins a conversation, or is the last special token before the text of its first message."""
    before, found, head = opening.rpartition(token)
    return bool(found) and (not before.strip() or not any(other in head for other in special))


@lru_cache(maxsize=128)
def _reads_parts(tokenizer: weakref.ref[Any], source: str, role: str) -> bool:
    """Whether a template shows the content of a role's message only as a list of parts."""

    def shows(as_parts: bool) -> bool:
        text, marked = (_parts("a"), _parts(_PROBE)) if as_parts else ("a", _PROBE)
        user, message = {"role": "user", "content": text}, {"role": role, "content": marked}
        call = {"role": "assistant", "content": text, "tool_calls": [_probed_call({})]}
        before = {"user": [], "system": [], "tool": [user, call]}.get(role, [user])
        messages = [*before, message, *([user] if role == "system" else [])]
        return _PROBE in _shown(tokenizer, source, messages, {"role": "system", "content": text})

    return not shows(as_parts=False) and shows(as_parts=True)


@lru_cache(maxsize=32)
def _form_of_calls(tokenizer: weakref.ref[Any], source: str) -> tuple[bool, bool]:
    """Whether a template renders the arguments of a call from a JSON text, and not from an object, and whether it shows
    calls only beside a content that is None or missing. A warning says that it shows none.

    Templates of texts add the text to another, which fails with an object, or print it: as Python would write the object.
    """
    system, user, assistant, tool = (
        _message({"role": role, "content": content}, tokenizer, source)
        for role, content in (("system", "a"), ("user", "a"), ("assistant", ""), ("tool", "b"))
    )
    tool |= {"tool_call_id": "probe0000", "name": "probe"}
    for content in (assistant["content"], None):
        as_object, as_text = (
            _shown(
                tokenizer,
                source,
                [user, {**assistant, "content": content, "tool_calls": [_probed_call(arguments)]}, tool],
                system,
            )
            for arguments in ({_PROBE: 1}, json.dumps({_PROBE: 1}))
        )
        if _PROBE in as_object or _PROBE in as_text:
            printed = _PROBE not in as_object or f"'{_PROBE}'" in as_object
            return f'"{_PROBE}"' in as_text and printed, content is None
    log.warning("the model's chat template shows no tool calls: prompts leave out earlier calls of their conversation")
    return False, False


def _probed_call(arguments: Any) -> dict[str, Any]:
    return {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": arguments}}


def _shown(tokenizer: weakref.ref[Any], source: str, messages: list[dict[str, Any]], system: Mapping[str, Any]) -> str:
    """The rendered messages, behind a system message if the template demands one; "" if it refuses them."""
    for before in ([], [system]):
        try:
            return rendered(tokenizer(), [*before, *messages], {"chat_template": source})
        except RequestRejected:
            continue
    return ""

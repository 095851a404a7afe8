"""Chat templates: rendered as transformers renders them, within bounds, and with no more of a request's own than it may set."""

from __future__ import annotations

import copy
import inspect
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from async_rig import run_threads
from transformers import AutoTokenizer

import pagetide
from pagetide.engine.text import template_bounds
from pagetide.engine.text.chat_template import options_from_data, rendered
from pagetide.engine.text.encoder import Encoder
from pagetide.scheduler.request import PromptTooLong, RequestRejected

TOKENIZER = AutoTokenizer.from_pretrained(Path(pagetide.__file__).resolve().parents[1] / "engine" / "demo_model")
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hi <b>there</b>\n\n好 é"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>easy</think> 2", "reasoning": "easy", "tool_calls": None},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "It is"},
    ],
    [{"role": "tool", "content": [{"type": "text", "text": one} for one in ("a", "b")], "n": [1, 2.5, True, {}]}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}}}]
# What chat templates are made of, and what else Jinja has: a name and a template each.
_BLOCKS = """
chatml:
{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + (m.content | string | trim) + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
---
loops:
{% for m in messages if m.role != 'system' %}
{{ loop.index0 }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.previtem.role if not loop.first }}
{{ loop.cycle('a', 'b') }}{% if loop.index > 3 %}{% break %}{% endif %}{% else %}none{% endfor %}
{% for a, b in {'x': 1, 'y': 2}.items() %}{{ a }}{{ b }}{% endfor %}
---
namespace:
{% set ns = namespace(found=false, text='', all=[]) %}
{% for m in messages %}{% set ns.text = ns.text ~ m.role ~ 1 %}{% set ns.all = ns.all + [m.role] %}
{% if m.role == 'user' and not ns.found %}{% set ns.found = true %}{% endif %}{% endfor %}
{{ ns.text }}{{ ns.all }}{{ ns.found }}{{ ns }}
---
slices:
{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ messages[-1]['content'][:3] }}{{ messages[0].nope }}
{% set i = 0 %}{{ messages[i].role }}{{ messages[0][('ro' ~ 'le')] }}
---
filters:
{{ messages | map(attribute='role') | unique | sort | join(', ') }}{{ messages | map('tojson') | list | length }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}
{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | count }}{{ 'a-b' | replace('-', '+') | indent(2) }}
{{ [3, 1, 2] | sort | last }}{{ [[1], [2]] | sum(start=[]) }}{{ 3.14159 | round(2) }}{{ 'x' | center(5) }}
{{ none | default('d') }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 2, 3] | batch(2) | list }}{{ '12' | int + 1 }}
{{ '%s=%d' | format('a', 3) }}{{ '<a>' | e }}{{ 'a b' | title }}{{ range(5) | select('odd') | list }}
{{ messages | groupby('role') | map('first') | list }}
---
tojson:
{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':')) if tools }}
---
strings:
{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ 'abc'.replace('b', 'd') }}{{ '-'.join(['a', 'b']) }}
{{ '{} {b:>4}'.format(1, b=2) }}{{ '%s %05.1f' % ('a', 2) }}{{ 'ab' * 3 }}{{ 'a'.rjust(3) }}
{{ 'x\\ny'.splitlines() }}{{ 'a' in 'abc' }}{{ 'user' in messages[0] }}{{ messages[0].role.startswith('u') }}
{{ 'a\\tb'.expandtabs(4) }}
---
numbers:
{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 1 + 2 * 3 }}{{ -3 - 1 }}{{ 1 / 4 }}{{ (1, 2) + (3,) }}{{ 5 > 3 }}{{ 1 < 2 < 3 }}
---
macros:
{% macro line(role, text='', n=1) %}[{{ role }}:{{ text }}{{ caller() if caller }}{{ varargs }}{{ kwargs }}]
{% endmacro %}{% for m in messages %}{{ line(m.role, n=2) }}{{ line('a', 'b', 3, 4, x=5) }}{% endfor %}
{% call line('q') %}in{{ 1 + 1 }}{% endcall %}
---
recursive:
{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}
---
blocks:
{% filter upper | replace('A', 'b') %}a{{ 'c' }}{% filter trim %} d {% endfilter %}{% endfilter %}
{% set x | upper %} e{% endset %}{{ x }}{% set y %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ y * 2 }}
{% with z = 5 %}{{ z }}{% endwith %}{% block b %}{{ 'in' ~ 'side' }}{% endblock %}{{ self.b() }}
{% raw %}{{ x }}{% endraw %}{# a comment #}
---
tests:
{{ messages is defined }}{{ messages is iterable }}{{ 1 is in [1, 2] }}{{ 'a' is eq 'b' }}{{ none is none }}
{{ messages is sameas messages }}{{ 4 is divisibleby 2 }}{{ 'A' is upper }}{{ 'x' if false else 'y' }}{{ 'x' if false }}
---
generation:
{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}
{% autoescape true %}{{ '<' ~ '>' }}{% endautoescape %}
---
raises:
{% if messages | length > 1 %}{{ raise_exception('only one of ' ~ messages[0].role) }}{% endif %}{{ messages[0].role }}
---
breaks:
{{ messages.append(1) }}
---
dunder:
{{ ''.__class__ }}
---
unknown filter:
{# content #}{{ 1 | nope }}
---
divides:
{{ 1 / 0 }}
---
tokens:
{{ bos_token }}{{ eos_token }}{{ polite }}{{ tools | length if tools }}{{ documents }}
"""
TEMPLATES = dict(block.strip("\n").split(":\n", 1) for block in _BLOCKS.split("---\n"))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False, "polite": "Sir"},
    {"tools": TOOLS, "documents": [{"title": "t", "text": "x"}], "bos_token": "B"},
    {"continue_final_message": True, "add_generation_prompt": False},
]


def _plainly(chat: list[dict[str, Any]], template: str, options: dict[str, Any]) -> str:
    settings = {"add_generation_prompt": True, **options}
    text: str = TOKENIZER.apply_chat_template(chat, tokenize=False, chat_template=template, **settings)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_is_what_transformers_renders(name: str) -> None:
    for chat in CHATS:
        for options in OPTIONS:
            given = {"chat_template": TEMPLATES[name], **options}
            try:
                expected = _plainly(chat, TEMPLATES[name], options)
            except Exception as error:  # what messages are refused is the template's to say, here as there
                with pytest.raises(RequestRejected, match=re.escape(str(error)[:20])):
                    rendered(TOKENIZER, chat, given)
            else:
                assert rendered(TOKENIZER, chat, given) == expected


def test_what_jinja_says_of_a_template_is_told() -> None:
    unusable = "the chat template cannot be used: .*"
    for template, said in (
        ("{% for %}", unusable + "Expected"),
        ("{{ 'a' ", unusable + "unexpected end"),
        ("{% nope %}", unusable + "unknown tag 'nope'"),
        ("x" * 300_000, "the chat template has 300,000 characters, and may have 262,144 at most"),
        (5, "a chat template is a text, got 5"),
        ("{{ raise_exception('no' * 100000) }}", "nonono"),
    ):
        with pytest.raises(RequestRejected, match=said) as refused:
            rendered(TOKENIZER, CHATS[0], {"chat_template": template})
        assert len(str(refused.value)) < 500, "a long complaint is cut"
    bare = copy.deepcopy(TOKENIZER)
    bare.chat_template = None
    with pytest.raises(RequestRejected, match="there is no chat template to use"):
        rendered(bare, CHATS[0], {})


NESTED = """{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}
{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"""
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
OF_MESSAGE = "{% for i in range(messages[0].content | int) %}"
ENDLESS = [
    LOOP * 3 + "x" + END * 3,
    LOOP + "{% for j in range(100000) if false %}{% endfor %}" + END,
    OF_MESSAGE * 3 + END * 3,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    LOOP + "{{ range(100000) | select('eq', -1) | list }}" + END,
    LOOP + "{% set x = range(100000) | map('string') | list %}" + END,
    LOOP + "{% set x = (range(99999) | list) == (range(99999) | list) %}" + END,
    "{% for x in range(1000) recursive %}{{ loop(range(x)) }}{% endfor %}",
    "{{ range(100000) | map('string') | map('trim') | select('in', 'x') | list }}" * 20,
    *(NESTED + "{{ " + use + " }}" for use in (
        "ns.x", "ns.x | tojson", "ns.x ~ ''", "ns.x == ns.y", "ns.x in [ns.y]", "ns.x is eq ns.y", "'%s' % ns.x",
        "'{}'.format(ns.x)", "[ns.x] | join", "ns",
    )),
    TUPLES + "{{ {ns.x: 1} }}",
    TUPLES + "{{ {}[ns.x] }}",
]  # fmt: skip


def test_what_would_not_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MOST_RENDER_S", 0.01)
    chat = [{"role": "user", "content": "100000"}]
    for template in ENDLESS:
        with pytest.raises(RequestRejected, match=r"cannot be rendered with these messages: (it takes|its values)"):
            rendered(TOKENIZER, chat, {"chat_template": template})


# BIG is a text of 100,000 characters.
LARGE = (
    r"""
'a' * 10**9
10**9 * 'a'
[1] * 10**9
('a' * 10**6) * 10**6
(10**30)**300000
7 ** (7 ** 9)
(2**60000) * (2**60000)
'a' | center(10**9)
'a'.center(10**9)
'a'.ljust(10**9)
'a'.rjust(10**9)
'5'.zfill(10**9)
'\t'.expandtabs(10**9)
'%1000000000d' % 1
'%*d' % (10**9, 1)
'%.1000000000f' % 1
'{:>1000000000}'.format(1)
'{:{}}'.format(1, 10**9)
'%1000000000d' | format(1)
'{a:1000000000}'.format_map({'a': 1})
BIG.replace('a', BIG)
BIG | replace('a', BIG)
BIG.replace('', BIG)
BIG | join(BIG)
BIG.join(BIG)
BIG.join([1, 2] * 50000 | map('string'))
('\n' * 100000) | indent(100000)
('\n' * 100000) | indent(BIG)
messages | tojson(indent=10**9)
[1] | batch(10**9, 'a') | list
[1] | slice(10**9) | list
1.5 | round(10**9, 'floor')
['a'] | map('center', 10**9) | list
['a'] * 1000 | map('replace', 'a', BIG) | list
('%s' * 100000) % (('a' * 1000,) * 100000)
('{0}' * 100000).format(BIG)
('<!--' * 100000) | striptags
BIG | urlize
BIG | wordwrap(1, wrapstring=BIG)
strftime_now('%Y' * 10**6)
range(100000) | list + range(100000) | list * 1000
[[[1] * 1000] * 1000] * 1000 | sum(start=[])
(BIG ~ BIG) * 100
[BIG] * 1000 | join
(BIG + ' ') * 100 | list
('a ' * 10**6).split()
lipsum(n=10**9)
(5).to_bytes(10**9)
'a'.encode('utf-16')
'a'.translate({97: 'b' * 10**6})
""".replace("BIG", "('a' * 100000)")
    .strip()
    .split("\n")
)


def test_what_would_be_large_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is there much more memory in use than the bound."""
    bound = 1 << 20
    monkeypatch.setattr(template_bounds, "MOST_MADE_BYTES", bound)
    rendered(TOKENIZER, CHATS[0], {"chat_template": "warm"})
    for expression in LARGE:
        tracemalloc.start()
        try:
            with pytest.raises(RequestRejected, match=r"the chat template (cannot be rendered|refuses)"):
                rendered(TOKENIZER, CHATS[0], {"chat_template": "{{ " + expression + " }}"})
            assert tracemalloc.get_traced_memory()[1] < 8 * bound, expression
        finally:
            tracemalloc.stop()


def test_what_grows_by_doubling_does_not_grow_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MOST_MADE_BYTES", 1 << 20)
    begin, end = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ", " %}{% endfor %}"
    for operation in (
        "ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "'%s%s' % (ns.x, ns.x)", "[ns.x, ns.x] | join",
        "ns.x | replace('a', 'aa')",
    ):  # fmt: skip
        with pytest.raises(RequestRejected, match="its values take more than"):
            rendered(TOKENIZER, CHATS[0], {"chat_template": begin + operation + end})


def test_a_rendering_of_its_own_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it and those of other threads count nothing."""
    monkeypatch.setattr(template_bounds, "MOST_MADE_BYTES", 1 << 18)
    template = "{% for i in range(500) %}{{ i }},{% endfor %}"
    expected, found = _plainly(CHATS[0], template, {}), []

    def render() -> None:
        found.extend(rendered(TOKENIZER, CHATS[0], {"chat_template": template}) for _ in range(10))

    run_threads(render, render, render)
    assert found == [expected] * 30
    assert _plainly(CHATS[0], template, {}) == expected  # and transformers' own is as it was


def test_a_conversation_that_is_too_long_is_refused_as_a_prompt_is() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER.name_or_path, chat_template=TEMPLATES["chatml"])
    encoder = Encoder(tokenizer, len(tokenizer), None, 128)
    too_long = r"the prompt has 1,0\d\d,\d{3} characters; with a context of 128 tokens it may have"
    with pytest.raises(PromptTooLong, match=too_long):
        encoder.render([{"role": "user", "content": "tide " * 200_000}], {})
    expected = tokenizer.encode("<|user|>\ntide<|end|><|assistant|>", add_special_tokens=False)
    assert encoder.render([{"role": "user", "content": "tide"}], {}) == expected


def test_a_request_may_give_what_its_template_sees_and_cannot_set_what_is_done() -> None:
    """A parameter that a later transformers adds is refused until it is listed as input of templates."""
    seen = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
    theirs = inspect.signature(TOKENIZER.apply_chat_template).parameters.values()
    names = {parameter.name for parameter in theirs if parameter.kind is not parameter.VAR_KEYWORD}
    assert {"chat_template", "tokenize", "conversation"} | seen <= names
    names |= {"messages", "conversations", "self", "chat_template_kwargs", "sanitize_control_tokens", "return_tensors"}
    for name in names - seen:
        refused = f"chat_template_kwargs cannot set '{name}': a request may give tools, documents"
        with pytest.raises(RequestRejected, match=refused):
            options_from_data(TOKENIZER, {"polite": True, name: "x"})
    options = {"tools": TOOLS, "documents": [], "add_generation_prompt": False, "continue_final_message": True}
    options |= {"enable_thinking": False, "bos_token": "x"}
    assert options_from_data(TOKENIZER, options) == options
    assert options_from_data(None, {"polite": 1}) == {"polite": 1}, "without a tokenizer it is refused when rendered"

"""Chat templates that fail in odd ways, or ask for the memory and time of the machine.

Each gives one error, of the request or of the model, and soon.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from photon_ext.errors import ModelError, RequestError
from photon_ext.models.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
GROWN = "{% set ns = namespace(a=START, b=START) %}{% for i in range(100) %}STEP{% endfor %}"
TWICE = "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"


def grown(start: str, step: str, end: str) -> str:
    return GROWN.replace("START", start).replace("STEP", step) + end


def rendered(template: str, messages: Any = MESSAGES) -> str:
    return ChatTemplate(template, {}, "some/file").render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}" + "literal text " * 1000 + "{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% for i in range(100000) %}{% set x = (range(100000) | list)[1:] %}{% endfor %}",
        "{% for i in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
        "{% for i in range(100000) %}{{ -1 in range(100000) | list }}{% endfor %}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 99 }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n > 0 }}{% endmacro %}{{ f(99) }}",
        "{% filter upper %}{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endfilter %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ 'a'.encode().zfill(10 ** 10) }}",
        "{{ ('x' * 100000).replace('', 'y' * 100000) | length }}",
        "{{ ('x' * 100000) | replace('', 'y' * 100000) | length }}",
        "{{ ('x' * 100000).join(range(100000) | map('string')) | length }}",
        "{{ range(100000) | join('x' * 100000) | length }}",
        "{{ ('a\\n' * 100000) | indent('x' * 100000) | length }}",
        "{{ ('{0}' * 100000).format('x' * 100000) | length }}",
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
        "{{ range(100000) | map('replace', '', 'x' * 1000) | list | length }}",
        grown("'x'", "{% set ns.a = ns.a ~ ns.a %}", "{{ ns.a | length }}"),
        grown("'x'", "{% set ns.a = ns.a + ns.a %}", "{{ ns.a | length }}"),
        grown(
            "'x'",
            "{% set t %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = t %}",
            "{{ ns.a | length }}",
        ),
        grown("['x']", TWICE, "{{ ns.a }}"),
        grown("['x']", TWICE, "{{ ns.a | string | length }}"),
        grown("['x']", TWICE, "{{ ns.a | tojson }}"),
        grown("['x']", TWICE, "{{ raise_exception(ns.a) }}"),
        grown("['x']", TWICE, "{{ ns.a == ns.b }}"),
        grown("['x']", TWICE, "{{ ns.a is eq(ns.b) }}"),
        grown("('x',)", "{% set ns.a = (ns.a, ns.a) %}", "{{ {ns.a: 1} }}"),
        grown("('x',)", "{% set ns.a = (ns.a, ns.a) %}", "{{ messages[0][ns.a] }}"),
    ],
)
def test_a_template_without_end_is_stopped(template: str) -> None:
    start = time.process_time()
    with pytest.raises(RequestError) as raised:
        rendered(template)
    assert str(raised.value).startswith(
        "some/file: the chat template asks for too much on 1 messages (more than "
    )
    assert str(raised.value).endswith(
        "; repair it, or send a string and raw=True instead of messages"
    )
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ '%1000000000d' % 1 }}", "a width of 1000000000, expected up to 1000"),
        ("{{ '%.1000000000f' % 1 }}", "a width of 1000000000, expected up to 1000"),
        ("{{ '%*d' % (1000000000, 1) }}", "a width that % takes from an argument"),
        ("{{ '%(a(b))1000000000d' % {'a(b)': 1} }}", "with nested parentheses"),
        ("{{ '%1000000000d' | format(1) }}", "a width of 1000000000"),
        ("{{ ['%1000000000d'] | map('format', 1) | list }}", "a width of 1000000000"),
        ("{{ '{:1000000000}'.format(1) }}", "a width of 1000000000"),
        ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", "a width of 1000000000"),
        (
            "{{ '{:{w}}'.format(1, w=1000000000) }}",
            "a width that str.format takes from an argument",
        ),
        ("{{ 'a' | center(1000000000) }}", "center by 1e+09, expected up to 1000"),
        ("{{ 'a' | indent(1000000000) }}", "indent by 1e+09"),
        ("{{ 'a' | indent(width=1000000000) }}", "indent by 1e+09"),
        ("{{ [1] | batch(1000000000, 0) | list }}", "batch by 1e+09"),
        ("{{ [1] | slice(1000000000) | list }}", "slice by 1e+09"),
        ("{{ 2.5 | round(1000000000, 'ceil') }}", "round by 1e+09"),
        (
            "{{ [1] | tojson(indent=1000000000) }}",
            "tojson with 1000000000 blanks, expected up to 32",
        ),
        ("{{ [1] | tojson(separators=('x' * 1000, ':')) }}", "tojson with 1000 blanks"),
        ("{{ 3 ** 1000000000 }}", "a power of more than 4096 bits"),
        (grown("3", "{% set ns.a = ns.a * ns.a %}", ""), "bits, expected up to 4096"),
        ("{{ namespace(a=1) }}", "a namespace stands where a text or a number should"),
    ],
)
def test_widths_and_numbers_have_a_bound(template: str, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        rendered(template)
    assert "some/file: the chat template asks for too much on 1 messages (" in str(raised.value)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "template",
    [
        "{{ lipsum(n=100000) }}",
        "{{ 'a'.translate({97: 'x' * 1000}) }}",
        "{{ ('\\t' * 1000).expandtabs(1000000) }}",
        "{{ (5).to_bytes(1000000000) }}",
        "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
        "{% include 'x' %}",
    ],
)
def test_what_no_chat_template_needs_is_not_there(template: str) -> None:
    with pytest.raises(RequestError, match="some/file: the chat template fails"):
        rendered(template)


@pytest.mark.parametrize("name", ["urlize", "xmlattr", "wordwrap", "pprint", "filesizeformat"])
def test_filters_for_web_pages_are_missing_by_name(name: str) -> None:
    with pytest.raises(
        ModelError,
        match=rf"some/file: the chat template does not compile \(No filter named '{name}'",
    ):
        rendered("{{ 'a' | " + name + " }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for i in [1] %}{% continue %}{% endfor %}{% break %}",
            "SyntaxError: 'break' outside loop",
        ),
        (
            "{% if 1 %}" * 200 + "{% endif %}" * 200,
            "IndentationError: too many levels of indentation",
        ),
        ("{{ " + "(" * 100_000 + " }}", "RecursionError"),
        ("{{ " + "x" * 100_000 + " | " + "y" * 100_000 + " }}", "No filter named 'yyy"),
        ("{{ '%1000000000d' | format(1) | length", "unexpected end of template"),
        ("{{ 1 " + "+ 1 " * 5000 + " }}", "RecursionError"),
    ],
    ids=["syntax", "indentation", "recursion", "long", "end", "sum"],
)
def test_what_python_says_at_load_is_an_error_of_the_model(template: str, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        ChatTemplate(template, {}, "some/file")
    assert str(raised.value).startswith(f"some/file: the chat template does not compile ({message}")
    assert str(raised.value).endswith("); remove it or use plain prompts")
    assert len(str(raised.value)) < 500


class Hostile:
    """A value in a message whose use raises."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __str__(self) -> str:
        raise self._error("x" * 100_000)


@pytest.mark.parametrize(
    "error", [RuntimeError, AssertionError, MemoryError, NotImplementedError, OSError]
)
def test_whatever_a_render_raises_is_an_error_of_the_request(error: type[Exception]) -> None:
    with pytest.raises(
        RequestError, match=rf"refuses these 1 messages \({error.__name__}: xxx"
    ) as raised:
        rendered("{{ messages[0].content }}", [{"role": "user", "content": Hostile(error)}])
    assert len(str(raised.value)) < 500


def test_a_conversation_within_itself_is_refused() -> None:
    content: list[Any] = []
    content.append(content)
    with pytest.raises(RequestError, match="asks for too much on 1 messages"):
        rendered("{{ messages[0].content }}", [{"role": "user", "content": content}])


WORKING = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem }}{{ loop.nextitem }}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content[:2] }}{% else %}none{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.role }}{{ loop(m.more) if m.more }}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}"
    "{{ ns.l | length }}",
    "{{ messages | map(attribute='content') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ 'a-b'.split('-') }}{{ '%s: %5.2f|%%|%-4s|' % ('x', 2.5, 'y') }}",
    "{{ '{0:>5}{a}'.format('b', a=1) }}{{ 'x%s' | format('y') }}{{ ' a ' | trim }}",
    "{{ 'abc' | replace('b', 'x') }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 'aa'.replace('a', 'b') }}",
    "{{ [3, 1] | sort }}{{ 2.567 | round(1) }}{{ [1, 2, 3] | batch(2) | list }}",
    "{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent('> ', first=true) }}{{ 'a' | center(5) }}",
    "{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}{{ [[1], [2]] | sum(start=[]) }}",
    "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}"
    "{% call f(3) %}inner{% endcall %}",
    "{{ 'é🙂' ~ 1 ~ none }}{{ (1, 2) == (1, 2) }}{{ 'a' in ['a'] }}{{ {'a': 1}['a'] }}",
    "{{ [1, 2][-1] }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 3 * 'ab' }}{{ -1 * [1] }}",
    "{% set t %}x{{ messages | length }}{% endset %}{{ t | upper }}",
    "{% filter lower %}ABC{% endfilter %}{{ cycler(1, 2).next() }}{{ undefined_name }}",
]


@pytest.mark.parametrize("template", WORKING)
def test_templates_within_their_bounds_give_what_transformers_gives(template: str) -> None:
    messages = [
        {"role": "user", "content": "Why?", "more": [{"role": "inner"}]},
        {"role": "assistant", "content": "Because."},
    ]
    expected = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True
    )[0]
    assert [rendered(template, messages)] == expected


@pytest.mark.parametrize(("count", "length"), [(10_000, 2), (1000, 1000), (2, 1_000_000)])
def test_long_conversations_are_within_the_bounds(count: int, length: int) -> None:
    """A template of usual size looks at each message in several ways, and at their list too."""
    body = "{% if m.role == 'system' %}" + "instructions " * 100 + "{% endif %}"
    body += "{% set c = m.content.strip().split('</think>')[-1] | trim %}"
    body += "{% if loop.index0 == messages | length - 1 %}!{% endif %}"
    body += "{% if messages[loop.index0 - 1].role == m.role %}?{% endif %}"
    body += "{{ '<|' + m.role + '|>' ~ c }}{{ m | tojson }}"
    template = "{% for m in messages[::-1] %}{% if 'x' in m.content %}{% endif %}{% endfor %}"
    template += "{% for m in messages %}" + body + "{% endfor %}"
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "a" * length} for i in range(count)
    ]
    assert rendered(template, messages).count("<|user|>") == count // 2

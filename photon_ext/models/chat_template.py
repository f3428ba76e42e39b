"""ChatTemplate: turns messages into the prompt text a model was tuned on, by the Jinja template
that ships with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from photon_ext.errors import ModelError, RequestError, describe

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}

# what any template should take
_PLAIN: tuple[Message, ...] = ({"role": "user", "content": "text"},)
# by what a template does
_RAISED = (
    TemplateError,
    TypeError,
    LookupError,
    ValueError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class _Refusal(TemplateError):
    """The template itself says that it does not take these messages."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """With the options that transformers gives it; jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationTag(Extension):
    """{% generation %} ...

    {% endgeneration %} marks an answer for training; for a prompt it is only what stands in it.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's name, which is typed so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _environment() -> ImmutableSandboxedEnvironment:
    """The names and whitespace rules that published templates are written for; templates are
    data, hence the sandbox.
    """
    extensions = ("jinja2.ext.loopcontrols", _GenerationTag)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], source: str) -> None:
        """`special_tokens`: for example {"bos_token": "<s>"}.

        Raises ModelError, naming `source`, for a broken template.
        """
        self._special_tokens = dict(special_tokens)
        self._source = source
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise ModelError(
                f"{source}: the chat template does not compile ({error}); remove it or use plain "
                "prompts"
            ) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text.

        Raises:
            RequestError: there are no messages, the template refuses them (an unknown role, ...) or
                fails on them, or it fails on any.
        """
        if not messages:
            raise RequestError(
                "a conversation has no messages; expected at least one, such as {'role': 'user', "
                "'content': 'text'}"
            )
        try:
            return self._render(messages, add_generation_prompt)
        except _RAISED as error:
            told = str(error) if isinstance(error, TemplateError) else describe(error)
            if not isinstance(error, _Refusal) and self._broken():
                raise RequestError(
                    f"{self._source}: the chat template fails ({told}), on a plain user message "
                    "too; "
                    f"repair it, or send a string and raw=True instead of messages"
                ) from error
            raise RequestError(
                f"the chat template refuses these {len(messages)} messages ({told}); "
                f"expected a list such as [{{'role': 'user', 'content': 'text'}}]"
            ) from error

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Tools and documents are there as None, as transformers gives them: templates ask
        whether they are none.
        """
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )

    def _broken(self) -> bool:
        """Whether the fault is the template's, as far as one can tell: it fails on the plainest
        messages.
        """
        try:
            self._render(_PLAIN, True)
        except _Refusal:
            return False
        except _RAISED:
            return True
        return False

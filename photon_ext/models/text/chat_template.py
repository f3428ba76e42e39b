"""ChatTemplate: turns messages into the prompt text of a model, by the template it ships with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from photon_ext.errors import ModelError, RequestError, describe, shortened, shown
from photon_ext.models.text.template_bounds import BoundedEnvironment, TemplateLimit

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}

_PLAIN: tuple[Message, ...] = (
    {"role": "user", "content": "text"},
)  # what any template should take
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Refusal(TemplateError):
    """The template itself says that it does not take these messages."""


def _raise_exception(message: object = None) -> NoReturn:
    raise _Refusal(message if isinstance(message, str) else shown(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks an answer for training.

    For a prompt it is only what stands in it.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's name, which is typed so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _environment() -> BoundedEnvironment:
    """The names and whitespace rules that published templates are written for."""
    extensions = ("jinja2.ext.loopcontrols", _GenerationTag)
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name.

    Attributes:
        source: its file, for errors.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str], source: str) -> None:
        """`special_tokens`: for example {"bos_token": "<s>"}.

        Raises ModelError, naming `source`, for a broken template.
        """
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._environment = _environment()
            self._template = self._environment.compile_bounded(template)
            tree = self._environment.parse(template)
            self._names = {node.name for node in tree.find_all(nodes.Name)}
            constants = [node.value for node in tree.find_all(nodes.Const)]
            self._constants = [each for each in constants if isinstance(each, str)]
            self._texts = [node.data for node in tree.find_all(nodes.TemplateData)]
            self._read = meta.find_undeclared_variables(tree) - {*self._environment.globals}
        except Exception as error:  # of Jinja, or of Python on the code that Jinja writes
            raise ModelError(
                f"{source}: the chat template does not compile ({_told(error)}); "
                "remove it or use plain prompts"
            ) from error

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable of this name."""
        return name in self._names

    def names(self, text: str) -> bool:
        """Whether a constant of the template is this text: the name of a role that it knows."""
        return text in self._constants

    def mentions(self, text: str) -> bool:
        """Whether this stands in the template's own text or in one of its constants."""
        return any(text in each for each in (*self._constants, *self._texts))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> str:
        """The prompt text. `kwargs`: other variables that the template reads, by name.

        Raises:
            RequestError: there are no messages, the template refuses them (an unknown role, ...) or
                fails on them, or it fails on any; there are tools, or one of `kwargs`, and it knows
                of none.
        """
        self._check_kwargs(kwargs)
        if tools and "tools" not in self._names:
            raise RequestError(
                f"{self.source}: the chat template knows no tools, and {len(tools)} are given; "
                "leave them out, tell the model of them in a system message, and ask for the form "
                "of a call by json_schema"
            )
        if not messages:
            raise RequestError(
                "a conversation has no messages; expected at least one, such as "
                "{'role': 'user', 'content': 'text'}"
            )
        try:
            return self._render(messages, add_generation_prompt, tools, kwargs)
        except TemplateLimit as error:
            raise RequestError(
                f"{self.source}: the chat template asks for too much on {len(messages)} messages "
                f"({error}); repair it, or send a string and raw=True instead of messages"
            ) from error
        except Exception as error:  # whatever its own code raises, or the values in the messages
            told = _told(error)
            if not isinstance(error, _Refusal) and self._broken():
                raise RequestError(
                    f"{self.source}: the chat template fails ({told}), on a plain user message "
                    "too; repair it, or send a string and raw=True instead of messages"
                ) from error
            raise RequestError(
                f"the chat template refuses these {len(messages)} messages ({told}); "
                f"expected a list such as [{{'role': 'user', 'content': 'text'}}]"
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> str:
        """Tools, without any, and documents are there as None, as transformers gives them.

        Templates ask whether they are none.
        """
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": messages,
            "tools": [*tools] or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._environment.render_bounded(
            self._template, variables, len(messages) + len(tools)
        )

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError where the template does not read one of them, or it is not for the
        caller to set.
        """
        own = {*self._special_tokens, "messages", "tools", "add_generation_prompt"}
        for name in kwargs:
            if name in own or name not in self._names:
                known = ", ".join(sorted(self._read - own)) or "none"
                raise RequestError(
                    f"{self.source}: chat_template_kwargs has {shown(name)}, which the chat "
                    f"template does not take from there; it takes {known}"
                )

    def _broken(self) -> bool:
        """Whether the fault is the template's: as far as one can tell, by the plainest messages."""
        try:
            self._render(_PLAIN, True)
        except _Refusal:
            return False
        except Exception:
            return True
        return False


def _told(error: Exception) -> str:
    return shortened(str(error)) if isinstance(error, TemplateError) else describe(error)

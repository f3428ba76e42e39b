"""ChatTemplate: turns messages into the prompt text a model was tuned on, by the Jinja template that ships with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from photon_ext.errors import ModelError, RequestError

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja's own filter escapes HTML


def _environment() -> ImmutableSandboxedEnvironment:
    """The names and whitespace rules that published templates are written for; templates are data, hence the sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], source: str) -> None:
        """`special_tokens`: for example {"bos_token": "<s>"}. Raises ModelError, naming `source`, for a broken template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise ModelError(f"{source}: the chat template does not compile ({error}); remove it or use plain prompts") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises RequestError where the template refuses the messages (an unknown role, ...)."""
        if not messages:
            raise RequestError("a conversation has no messages; expected at least one, such as {'role': 'user', 'content': 'text'}")
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens)
        except (TemplateError, TypeError, KeyError) as error:
            raise RequestError(
                f"the chat template refuses these {len(messages)} messages ({error}); "
                f"expected a list such as [{{'role': 'user', 'content': 'text'}}]"
            ) from error

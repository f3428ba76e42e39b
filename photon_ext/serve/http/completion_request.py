"""CompletionRequest: the body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from photon_ext.layout import MOST_LOGPROBS
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import NotTaken
from photon_ext.serve.http.form_fields import FormFields
from photon_ext.serve.http.sampling_fields import SamplingFields

MOST_PROMPTS = 4096
_CAP = 16  # OpenAI's


def _prompts(value: Any) -> list[Any]:
    """A list of prompts, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if type(value[0]) is int and all(type(each) is int for each in value):
            return [value]
        _check_number(value)
        if all(isinstance(each, str) for each in value):
            return value
        if all(isinstance(each, list) and each and _are_ids(each) for each in value):
            return value
    raise PydanticCustomError(
        "not_taken", "give a text, a list of token ids, or a list of texts or of such lists"
    )


def _check_number(prompts: list[Any]) -> None:
    """Raises PydanticCustomError: there are more than one request may have."""
    if len(prompts) > MOST_PROMPTS:
        told = {"given": len(prompts), "most": MOST_PROMPTS}
        raise PydanticCustomError(
            "value_error", "prompt has {given} prompts; give at most {most}", told
        )


def _are_ids(value: list[Any]) -> bool:
    return all(type(each) is int for each in value)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_PROMPTS}
_LISTS = {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MOST_PROMPTS}
_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, _LISTS]}


class CompletionRequest(SamplingFields, FormFields):
    """OpenAI's fields, and those of this engine."""

    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_SCHEMA)]
    logprobs: Annotated[
        int | None, BeforeValidator(lambda value: None if value is False else value)
    ] = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False
    add_special_tokens: bool | None = True
    best_of: int | None = Field(default=None, description="The same as n, or absent.")
    suffix: Annotated[Any, NotTaken("")] = None

    @property
    def cap(self) -> int:
        return _CAP if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        """Raises ApiError."""
        self.check_stream()
        if self.best_of not in (None, self.answers):
            raise bad_request(
                f"best_of is {self.best_of} and n {self.answers}; this server shows all answers "
                "that it makes: leave best_of out",
                "best_of",
            )
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise bad_request(
                "echo shows the prompt's logprobs, and prompt_logprobs are given; leave one out",
                "prompt_logprobs",
            )

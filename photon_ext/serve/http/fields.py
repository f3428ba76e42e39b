"""What bodies of requests are made of: each field is honoured, or refused by name."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from photon_ext.errors import shown
from photon_ext.row_params import FIELDS

Item = TypeVar("Item")
MOST_ITEMS = 2**14
# A list that is checked up to its first fault: checking ends within a fraction of a second whatever
# a body holds, since no other client of the process is served meanwhile.
Many: TypeAlias = Annotated[list[Item], Field(max_length=MOST_ITEMS, fail_fast=True)]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """Python reads NaN and Infinity, and a number that is too large becomes the latter."""
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, float) and not isfinite(one):
            told = {"number": str(one)}
            raise PydanticCustomError(
                "value_error", "it holds {number}; give finite numbers, as JSON has no others", told
            )
    return value


def branch(kind: str) -> Tag:
    """Of a union that BY_TYPE tells apart. The places of faults name branches, between those of
    fields: this is the name of no field.
    """
    return Tag(f"<{kind}>")


BY_TYPE = Discriminator(
    lambda value: f"<{value.get('type')}>" if isinstance(value, dict) else None,
    custom_error_type="no_type",
    custom_error_message="expected an object with a type",
)
# An object of any form, whose numbers are JSON's.
JsonObject: TypeAlias = Annotated[dict[str, Any], AfterValidator(_finite)]
# What the openai package reads from an answer, keeps beside it, and sends back with it.
SentBack: TypeAlias = Annotated[Any, Field(description="Of no effect: a client's own reading.")]


class Fields(BaseModel):
    """A body, or a part of one. Fields that are not named are refused, and no value is taken for
    another: "1" is no number.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def engine_names(self) -> dict[str, str]:
        """The fields of this request, by the engine's names of them, where these are others: an
        error speaks of what the client has sent.
        """
        return {
            "max_new_tokens": "max_tokens",
            "include_stop": "include_stop_str_in_output",
            "ids": "prompt",
            "lora": "model",
            "adapter": "model",
            "json_schema": "response_format",
        }


class NotTaken:
    """A field that this server does not honour. It may have a value that asks for nothing; any
    other is refused by name. Annotates a field of type Any, which is None then.
    """

    def __init__(self, *neutral: Any, instead: str = "leave it out") -> None:
        self._neutral = neutral
        self._instead = instead

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self._neutral], "description": f"Not supported; {self._instead}."}

    def _checked(self, value: Any) -> None:
        if value is None or any(_same(value, each) for each in self._neutral):
            return
        told = {"value": shown(value), "instead": self._instead}
        raise PydanticCustomError(
            "not_taken", "{value} is not supported by this server; {instead}", told
        )


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def row_field(name: str, least: float | None = None, most: float | None = None) -> Any:
    """An optional field of a row's parameter, with the bounds and words of the one table;
    `least` and `most` where requests may give more.
    """
    _, field = FIELDS[name]
    low = 0 if field.zero else field.least
    return Field(
        default=None,
        ge=low if least is None else least,
        le=field.most if most is None else most,
        description=field.help or field.expected,
    )

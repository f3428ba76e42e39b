"""FormFields: the form that an answer has to have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import Fields

_ANY_OBJECT = {"type": "object"}


class NamedSchema(Fields):
    """
    Attributes:
        strict: answers have the form in any case.
    """

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Fields):
    type: Literal["text"]


class ObjectFormat(Fields):
    type: Literal["json_object"]


class SchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class FormFields(Fields):
    """At most one of them asks for a form."""

    response_format: ResponseFormat | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def form(self) -> dict[str, Any]:
        """Keywords of SamplingParams; {}: any text will do. Raises ApiError."""
        values = {"regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if isinstance(self.response_format, ObjectFormat):
            given["json_schema"] = _ANY_OBJECT
        elif isinstance(self.response_format, SchemaFormat):
            given["json_schema"] = self.response_format.json_schema.schema_
        if len(given) > 1:
            told = " and ".join(given).replace("json_schema", "response_format")
            raise bad_request(f"{told} are given; give one of them", "response_format")
        return given

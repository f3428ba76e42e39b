"""FormFields: the form that an answer has to have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import Fields, JsonObject, Many

_ANY_OBJECT = {"type": "object"}


class NamedSchema(Fields):
    """
    Attributes:
        strict: answers have the form in any case.
    """

    name: str | None = None
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def asked_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: it is any text. Raises ApiError."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise bad_request(
                "response_format has the type 'json_schema' and a json_schema, or neither",
                "response_format.json_schema",
            )
        if self.json_schema is not None:
            return self.json_schema.schema_
        return _ANY_OBJECT if self.type == "json_object" else None


class FormFields(Fields):
    """At most one of them asks for a form."""

    response_format: ResponseFormat | None = None
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None

    def form(self) -> dict[str, Any]:
        """Keywords of SamplingParams; {}: any text will do. Raises ApiError."""
        schema = None if self.response_format is None else self.response_format.asked_schema()
        values = {"json_schema": schema, "regex": self.regex, "choice": self.choice}
        values["grammar"] = self.grammar
        given = {name: value for name, value in values.items() if value is not None}
        if len(given) > 1:
            told = " and ".join(given).replace("json_schema", "response_format")
            raise bad_request(f"{told} are given; give one of them", "response_format")
        return given

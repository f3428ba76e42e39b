"""Messages of a conversation, as requests have them and as chat templates read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from photon_ext.serve.http.fields import Fields, Many, NotTaken, SentBack

_EMPTY: list[Any] = []


class TextPart(Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _text_alone(value: Any) -> Any:
    """Raises PydanticCustomError, with the name of a part that is no text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "not_taken",
            "a part of type '{kind}' is not supported by this server; give parts of type 'text'",
            {"kind": kind[:50]},
        )
    return value


Part = Annotated[TextPart, BeforeValidator(_text_alone)]


def _content(value: Any) -> Any:
    """A text, or parts: only the faults of the one that was given are told."""
    if isinstance(value, (str, list)) or value is None:
        return value
    raise PydanticCustomError("no_content", "give a text, or a list of parts of type 'text'")


class CalledFunction(Fields):
    name: str
    arguments: str = Field(description="JSON")
    parsed_arguments: SentBack = None


class CallMade(Fields):
    """A call of a tool in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def told(self) -> dict[str, Any]:
        """As templates read it: arguments as values, so that none writes their JSON as a text."""
        try:
            arguments: Any = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):  # what a model wrote wrongly; it may see that
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Fields):
    """A turn. Fields that clients copy from an answer have to be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Many[Part] | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_calls: Many[CallMade] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parsed: SentBack = None
    refusal: Annotated[Any, NotTaken()] = None
    audio: Annotated[Any, NotTaken()] = None
    function_call: Annotated[Any, NotTaken()] = None
    annotations: Annotated[Any, NotTaken(_EMPTY), WithJsonSchema({"enum": [None, []]})] = None

    def told(self, developers: bool) -> dict[str, Any]:
        """As a chat template reads it. `developers`: it knows their role; else they are told as the
        system, which they are.
        """
        role = "system" if self.role == "developer" and not developers else self.role
        told: dict[str, Any] = {"role": role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                told[name] = getattr(self, name)
        if self.tool_calls:
            told["tool_calls"] = [call.told() for call in self.tool_calls]
        return told

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

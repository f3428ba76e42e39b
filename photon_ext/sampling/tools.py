"""Functions that an answer may call, in OpenAI's shape, and the calls in an answer's text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from photon_ext.checks import as_tuple
from photon_ext.errors import ConfigError, describe, shown
from photon_ext.sampling.params import SamplingParams
from photon_ext.sampling.schema_parts import schemas_in

_CHOICES = ("auto", "none", "required")
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_TOOL = "{'type': 'function', 'function': {'name': ..., 'parameters': a JSON schema}}"
_BEGIN, _END = re.compile(r"<tool_call>\s*"), re.compile(r"\s*(?:</tool_call>|\Z)")
_MOST_MARKS = 1000  # that are looked at: an error costs a look at all of the text before it
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Tools:
    """The tools of a request, checked.

    Attributes:
        given: as the chat template gets them; empty with tool_choice "none".
        forced: names of functions; the answer has to call one of them. Empty: it may be any text.
    """

    given: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...]

    @classmethod
    def of(cls, tools: object, tool_choice: object) -> Tools | None:
        """What a call asks for; None without tools. See RequestOptions.of.

        Raises ConfigError: a tool is of another shape, or the choice names none of them.
        """
        entries = () if tools is None else as_tuple(tools)
        if entries is None or isinstance(tools, (str, Mapping)):
            raise ConfigError(f"tools is {shown(tools)}; give a list of {_TOOL}")
        names = tuple(map(_checked_name, entries))
        if len(set(names)) < len(names):
            raise ConfigError(f"tools have the names {', '.join(names)}; give each one once")
        forced = _forced(tool_choice, names)
        if not entries:
            return None
        return cls(() if tool_choice == "none" else entries, forced)

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """The parameters with which the answer is a call: the JSON {"name": ..., "arguments":
        {...}} of a forced function, and nothing else; as they are where none is forced.

        Raises ConfigError: they have a constraint already, or a function's parameters are no JSON
        schema.
        """
        if not self.forced:
            return params
        if params.constrained:
            raise ConfigError(
                "tool_choice asks for a call, and the parameters have a constraint as well; give "
                "one of them"
            )
        schema = self.schema()
        try:
            return replace(params, json_schema=schema)
        except ConfigError as error:
            raise ConfigError(
                f"tool_choice asks for a call, and the json_schema of its {len(self.forced)} tools "
                f"is refused: {error}; give fewer tools, or simpler parameters"
            ) from error

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a call of one of the forced functions, of which there is one at
        least. Raises ConfigError: a function's parameters are no JSON schema.
        """
        functions = [tool["function"] for tool in self.given]
        chosen = [function for function in functions if function["name"] in self.forced]
        if len(chosen) == 1:
            return _call_schema(chosen[0], "#")
        return {"anyOf": [_call_schema(one, f"#/anyOf/{i}") for i, one in enumerate(chosen)]}


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer's text.

    Attributes:
        arguments: as Python values.
    """

    name: str
    arguments: dict[str, Any]


def calls_in(text: str) -> tuple[ToolCall, ...]:
    """The calls that stand in an answer: all of it as JSON {"name": ..., "arguments": {...}}
    ("parameters" for some models), or each such JSON behind <tool_call>, up to </tool_call> or the
    text's end. What is none is left out. Texts in a call may hold these marks.
    """
    call, end = _call_at(text, len(text) - len(text.lstrip()))
    if call is not None and not text[end:].strip():
        return (call,)
    return tuple(_tagged(text))


def _tagged(text: str) -> Iterator[ToolCall]:
    begin = _BEGIN.search(text)
    for _ in range(_MOST_MARKS):
        if begin is None:
            return
        call, end = _call_at(text, begin.end())
        if call is not None and _END.match(text, end):
            yield call
        begin = _BEGIN.search(text, end)


def _call_at(text: str, begin: int) -> tuple[ToolCall | None, int]:
    """The call whose JSON begins there, and where it ends; None: it is none."""
    try:
        call, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments), end
        case {"name": str(name), "parameters": dict(arguments)}:
            return ToolCall(name, arguments), end
    return None, begin


def _checked_name(tool: object) -> str:
    match tool:
        case {"type": str("function"), "function": {"name": str(name), **rest}} if name:
            if isinstance(rest.get("parameters"), (Mapping, type(None))):
                return name
    raise ConfigError(f"tools hold {shown(tool)}; give {_TOOL}")


def _forced(choice: object, names: tuple[str, ...]) -> tuple[str, ...]:
    match choice:
        case None | str("auto" | "none"):
            return ()
        case str("required") if names:
            return names
        case {"type": str("function"), "function": {"name": str(name)}} if name in names:
            return (name,)
    raise ConfigError(
        f"tool_choice is {shown(choice)}; give {', '.join(_CHOICES)}, or {{'type': 'function', "
        f"'function': {{'name': ...}}}} with the name of a tool: there are "
        f"{', '.join(names) or 'no tools'}"
    )


def _call_schema(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The JSON schema of a call, which will stand at `place` of its document."""
    name, parameters = function["name"], function.get("parameters")
    given = _NO_ARGUMENTS if parameters is None else parameters
    try:
        arguments = json.loads(json.dumps(given, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the parameters of tool {shown(name)} are no JSON ({describe(error)}); give a JSON "
            "schema"
        ) from error
    kind = arguments.get("type", "object")
    if kind != "object" and (not isinstance(kind, list) or "object" not in kind):
        raise ConfigError(
            f"the parameters of tool {shown(name)} have the type {shown(kind)}; give an object's "
            "JSON schema"
        )
    arguments["type"] = "object"
    _move_references(arguments, f"{place}/properties/arguments")
    properties = {"name": {"const": name}, "arguments": arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _move_references(schema: object, place: str) -> None:
    """References into the schema's own document lead to where it stands now."""
    for part in schemas_in(schema):
        target = part.get("$ref")
        if isinstance(target, str) and (target == "#" or target.startswith("#/")):
            part["$ref"] = place + target[1:]

"""The server's own app, over an engine whose tokens are scripted: what a model that understands
might answer, so that a client's tests mean something. All but the choice of tokens is real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp

from photon_ext.serve import Ask, Client, ServeSettings
from photon_ext.serve.app import make_app as make_real_app
from photon_ext.serve.contract import ModelCard
from tests.serve.http.stub import Script, StubClient
from tests.serve.http.words import ids_of, text_of

_TURNS = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_QUOTED = re.compile(r"'([^']+)'")
_NUMBER = re.compile(r"-?\d+")
TEXT = "Of course: you asked, I answer."


def make_app(client: Client, settings: ServeSettings) -> ASGIApp:
    """For `photon-ext serve --app`."""
    return make_real_app(ScriptedClient(client), settings)


class ScriptedClient(StubClient):
    """Has the card of the engine behind it, and asks it nothing else."""

    def __init__(self, engine: Client) -> None:
        super().__init__(Script(lambda ask, index: ids_of(answer_to(ask))), state="starting")
        self._engine = engine

    async def ready(self) -> ModelCard:
        self.card = await self._engine.ready()
        self.state = "ready"
        return self.card


def answer_to(ask: Ask) -> str:
    """A call where one is forced, JSON where a schema asks for it; a call of the first tool where
    there are tools and the user has spoken last; else text.
    """
    told = _TURNS.findall(text_of([*ask.ids]))
    user = next((text for role, text in reversed(told) if role == "user"), "")
    schema = ask.params.get("json_schema")
    if schema is not None:
        return _json(_Instance(schema, user).value) + "<|im_end|>"
    tools = _tools_of(told)
    if tools and told[-1][0] == "user":
        function = tools[0]["function"]
        arguments = _Instance(function.get("parameters", {}), user).value
        call = _json({"name": function["name"], "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call><|im_end|>"
    return f"{TEXT}<|im_end|>"


def _tools_of(turns: list[tuple[str, str]]) -> list[Any]:
    """As the template writes them: in the first turn, a line each."""
    if not turns or turns[0][0] != "system" or not turns[0][1].startswith('{"type"'):
        return []
    return [json.loads(line) for line in turns[0][1].splitlines()]


class _Instance:
    """A value that a schema allows, with words and numbers of what the user has said.

    Attributes:
        value: it.
    """

    def __init__(self, schema: Mapping[str, Any], said: str) -> None:
        self._root = schema
        self._words = _QUOTED.findall(said)
        number = _NUMBER.search(said)
        self._number = int(number[0]) if number else 1
        self.value = self._of(schema)

    def _of(self, schema: Mapping[str, Any]) -> Any:
        match schema:
            case {"$ref": str(path)}:
                return self._of(self._at(path))
            case {"const": value}:
                return value
            case {"enum": [value, *_]}:
                return value
            case {"anyOf": [first, *_]} | {"allOf": [first, *_]}:
                return self._of(first)
            case {"type": "object", "properties": {**parts}}:
                return {name: self._of(part) for name, part in parts.items()}
            case {"type": "object"}:
                return {word: word for word in self._words}
            case {"type": "array"}:
                return [self._of(schema.get("items", {"type": "string"}))]
            case {"type": "integer" | "number"}:
                return self._number
            case {"type": "boolean"}:
                return True
            case {"type": "null"}:
                return None
        return self._words[0] if self._words else "Röm"

    def _at(self, path: str) -> Mapping[str, Any]:
        found: Any = self._root
        for step in path.removeprefix("#").strip("/").split("/"):
            found = found[int(step) if isinstance(found, list) else step] if step else found
        return found  # type: ignore[no-any-return]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

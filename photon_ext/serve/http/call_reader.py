"""CallReader: a call as JSON, {"name": ..., "arguments": {...}}, read as it comes."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from photon_ext.serve.http.parts import CallArguments, CallBegun, Part

_ARGUMENTS = ("arguments", "parameters")


class Reading(Enum):
    """Where a reader is."""

    GOES_ON = "goes on"
    DONE = "done"
    NO_CALL = "no call"


class CallReader:
    """Reads one object. The call begins once its name is known and its arguments begin; these are
    given out as they come. Where they come before the name, or as a JSON text within JSON, they are
    given out whole.

    Attributes:
        text: what was read so far.
        state: whether the object is complete; "no call" if it is none.
        begun: the call has begun.
    """

    def __init__(self, call: int, call_id: str, name: str | None = None) -> None:
        """`call`: which one of the answer; `name`: of the function, where what is read is the
        object of its arguments alone.
        """
        self.text = ""
        self.state = Reading.GOES_ON
        self.begun = False
        self._call = call
        self._id = call_id
        self._name = name
        self._arguments: str | None = None
        self._depth = self._outermost = 0 if name is None else 1
        self._in_string = self._escaped = False
        self._key: str | None = None if name is None else _ARGUMENTS[0]
        self._value_from: int | None = None if name is None else 0
        self._string_from = 0
        self._live_from: int | None = None  # arguments from here on are to be given out

    def feed(self, text: str) -> tuple[list[Part], int]:
        """The parts that are certain, and how many characters were read: all, or up to the end of
        the object.
        """
        parts: list[Part] = []
        begin = len(self.text)
        self.text += text  # at once: character by character, each would copy all before it
        for place, character in enumerate(text, begin):
            self._step(character, place, parts)
            if self.state is not Reading.GOES_ON:
                self.text = self.text[: place + 1]
                return parts, place + 1 - begin
        self._give(parts, len(self.text))
        return parts, len(text)

    def _step(self, character: str, place: int, parts: list[Part]) -> None:
        """`place`: of the character in `text`."""
        if self._in_string:
            self._step_string(character, place)
        elif character == '"':
            self._in_string, self._string_from = True, place
        elif character in "{[":
            self._begin(character, place, parts)
        elif character in "}]":
            self._end(place, parts)
        elif self._depth == 1 and character == ":" and self._value_from is None:
            self._value_from = place + 1
        elif self._depth == 1 and character == ",":
            self._end_value(place)

    def _step_string(self, character: str, place: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._value_from is None:
                self._key = _loaded(self.text[self._string_from : place + 1])

    def _begin(self, character: str, place: int, parts: list[Part]) -> None:
        self._depth += 1
        is_value = self._depth == 2 and self._key in _ARGUMENTS and self._value_from is not None
        if is_value and self._name is not None and character == "{" and not self.begun:
            self._begin_call(parts)
            self._live_from = place

    def _end(self, place: int, parts: list[Part]) -> None:
        self._depth -= 1
        if self._depth == 1 and self._live_from is not None:
            self._give(parts, place + 1)
            self._live_from = None
        if self._depth == self._outermost:
            self._end_value(place)
            self._finish(parts)

    def _end_value(self, end: int) -> None:
        if self._value_from is None:
            return
        value, self._value_from = self.text[self._value_from : end].strip(), None
        if self._key == "name" and self._name is None:
            name = _loaded(value)
            self._name = name if isinstance(name, str) else None
        elif self._key in _ARGUMENTS and not self.begun:
            self._arguments = value

    def _finish(self, parts: list[Part]) -> None:
        if self.begun:
            self.state = Reading.DONE
            return
        arguments = _object_text(self._arguments)
        if not self._name or arguments is None:
            self.state = Reading.NO_CALL
            return
        self._begin_call(parts)
        parts.append(CallArguments(self._call, arguments))
        self.state = Reading.DONE

    def _begin_call(self, parts: list[Part]) -> None:
        assert self._name is not None
        self.begun = True
        parts.append(CallBegun(self._call, self._id, self._name))

    def _give(self, parts: list[Part], end: int) -> None:
        """What has come of the arguments."""
        if self._live_from is not None and self._live_from < end:
            parts.append(CallArguments(self._call, self.text[self._live_from : end]))
            self._live_from = end


def _object_text(value: str | None) -> str | None:
    """Arguments as the JSON of an object; None: they are none."""
    if value is None:
        return "{}"
    found = _loaded(value)
    if isinstance(found, str):  # JSON within JSON
        value, found = found, _loaded(found)
    return value if isinstance(found, dict) else None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

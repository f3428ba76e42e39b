"""JSON schemas as patterns: those whose answers nest no deeper than the schema, written compactly,
with properties in their order. The texts are those that the host's matcher (llguidance) allows,
which is checked afterwards, state by state (sampling/token_automaton.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from photon_ext.sampling.json_string import string_constant, string_pattern
from photon_ext.sampling.pattern import (
    NOTHING,
    Characters,
    Either,
    NotRegular,
    Pattern,
    Repeated,
    joined,
    literal,
    optional,
)
from photon_ext.sampling.schema_parts import referred

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum"},
}
# of one type as well, but not read here
_UNREAD = {
    "object": {"patternProperties", "minProperties", "maxProperties"},
    "array": {"prefixItems", "additionalItems"},
    "integer": {"multipleOf"},
    "number": {"multipleOf", "exclusiveMinimum", "exclusiveMaximum"},
}
# All that restrict values and that the matcher knows; it refuses others of the standard.
_RESTRICTING = (
    {"anyOf", "oneOf", "allOf", "$ref", "const", "enum", "type", "items", "additionalItems"}
    | {"prefixItems", "minItems", "maxItems", "properties", "additionalProperties"}
    | {"patternProperties", "required", "minProperties", "maxProperties", "minLength"}
    | {"maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "multipleOf"}
)
_DIGIT = Characters(((48, 57),))
_LEADING_DIGIT = Characters(((49, 57),))
_MOST_NESTED = 100  # more would be too deep for a function that calls itself


def schema_pattern(text: str) -> Pattern:
    """The answers of a schema, which is given as JSON text of an object. Raises NotRegular."""
    root = json.loads(text)
    return _Reader(root).read(root, ())


class _Reader:
    """Reads a schema from the top; `refs` are the references that it is in. What one leads to is
    read once, however many there are.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._referred_to: dict[str, Pattern] = {}
        self._readers: dict[str, Callable[[Mapping[str, Any], tuple[str, ...]], Pattern]] = {
            "null": lambda schema, refs: literal("null"),
            "boolean": lambda schema, refs: Either((literal("true"), literal("false"))),
            "integer": lambda schema, refs: _integers(schema),
            "number": lambda schema, refs: _numbers(schema),
            "string": lambda schema, refs: string_pattern(schema),
            "array": self._arrays,
            "object": self._objects,
        }

    def read(self, schema: Any, refs: tuple[str, ...]) -> Pattern:
        """The values of a part of the schema."""
        if not isinstance(schema, Mapping):
            raise NotRegular("a value may be any JSON, which nests to any depth")
        told = {key: value for key, value in schema.items() if key in _RESTRICTING}
        if "$ref" in told:
            return self._only(told, "$ref", lambda value: self._referred(value, refs))
        for keyword in ("anyOf", "oneOf"):
            if keyword in told:
                return self._only(told, keyword, lambda parts: self._any_of(parts, refs))
        if "allOf" in told:
            if len(told["allOf"]) != 1:
                raise NotRegular(f"allOf joins {len(told['allOf'])} schemas")
            return self._only(told, "allOf", lambda parts: self.read(parts[0], refs))
        if "const" in told:
            return self._only(told, "const", _constant, "type")
        if "enum" in told:
            return self._only(told, "enum", lambda values: _values(values, told), "type")
        types = told.get("type", _TYPES)
        types = [types] if isinstance(types, str) else types
        return Either(tuple(self._of_type(kind, told, refs) for kind in types))

    def _only(
        self, told: Mapping[str, Any], name: str, read: Callable[[Any], Pattern], *beside: str
    ) -> Pattern:
        """What one keyword says, where no other restricts it."""
        others = told.keys() - {name, *beside}
        if others:
            raise NotRegular(f"{name} stands beside {min(others)}")
        return read(told[name])

    def _of_type(self, kind: str, told: Mapping[str, Any], refs: tuple[str, ...]) -> Pattern:
        if kind not in self._readers:
            raise NotRegular(f"it has a type {kind}")
        if odd := told.keys() & _UNREAD.get(kind, set()):
            raise NotRegular(f"its {kind} has {min(odd)}")
        own = {key: value for key, value in told.items() if key in _KEYWORDS.get(kind, set())}
        return self._readers[kind](own, refs)

    def _referred(self, target: str, refs: tuple[str, ...]) -> Pattern:
        if (known := self._referred_to.get(target)) is not None:
            return known
        if target in refs:
            raise NotRegular("it refers to itself")
        if len(refs) >= _MOST_NESTED:
            raise NotRegular("its references are nested too deeply")
        try:
            found = referred(self._root, target)
        except LookupError as error:
            raise NotRegular(str(error.args[0])) from error
        self._referred_to[target] = pattern = self.read(found, (*refs, target))
        return pattern

    def _any_of(self, parts: Sequence[Any], refs: tuple[str, ...]) -> Pattern:
        return Either(tuple(self.read(part, refs) for part in parts))

    def _arrays(self, schema: Mapping[str, Any], refs: tuple[str, ...]) -> Pattern:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return literal("[]")
        if isinstance(schema.get("items"), list):
            raise NotRegular("an array has items of different schemas")
        item = self.read(schema.get("items", True), refs)
        more = None if most is None else int(most) - 1
        several = joined(item, Repeated(joined(",", item), max(least - 1, 0), more))
        return joined("[", several if least else optional(several), "]")

    def _objects(self, schema: Mapping[str, Any], refs: tuple[str, ...]) -> Pattern:
        others = schema.get("additionalProperties", True)
        if others is not False:
            raise NotRegular(
                "an object may have properties that its schema does not name: give it "
                '"additionalProperties": false'
            )
        properties = schema.get("properties", {})
        required = list(schema.get("required", ()))
        if any(name not in properties for name in required):
            raise NotRegular("an object requires a property that it does not describe")
        members = [
            (joined(json.dumps(name, ensure_ascii=False), ":", self.read(part, refs)), name)
            for name, part in properties.items()
        ]
        first: Pattern = NOTHING  # what follows the bracket
        behind: Pattern = NOTHING  # what follows a member
        for member, name in reversed(members):
            with_comma = joined(",", member)
            if name in required:
                first = joined(member, behind)
                behind = joined(with_comma, behind)
            else:
                first = Either((joined(member, behind), first))
                behind = joined(optional(with_comma), behind)
        return joined("{", first, "}")


def _values(values: Sequence[Any], told: Mapping[str, Any]) -> Pattern:
    types = told.get("type", [*_TYPES, "integer"])
    types = [types] if isinstance(types, str) else types
    return Either(tuple(_constant(value) for value in values if _is_of(value, types)))


def _is_of(value: Any, types: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return "integer" in types or "number" in types
    kinds = {str: "string", type(None): "null", float: "number", list: "array", dict: "object"}
    return kinds[type(value)] in types


def _constant(value: Any) -> Pattern:
    """A value alone, as compact JSON."""
    if isinstance(value, float):
        raise NotRegular("a number with decimals is given, which can be written in several ways")
    if isinstance(value, str):
        return string_constant(value)
    if isinstance(value, list):
        items = [part for item in value for part in (",", _constant(item))]
        return joined("[", *items[1:], "]")
    if isinstance(value, dict):
        members = [
            part
            for name, item in value.items()
            for part in (",", json.dumps(name, ensure_ascii=False), ":", _constant(item))
        ]
        return joined("{", *members[1:], "}")
    return literal(json.dumps(value))


def _numbers(schema: Mapping[str, Any]) -> Pattern:
    """With an exponent only where there are no bounds, which are numbers from 0 on."""
    decimals = joined(".", Repeated(_DIGIT, 1, None))
    if not schema:
        sign = optional(Characters(((43, 43), (45, 45))))
        exponent = joined(Characters(((69, 69), (101, 101))), sign, Repeated(_DIGIT, 1, None))
        return joined(_all_integers(), optional(decimals), optional(exponent))
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None or least < 0 or least != int(least) or (most or 0) != int(most or 0):
        raise NotRegular("a number with decimals has bounds that are negative or no integers")
    if most is None:
        return joined(_from(int(least)), optional(decimals))
    if most < least:
        raise NotRegular("no number lies within its bounds")
    zeros = joined(".", Repeated(literal("0"), 1, None))
    return Either(
        (
            joined(_between(int(least), int(most) - 1), optional(decimals)),
            joined(_between(int(most), int(most)), optional(zeros)),
        )
    )


def _all_integers() -> Pattern:
    return joined(optional(literal("-")), _from(0))


def _integers(schema: Mapping[str, Any]) -> Pattern:
    """Integers within bounds."""
    least, most = _least(schema), _most(schema)
    if least is None and most is None:
        return _all_integers()
    if least is not None and most is not None and least > most:
        raise NotRegular("no integer lies within its bounds")
    parts = []
    if least is None or least < 0:
        # a negative zero is written where the bounds have both signs
        begin = 1 if most is None or least is None else 0
        begin = max(begin, -most if most is not None and most < 0 else 0)
        parts.append(joined("-", _from(begin) if least is None else _between(begin, -least)))
    if most is None or most >= 0:
        begin = max(0, least or 0)
        parts.append(_from(begin) if most is None else _between(begin, most))
    return Either(tuple(parts))


def _least(schema: Mapping[str, Any]) -> int | None:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    if isinstance(above, bool):
        above = least if above else None
    found = [] if least is None else [math.ceil(least)]
    return max([*found, *([] if above is None else [math.floor(above) + 1])], default=None)


def _most(schema: Mapping[str, Any]) -> int | None:
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if isinstance(below, bool):
        below = most if below else None
    found = [] if most is None else [math.floor(most)]
    return min([*found, *([] if below is None else [math.ceil(below) - 1])], default=None)


def _from(least: int) -> Pattern:
    """Integers from a number on, which is not negative."""
    digits = len(str(least))
    longer = joined(_LEADING_DIGIT, Repeated(_DIGIT, digits, None))
    return Either((_between(least, 10**digits - 1), longer))


def _between(least: int, most: int) -> Pattern:
    """Integers that are not negative, both ends included."""
    parts: list[Pattern] = []
    begin = least
    while begin <= most:
        end = min(most, 10 ** len(str(begin)) - 1)
        parts.append(_of_digits(str(begin), str(end)))
        begin = end + 1
    return Either(tuple(parts))


def _of_digits(first: str, last: str) -> Pattern:
    """Texts of digits between two of equal length."""
    if first.strip("0") == "" == last.strip("9"):  # all: looked at one by one, 2**digits parts
        return Repeated(_DIGIT, len(first), len(first))
    low, high, rest = int(first[0]), int(last[0]), len(first) - 1
    if low == high:
        return joined(first[0], _of_digits(first[1:], last[1:]))
    parts = [
        joined(first[0], _of_digits(first[1:], "9" * rest)),
        joined(last[0], _of_digits("0" * rest, last[1:])),
    ]
    if low + 1 < high:
        between = Characters(((48 + low + 1, 48 + high - 1),))
        parts.append(joined(between, Repeated(_DIGIT, rest, rest)))
    return Either(tuple(parts))

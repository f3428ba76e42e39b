"""What makes a grammar take long to compile, refused by a look at its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from photon_ext.errors import ConfigError, shown

MAX_GRAMMAR_CHARACTERS = 2**16
# Each of the three is quadratic, and takes 0.2 to 0.3 s where it is at its bound.
_MOST_OPTIONAL = 3000
_MOST_PROPERTIES = 2000
# A number's rests are states of an automaton: 0.2 s for this many, 5 s and 1 GB for a million.
_MOST_RESTS = 50_000

_OPTIONAL = re.compile(r"[?*+{]|\|\)|\(\|")


def check_size(name: str, text: str) -> None:
    """Raises ConfigError for a grammar of too many characters; `name`: its parameter."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ConfigError(
            f"{name} has {len(text)} characters; give at most {MAX_GRAMMAR_CHARACTERS}"
        )


def check_optional_parts(name: str, text: str) -> None:
    """Raises ConfigError for a regular expression or a grammar with too many parts that may be left
    out or repeated.
    """
    count = sum(1 for _ in _OPTIONAL.finditer(text))
    if count > _MOST_OPTIONAL:
        raise ConfigError(
            f"{name} has {count} parts that may be left out or repeated (? * + {{}}); give at most "
            f"{_MOST_OPTIONAL}"
        )


def check_schema(schema: object) -> None:
    """Raises ConfigError for a JSON schema, as Python values, with too many properties, patterns of
    too many parts, or multiples of too many digits.
    """
    multiples: set[float] = set()
    for part in objects_in(schema):
        properties = part.get("properties")
        if isinstance(properties, dict) and len(properties) > _MOST_PROPERTIES:
            raise ConfigError(
                f"json_schema has an object of {len(properties)} properties; give at most "
                f"{_MOST_PROPERTIES}"
            )
        for pattern in _patterns(part):
            check_optional_parts(f"json_schema's pattern {shown(pattern)}", pattern)
        number = part.get("multipleOf")
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            multiples.add(number)
    _check_multiples(multiples)


def objects_in(schema: object) -> Iterator[dict[str, object]]:
    """All objects of a JSON value, those within others included; their items may be changed."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            yield value


def _patterns(part: dict[str, object]) -> Iterator[str]:
    pattern, named = part.get("pattern"), part.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(named, dict):
        yield from named


def _check_multiples(numbers: set[float]) -> None:
    total = sum(map(_digits_as_number, numbers))
    if total > _MOST_RESTS:
        largest = max(numbers, key=_digits_as_number)
        raise ConfigError(
            f"json_schema has multipleOf {shown(largest)}: the digits of all such numbers, read "
            f"without a point, add up to more than {_MOST_RESTS}; give smaller ones, or leave "
            "multipleOf out"
        )


def _digits_as_number(number: float) -> int:
    """The number without its decimal point: 25 for 0.25, 300 for 300.0."""
    _sign, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    if not isinstance(exponent, int):  # infinity
        return _MOST_RESTS + 1
    return int("".join(map(str, digits)) + "0" * max(0, min(exponent, 9)))

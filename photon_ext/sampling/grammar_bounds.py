"""What makes a grammar take long to compile, or llguidance read it wrongly or fail, refused by a
look at its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TypeGuard

from photon_ext.errors import ConfigError, shown
from photon_ext.sampling.lark import is_lark, schemas_in_grammar
from photon_ext.sampling.schema_parts import objects_in

MAX_GRAMMAR_CHARACTERS = 2**16
# Each of the three is quadratic, and takes 0.2 to 0.3 s where it is at its bound.
_MOST_OPTIONAL = 3000
_MOST_PROPERTIES = 2000
# What reads llama.cpp's notation, in Python, looks at all rules once for each in the worst order:
# 1.5 s.
_MOST_RULES = 500
# A number's rests are states of an automaton: 0.2 s for this many, 5 s and 1 GB for a million.
_MOST_RESTS = 50_000

# llguidance reads numbers as floats, and makes 64-bit integers of them: it negates -2**63, which
# stays as it is, without end. One more or less than a bound is exact up to 2**53.
_MOST_INTEGER = 2**63 - 1
_MOST_EXACT = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

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


def check_grammar(text: str) -> None:
    """Raises ConfigError for a grammar with too many rules, or with a schema that is refused."""
    rules = 0 if is_lark(text) else text.count("::=")
    if rules > _MOST_RULES:
        raise ConfigError(
            f"grammar has {rules} rules in llama.cpp's notation; give at most {_MOST_RULES}, or "
            "write it in Lark's"
        )
    for schema in schemas_in_grammar(text):
        check_schema(schema, "grammar's %json")


def check_schema(schema: object, name: str = "json_schema") -> None:
    """Raises ConfigError for a JSON schema, as Python values, with too many properties, patterns of
    too many parts, multiples of too many digits, or numbers that the library would replace by
    others; `name`: where it was given. Data in it are looked at as well: a reference may lead
    there.
    """
    multiples: set[float] = set()
    for part in objects_in(schema):
        properties = part.get("properties")
        if isinstance(properties, dict) and len(properties) > _MOST_PROPERTIES:
            raise ConfigError(
                f"{name} has an object of {len(properties)} properties; give at most "
                f"{_MOST_PROPERTIES}"
            )
        for pattern in _patterns(part):
            check_optional_parts(f"{name}'s pattern {shown(pattern)}", pattern)
        _check_numbers(name, part)
        number = part.get("multipleOf")
        if _is_number(number):
            multiples.add(number)
    _check_multiples(name, multiples)


def _patterns(part: dict[str, object]) -> Iterator[str]:
    pattern, named = part.get("pattern"), part.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(named, dict):
        yield from named


def _check_numbers(name: str, part: dict[str, object]) -> None:
    for keyword in _BOUNDS:
        number = part.get(keyword)
        exclusive = (
            keyword.startswith("exclusive") or part.get(f"exclusive{keyword.title()}") is True
        )
        if _is_number(number) and not _is_exact_bound(number, keyword == "maximum", exclusive):
            _refuse_number(name, keyword, number)
    for keyword in ("const", "enum"):
        for number in _integers_in(part.get(keyword)):
            if not _is_exact(number):
                _refuse_number(name, keyword, number)


def _refuse_number(name: str, keyword: str, number: float) -> None:
    raise ConfigError(
        f"{name} has {shown(number)} in {keyword}, which would be taken for another number; give "
        f"one from -2**53 to 2**53{', or text' if keyword in ('const', 'enum') else ''}"
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_exact(number: float) -> bool:
    return abs(number) <= _MOST_INTEGER and float(number) == number


def _is_exact_bound(number: float, upper: bool, exclusive: bool) -> bool:
    if exclusive:
        return abs(number) <= _MOST_EXACT
    return _is_exact(number) or (upper and number == _MOST_INTEGER)  # cut to what it was


def _integers_in(value: object) -> Iterator[int]:
    """All integers of a JSON value."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _check_multiples(name: str, numbers: set[float]) -> None:
    total = sum(map(_digits_as_number, numbers))
    if total > _MOST_RESTS:
        largest = max(numbers, key=_digits_as_number)
        raise ConfigError(
            f"{name} has multipleOf {shown(largest)}: the digits of all such numbers, read "
            f"without a point, add up to more than {_MOST_RESTS}; give smaller ones, or leave "
            "multipleOf out"
        )


def _digits_as_number(number: float) -> int:
    """The number without its decimal point: 25 for 0.25, 300 for 300.0."""
    _sign, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    if not isinstance(exponent, int):  # infinity
        return _MOST_RESTS + 1
    return int("".join(map(str, digits)) + "0" * max(0, min(exponent, 9)))

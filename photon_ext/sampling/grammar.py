"""What a request asks of the form of its answer: a JSON schema, a regular expression, a choice of
texts or a grammar. Checked here as far as it goes without a tokenizer; the engine compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import NamedTuple

from photon_ext.checks import as_tuple, check_flag
from photon_ext.errors import ConfigError, describe, shown, surrogate_in
from photon_ext.sampling.grammar_bounds import (
    MAX_GRAMMAR_CHARACTERS,
    check_grammar,
    check_optional_parts,
    check_schema,
    check_size,
)
from photon_ext.sampling.open_objects import close_objects
from photon_ext.sampling.pattern import Either, NotRegular, Pattern, literal
from photon_ext.sampling.regex_pattern import regex_pattern
from photon_ext.sampling.schema_parts import schemas_in
from photon_ext.sampling.schema_pattern import schema_pattern
from photon_ext.sampling.string_classes import served_regex


class GrammarKind(Enum):
    """Which parameter gave it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class Grammar(NamedTuple):
    """The form of an answer, checked; what is equal compiles to the same.

    Attributes:
        text: of choices as JSON; of a schema, too, with its open objects closed, and its patterns
            as llguidance has to be told (sampling/string_classes.py); else as it was given.
        whitespace: the JSON may hold spaces and line ends between its tokens.
    """

    kind: GrammarKind
    text: str
    whitespace: bool = False

    @property
    def key(self) -> bytes:
        """All of it, for hashes."""
        return f"{self.kind.value}\0{self.whitespace}\0{self.text}".encode()


def grammar_of(
    json_schema: object,
    regex: object,
    choice: object,
    grammar: object,
    whitespace: object = False,
    additional_properties: object = False,
) -> Grammar | None:
    """The one of the first four that is given; None where all are None.

    Raises ConfigError: more than one is given, or it is of another type or size than it has to be.
    """
    check_flag("whitespace", whitespace)
    check_flag("additional_properties", additional_properties)
    values = dict(zip(GrammarKind, (json_schema, regex, choice, grammar), strict=True))
    given = {kind: value for kind, value in values.items() if value is not None}
    flags = {"whitespace": whitespace, "additional_properties": additional_properties}
    for name, flag in flags.items():
        if flag and json_schema is None:
            raise ConfigError(f"{name} is True without a json_schema; give one, or leave it out")
    if len(given) > 1:
        names = " and ".join(kind.value for kind in given)
        raise ConfigError(f"{names} are given; give one of them")
    for kind, value in given.items():
        text = _TEXT_OF[kind](value)
        _check_text(kind, text)
        if kind is GrammarKind.JSON_SCHEMA:
            text = _served_schema(text, bool(additional_properties))
        return Grammar(kind, text, bool(whitespace))
    return None


def grammar_pattern(grammar: Grammar) -> Pattern:
    """The answers that have this form. Raises NotRegular: it has no pattern here, and why."""
    if grammar.kind is GrammarKind.CHOICE:
        return Either(tuple(map(literal, json.loads(grammar.text))))
    if grammar.kind is GrammarKind.REGEX:
        return regex_pattern(grammar.text)
    if grammar.kind is GrammarKind.GRAMMAR:
        raise NotRegular("a grammar may nest to any depth")
    if grammar.whitespace:
        raise NotRegular("whitespace is allowed between its tokens")
    return schema_pattern(grammar.text)


def _check_text(kind: GrammarKind, text: str) -> None:
    if (surrogate := surrogate_in(text)) is not None:
        found = f"{kind.value} is {shown(text)} with {surrogate}"
        raise ConfigError(f"{found}; give valid Unicode text")
    check_size(kind.value, text)
    if kind in (GrammarKind.REGEX, GrammarKind.GRAMMAR):
        check_optional_parts(kind.value, text)
    if kind is GrammarKind.GRAMMAR:
        check_grammar(text)


def schema_text(value: object) -> str:
    """A schema as JSON. Its properties keep their order: answers have them in this order. Raises
    ConfigError.
    """
    remedy = "give a JSON schema, as a dict, JSON text of an object, or a class of pydantic"
    if isinstance(value, type) and callable(of_model := getattr(value, "model_json_schema", None)):
        try:
            value = of_model()
        except Exception as error:  # the caller's, or pydantic's
            told = f"json_schema is {shown(value)}, which has no JSON schema ({describe(error)})"
            raise ConfigError(f"{told}; {remedy}") from error
    if not isinstance(value, (str, Mapping)):
        raise ConfigError(f"json_schema is {shown(value)}; {remedy}")
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARACTERS:
        return value  # too long, which is told without a look inside
    try:
        schema = json.loads(value) if isinstance(value, str) else dict(value)
        text = json.dumps(schema, allow_nan=False)
        schema = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        told = f"json_schema is {shown(value)}, which is no JSON ({describe(error)})"
        raise ConfigError(f"{told}; {remedy}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema is {shown(value)}; {remedy}")
    check_schema(schema)
    return text


def _served_schema(text: str, additional_properties: bool) -> str:
    schema = json.loads(text)
    if not additional_properties:
        close_objects(schema)
    for part in schemas_in(schema):
        if isinstance(regex := part.get("pattern"), str):
            part["pattern"] = served_regex(regex)
    return json.dumps(schema)


def _plain_text(kind: GrammarKind, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{kind.value} is {shown(value)}; give a non-empty string")
    return value


def _regex_text(value: object) -> str:
    text = _plain_text(GrammarKind.REGEX, value)
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ConfigError(
            f"regex is {shown(text)}, whose last backslash has nothing behind it; double it, or "
            "leave it out"
        )
    return text


def _choice_text(value: object) -> str:
    texts = as_tuple(value)
    if not texts:
        raise ConfigError(f"choice is {shown(value)}; give a list of texts, one at least")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"choice holds {shown(text)}; give non-empty strings")
    return json.dumps(texts, ensure_ascii=False)  # a surrogate stays one, and is found


_TEXT_OF: dict[GrammarKind, Callable[[object], str]] = {
    GrammarKind.JSON_SCHEMA: schema_text,
    GrammarKind.REGEX: _regex_text,
    GrammarKind.CHOICE: _choice_text,
    GrammarKind.GRAMMAR: partial(_plain_text, GrammarKind.GRAMMAR),
}

"""The form of an answer as a pattern."""

from __future__ import annotations

import json

from photon_ext.sampling.grammar import Grammar, GrammarKind
from photon_ext.sampling.pattern import Either, NotRegular, Pattern, literal
from photon_ext.sampling.regex_pattern import regex_pattern
from photon_ext.sampling.schema_pattern import schema_pattern


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

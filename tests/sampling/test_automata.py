"""From forms to automata: which texts they accept, what is beyond the limits, and the tokens."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from photon_ext.sampling.byte_automaton import (
    NO_STATE,
    AutomatonLimits,
    ByteAutomaton,
    byte_automaton,
)
from photon_ext.sampling.pattern import MAX_CHARACTER, NotRegular, byte_sequences, without
from photon_ext.sampling.regex_pattern import regex_pattern
from photon_ext.sampling.schema_pattern import schema_pattern
from photon_ext.sampling.token_automaton import LONGEST_TOKEN, TokenAutomaton, TokenBytes

LIMITS = AutomatonLimits(seconds=60.0)  # also where other work takes the time
CLOSED = {"additionalProperties": False}


def made(form: Any, limits: AutomatonLimits = LIMITS) -> ByteAutomaton:
    """The automaton of a regular expression, or of a schema."""
    text = isinstance(form, str)
    pattern = regex_pattern(form) if text else schema_pattern(json.dumps(form))
    return byte_automaton(pattern, limits, time.monotonic() + limits.seconds)


def accepts(automaton: ByteAutomaton, text: str | bytes) -> bool:
    state = 0
    for byte in text.encode() if isinstance(text, str) else text:
        state = int(automaton.transitions[state, automaton.classes[byte]])
        if state == NO_STATE:
            return False
    return bool(automaton.accepting[state])


@pytest.mark.parametrize(
    ("regex", "letters"),
    [
        (r"(19|20)\d{2}-(0[1-9]|1[0-2])", "0129-"),
        ("(a|b)*abb", "ab"),
        ("a{2,4}b?|c{3}|d{0}", "abcd"),
        (r"[^a-c\n]+\.", "abcd.\né"),
        ("x*?y+?z", "xyz"),
        (".", "a\n😀é"),
        ("[à-ü😀-😎]{1,3}", "àéü😀😎ÿ"),
        ("(?:ab|(cd))+|", "abcd"),
        (r"\+\-\\\.", "+-\\."),
    ],
)
def test_a_regular_expression_accepts_what_it_matches(regex: str, letters: str) -> None:
    automaton, random_ = made(regex), random.Random(1)
    found = set()
    for _ in range(3000):
        text = "".join(random_.choices(letters, k=random_.randint(0, 8)))
        assert accepts(automaton, text) == bool(re.fullmatch(regex, text)), text
        found.add(accepts(automaton, text))
    assert False in found


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        (r"\w+", "class"),
        ("^a", "at"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        (r"(a)\1", "groupref"),
        ("a(?=b)", "assert"),
        ("[a&&b]", "not read"),
        ("(", "not read"),
        ("a**", "not read"),
    ],
)
def test_what_means_something_else_in_other_syntaxes_is_left_to_the_host(
    regex: str, why: str
) -> None:
    with pytest.raises(NotRegular, match=why):
        regex_pattern(regex)


def covers(sequence: Sequence[tuple[int, int]], text: bytes) -> bool:
    """Whether each byte is in its range."""
    pairs = zip(text, sequence, strict=False)
    return len(text) == len(sequence) and all(low <= byte <= high for byte, (low, high) in pairs)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 127), (0, 0x7FF), (0x80, 0x800), (0xFFF, 0x11000), (0, MAX_CHARACTER), (233, 233)],
)
def test_ranges_of_characters_are_exact_in_utf8(first: int, last: int) -> None:
    sequences = list(byte_sequences(first, last))
    edges = {0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, MAX_CHARACTER}
    near = {code + step for code in {*edges, first, last} for step in (-1, 0, 1)}
    for code in sorted(near | {*range(0, MAX_CHARACTER, 4099)}):
        if 0 <= code <= MAX_CHARACTER and not 0xD800 <= code <= 0xDFFF:
            text = chr(code).encode()
            hits = sum(covers(sequence, text) for sequence in sequences)
            assert hits == (first <= code <= last)


def test_without_leaves_out_ranges_and_surrogates() -> None:
    assert without([(5, 9), (7, 20), (0, 1)]) == ((2, 4), (21, 0xD7FF), (0xE000, MAX_CHARACTER))
    assert without(without([(3, 4)])) == ((3, 4),)


def test_bounds_of_many_digits_are_exact_and_soon_compiled() -> None:
    """Their parts were as many as 2 to the number of digits."""
    most, begin = 2**63 - 1, time.process_time()
    automaton = made({"type": "integer", "minimum": -most - 1, "maximum": most})
    assert time.process_time() - begin < 1
    for number in (0, 9, 10, 10**18, most - 1, most, most + 1, 10**19):
        for value in (number, -number, -number - 1):
            assert accepts(automaton, str(value)) == (-most - 1 <= value <= most), value


def test_an_automaton_is_the_smallest() -> None:
    assert len(made("(a|b)*abb").accepting) == 4
    assert len(made("abcd|abce|xbcd|xbce").accepting) == 5
    assert len(made("a*|b*|(a|b)*").accepting) == 1


@pytest.mark.parametrize(
    ("form", "limits", "why"),
    [
        ("[ab]*a[ab]{20}", LIMITS, "more than 4096 states"),
        ("((a{99}){99}){99}", LIMITS, "more than 50000 parts"),
        ("(){4000000000}[^\\x00-\\U0010ffff]", LIMITS, "no text"),
        ("abcdefghij" * 400, LIMITS._replace(seconds=0.05), "too long"),
        ("[ab]*a[ab]{11}", LIMITS._replace(seconds=0.0), "too long"),
        ("[^\\x00-\\U0010ffff]", LIMITS, "no text"),
    ],
)
def test_what_is_too_large_is_refused_soon(form: str, limits: AutomatonLimits, why: str) -> None:
    begin = time.process_time()
    with pytest.raises(NotRegular, match=why):
        made(form, limits)
    assert time.process_time() - begin < 5


SCHEMAS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
         "required": ["b"], **CLOSED},
        ['{"a":1,"b":true}', '{"b":false}'],
        ['{"b":true,"a":1}', "{}", '{"a":1}', '{"b":true,}', '{"b": true}'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, **CLOSED},
        ["{}", '{"a":null}', '{"b":null}', '{"a":null,"b":null}'],
        ["{,}", '{"a":null"b":null}', '{"b":null,"a":null}'],
    ),
    ({"type": "integer", "minimum": -12, "maximum": 105}, ["-12", "0", "99", "105"],
     ["-13", "106", "1000", "01", "1.0"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, ["4", "5"], ["3", "6"]),
    ({"type": "integer", "maximum": -10}, ["-10", "-11", "-100"], ["-9", "0", "-09", "10"]),
    ({"type": "integer", "minimum": 98}, ["98", "99", "100", "5000"], ["97", "9", "-99"]),
    ({"type": "number"}, ["0", "-1.5", "2e10", "3.25E-7"], [".5", "1.", "+1", "01"]),
    ({"type": "number", "minimum": 0, "maximum": 2}, ["0", "1.99", "2.00"], ["2.01", "3"]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"\\n\\""', '"é😀"', '"\\u0001"'],
     ['""', '"abc"', '"\n"', '"\\x"', '"a']),
    ({"enum": ["a\"b", 3, None, [1, {"x": True}]]}, ['"a\\"b"', "3", "null", '[1,{"x":true}]'],
     ['"a"', "4", "[1]"]),
    ({"type": "string", "format": "date-time"},
     ['"2026-02-28T23:59:60.5Z"', '"2026-12-31t00:00:00+01:00"'],
     ['"2026-02-30T00:00:00Z"', '"2026-02-28T24:00:00Z"', '"2026-02-28"']),
    ({"type": ["integer", "string"], "format": "ipv4"}, ['"0.10.199.255"', "7"],
     ['"1.2.3"', '"1.2.3.256"']),
    ({"type": "string", "pattern": "^\\d{2}$"}, ['"42"'], ['"4"', '"421"']),
    ({"type": "string", "pattern": "a\"|\n"}, ['"xa\\"y"', '"\\n"', '"\\u000A"'], ['"a"', '"a"y"']),
    ({"type": "string", "pattern": "^[\\w-]+"}, ['"a_-1\\u007f"', '"x é"'], ['"é"', '""']),
    ({"enum": ["a\n\u0001\u007f"]}, ['"a\\n\\u0001\\u007F"', '"a\\u000a\\u0001\\u007f"'], ['"a"']),
    ({"type": "integer", "enum": ["1", 1]}, ["1"], ['"1"']),
    ({"const": "né"}, ['"né"'], ['"ne"']),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
     ["[1]", "[1,2,3]"], ["[]", "[1,2,3,4]", "[1,]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"const": 5}}},
     ["null", "5"], ["6"]),
    ({"allOf": [{"type": ["boolean", "null"]}]}, ["true", "null"], ["0"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS)
def test_a_schema_accepts_its_compact_values(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    automaton = made(schema)
    for text in good:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(automaton, text), text
    for text in bad:
        assert not accepts(automaton, text), text


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({}, "any"),
        ({"type": "object"}, "does not name"),
        ({"type": "object", "required": ["x"], **CLOSED}, "does not describe"),
        ({"type": "array"}, "any JSON"),
        ({"type": "array", "items": [{"type": "null"}], "maxItems": 1}, "different schemas"),
        ({"type": "string", "format": "email"}, "format email"),
        ({"type": "string", "pattern": "^a|b$"}, "has at"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength and pattern"),
        ({"type": "object", "minProperties": 1, "properties": {}, **CLOSED}, "minProperties"),
        ({"$ref": "#/$defs/a/3", "$defs": {"a": "text"}}, "leads nowhere"),
        ({"type": "number", "multipleOf": 3}, "multipleOf"),
        ({"type": "number", "minimum": -1}, "bounds"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "within its bounds"),
        ({"type": "integer", "maximum": 1e300}, "more than 50000 parts"),
        ({"const": 0.5}, "decimals"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "https://example.com/x"}, "another document"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "itself"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "stands beside type"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, "joins 2 schemas"),
        ({"type": "array", "items": {"type": "null"}, "prefixItems": []}, "prefixItems"),
    ],
)
def test_a_schema_that_is_not_read_says_why(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(NotRegular, match=why):
        made(schema)


def test_tokens_are_walked_by_their_bytes() -> None:
    tokens = [b"", b"a", b"ab", b"b", b"", b"\xc3", b"\xa9", b"x" * (LONGEST_TOKEN + 1)]
    vocabulary = TokenBytes(tokens, [4])
    automaton = TokenAutomaton(made("(ab)*é?"), vocabulary, LIMITS)

    def allowed(state: int) -> set[int]:
        words = automaton.masks[automaton.mask_of[state]]
        return {i for i in range(8) if words[i >> 5] >> (i & 31) & 1}

    assert allowed(0) == {1, 2, 4, 5}
    assert allowed(automaton.advance(0, 1)) == {3}
    assert automaton.state_after([1, 3, 2]) == automaton.state_after([])
    assert automaton.complete[automaton.state_after([2, 5, 6])]
    assert automaton.advance(0, 7) == automaton.advance(0, 0) == automaton.advance(0, 3) == NO_STATE
    assert automaton.advance(0, 4) == 0  # the end token, where the answer may end
    assert automaton.state_after([1, 4]) == NO_STATE
    assert automaton.state_after([3, 3]) == NO_STATE


class Scripted:
    """A matcher whose masks are an automaton's, but for a change in one state."""

    def __init__(self, automaton: TokenAutomaton, change: Any, state: int = 0) -> None:
        self._automaton, self._change, self._state = automaton, change, state

    def deep_copy(self) -> Scripted:
        return Scripted(self._automaton, self._change, self._state)

    def consume_token(self, token: int) -> bool:
        self._state = self._automaton.advance(self._state, token)
        return True

    def compute_bitmask(self) -> bytes:
        mask = self._automaton.masks[self._automaton.mask_of[self._state]].copy()
        return bytes(self._change(self._state, mask))

    def is_stopped(self) -> bool:
        return bool(self._automaton.complete[self._state])

    def is_error(self) -> bool:
        return False


def test_an_automaton_that_is_not_the_matchers_is_refused() -> None:
    vocabulary = TokenBytes([b"a", b"b", b"c", b"", b"bc"], [3])
    machine = made("a(b|c)*|cbc")
    own = TokenAutomaton(machine, vocabulary, LIMITS)
    loop, forced = own.state_after([0]), own.state_after([2])
    assert loop != forced

    def with_mask(changed: int, bits: int) -> TokenAutomaton:
        def change(state: int, mask: Any) -> Any:
            return np.array([bits], np.int32) if state == changed else mask

        return TokenAutomaton(machine, vocabulary, LIMITS, Scripted(own, change))

    assert (with_mask(-1, 0).tables == own.tables).all()
    assert with_mask(forced, 0b10000).masks[own.mask_of[forced]].tolist() != [0]  # "bc" at once
    for state, bits in ((loop, 0b11111), (loop, 0b00010), (forced, 0b00100), (forced, 0), (0, 1)):
        with pytest.raises(NotRegular, match="the host's matcher allows other tokens"):
            with_mask(state, bits)


def test_tables_that_are_too_large_are_refused() -> None:
    vocabulary = TokenBytes([bytes([i % 256]) for i in range(4096)], [])
    limits = LIMITS._replace(size=4096)
    with pytest.raises(NotRegular, match="tables take more than"):
        TokenAutomaton(made("abcdefghijklmnop"), vocabulary, limits)
    with pytest.raises(NotRegular, match="too long"):
        TokenAutomaton(made("a*"), vocabulary, LIMITS._replace(seconds=-1.0))


def test_references_that_double_each_time_are_read_once() -> None:
    """2**40 ways through a schema of 41 parts."""
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"$defs": {**parts, "d40": {"type": "null"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(NotRegular, match="more than 50000 parts"):
        made(schema)

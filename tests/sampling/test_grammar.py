"""json_schema, regex, choice and grammar of SamplingParams: what is accepted, and what each refusal
says. Nothing is compiled here.
"""

import copy
import dataclasses
import json
import pickle
from types import MappingProxyType
from typing import Any

import pytest

from photon_ext.errors import ConfigError
from photon_ext.sampling import SamplingParams, from_allowed_ids
from photon_ext.sampling.grammar import Grammar, GrammarKind
from photon_ext.sampling.grammar_bounds import MAX_GRAMMAR_CHARACTERS

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, json.dumps(CLOSED)),
        ({"json_schema": MappingProxyType(SCHEMA)}, GrammarKind.JSON_SCHEMA, json.dumps(CLOSED)),
        (
            {"json_schema": json.dumps(SCHEMA, indent=2)},
            GrammarKind.JSON_SCHEMA,
            json.dumps(CLOSED),
        ),
        (
            {"json_schema": SCHEMA, "additional_properties": True},
            GrammarKind.JSON_SCHEMA,
            json.dumps(SCHEMA),
        ),
        ({"regex": r"\d+"}, GrammarKind.REGEX, r"\d+"),
        ({"regex": "a" + 2 * "\\"}, GrammarKind.REGEX, "a" + 2 * "\\"),
        ({"choice": iter(["yes", "né"])}, GrammarKind.CHOICE, '["yes", "né"]'),
        ({"grammar": 'start: "a"'}, GrammarKind.GRAMMAR, 'start: "a"'),
    ],
)
def test_the_form_of_an_answer_is_kept_as_text(
    given: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    params = SamplingParams(**given)
    assert params.answer_grammar == Grammar(kind, text, False)
    assert params.constrained
    again = dataclasses.replace(params, seed=3)
    assert again.answer_grammar == params.answer_grammar
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(copy.copy(params))


def test_a_schema_that_the_caller_changes_later_is_asked_for_as_it_was() -> None:
    schema = {"type": "integer"}
    params = SamplingParams(json_schema=schema)
    schema["type"] = "string"
    assert params.json_schema == '{"type": "integer"}'


@pytest.mark.parametrize("number", [1, 5, 0.01, 1e-5, 1000.0, 49999, 0.25, True])
def test_a_multiple_of_few_digits_is_taken(number: float) -> None:
    """What is no number at all the library refuses."""
    assert SamplingParams(json_schema={"multipleOf": number}).constrained


class Model:
    """As pydantic's classes are."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


class Faulty:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        raise TypeError("no schema for a callable")


def test_a_class_of_pydantic_is_taken_for_its_schema() -> None:
    params = SamplingParams(json_schema=Model)
    assert params == SamplingParams(json_schema=SCHEMA)
    assert params.json_schema == json.dumps(SCHEMA)
    with pytest.raises(ConfigError, match=r"has no JSON schema .TypeError: no schema for a call"):
        SamplingParams(json_schema=Faulty)


def closed(schema: dict[str, Any], **named: bool) -> Any:
    """The schema that is compiled."""
    form = SamplingParams(json_schema=schema, **named).answer_grammar
    assert form is not None
    return json.loads(form.text)


NAMES = {"properties": {"a": {"type": "integer"}}}
OTHERS = {"properties": {"b": {"type": "integer"}}}
CLOSED_NAMES = {**NAMES, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"items": NAMES}, {"items": CLOSED_NAMES}),
        ({"anyOf": [NAMES, {"type": "null"}]}, {"anyOf": [CLOSED_NAMES, {"type": "null"}]}),
        ({"allOf": [NAMES], "default": {}}, {"allOf": [CLOSED_NAMES], "default": {}}),
        (
            {"$defs": {"x": NAMES}, "properties": {"a": {"$ref": "#/$defs/x"}}},
            {
                "$defs": {"x": CLOSED_NAMES},
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "additionalProperties": False,
            },
        ),
        (
            {**NAMES, "anyOf": [{"required": ["a"]}]},
            {**NAMES, "anyOf": [{"required": ["a"]}], "additionalProperties": False},
        ),
    ],
)
def test_objects_have_the_properties_that_their_schema_names(
    schema: dict[str, Any], found: dict[str, Any]
) -> None:
    assert closed(schema) == found
    assert closed(schema, additional_properties=True) == schema
    assert SamplingParams(json_schema=schema).json_schema == json.dumps(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NAMES, "additionalProperties": True},
        {**NAMES, "patternProperties": {"^x": {}}},
        {**NAMES, "required": ["a", "b"]},
        {"allOf": [NAMES, OTHERS]},
        {**NAMES, "anyOf": [OTHERS]},
        {"anyOf": [NAMES], "oneOf": [OTHERS]},
        {"$defs": {"x": NAMES}, "allOf": [{"$ref": "#/$defs/x"}, OTHERS]},
        {"$defs": {"x": {"anyOf": [NAMES]}}, "$ref": "#/$defs/x", **OTHERS},
        {"const": NAMES},
    ],
)
def test_objects_of_several_schemas_or_none_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    ("regex", "served"),
    [
        ("^[a-z]$", "^[a-z]$"),
        (r"^[\x00-\x08]$", r"^[\x00-\x08]$"),
        ('[^"](?=a)', '[^"](?=a)'),  # not read here
        (r"^[\x00-\x1f]{2}$", r"^(?:[\x01-\x1f]){2,2}$"),
        ('^[^"]*$', "^(?:[\\x01-\\x21\\x23-\ud7ff\ue000-\U0010ffff]){0,}$"),
    ],
)
def test_a_class_that_the_library_would_widen_goes_without_the_null(
    regex: str, served: str
) -> None:
    assert closed({"items": {"pattern": regex}}) == {"items": {"pattern": served}}


BEYOND = 2**53 + 1
UNBOUNDED = {"type": "integer", "minimum": -1e19, "maximum": -1e19}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (UNBOUNDED, "-1e[+]19 in minimum"),
        ({"maximum": -(2**63)}, "-9223372036854775808 in maximum"),
        ({"const": -(2**63)}, "-9223372036854775808 in const"),
        ({"$defs": {"a": {"items": UNBOUNDED}}}, "-1e[+]19 in minimum"),
        ({"default": UNBOUNDED, "$ref": "#/default"}, "-1e[+]19 in minimum"),
        ({"const": BEYOND}, f"{BEYOND} in const"),
        ({"enum": [5, {"a": [1234567890123456789]}]}, "1234567890123456789 in enum"),
        ({"minimum": 10**30}, f"{10**30} in minimum"),
        ({"minimum": BEYOND}, f"{BEYOND} in minimum"),
        ({"maximum": 2**64 - 1}, f"{2**64 - 1} in maximum"),
        ({"exclusiveMaximum": 2**53 + 2}, f"{2**53 + 2} in exclusiveMaximum"),
        ({"maximum": 2**54, "exclusiveMaximum": True}, f"{2**54} in maximum"),
    ],
)
@pytest.mark.parametrize("behind_json", [False, True])
def test_a_number_that_the_library_would_replace_is_refused(
    schema: dict[str, Any], told: str, behind_json: bool
) -> None:
    """Integers from -2**63 on ended the process: to compile them did not end."""
    where = "grammar's %json" if behind_json else "json_schema"
    grammar = f"start: %json {json.dumps(schema)}"
    given = {"grammar": grammar} if behind_json else {"json_schema": schema}
    with pytest.raises(ConfigError, match=f"^{where} has {told}, .* give one from -2[*][*]53 to "):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53},
        {"const": -(2**60)},
        {"enum": [1e300, -1e19, 0.1, True]},
        {"minimum": 0, "maximum": 2**63 - 1},
        {"exclusiveMinimum": -(2**53), "maximum": 1e18},
        {"properties": {"minimum": {"default": 2**70}}},
    ],
)
def test_a_number_that_the_library_keeps_is_taken(schema: dict[str, Any]) -> None:
    assert SamplingParams(json_schema=schema).constrained


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (
            'start: a\na: "x" %json\n{"items": {"multipleOf": 99999989}}',
            "^grammar's %json has multi",
        ),
        # the library's expressions may go on behind a line's end
        (
            'start: /a\n"/ %json {"multipleOf": 99999989} /"/',
            "^grammar's %json has multipleOf 9999",
        ),
        (
            'start: %json {"a": 1',
            "^grammar has %json at character 7 with what is no JSON behind it",
        ),
        (
            "root ::= a0\n" + "a0 ::= a0\n" * 500,
            "^grammar has 501 rules in llama.cpp's notation; g",
        ),
    ],
)
def test_what_makes_a_grammar_take_long_is_refused(grammar: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SamplingParams(grammar=grammar)


@pytest.mark.parametrize(
    "grammar",
    ['start: "%json" // %json, as above', "start: %json true", 'start: %json {"minimum": 1} "x"'],
)
def test_a_grammar_may_speak_of_json(grammar: str) -> None:
    assert SamplingParams(grammar=grammar).constrained


def test_what_is_repeated_often_is_taken_where_it_is_one_part() -> None:
    multiples = [{"multipleOf": 30011}] * 1000  # which has one automaton
    assert SamplingParams(json_schema={"anyOf": multiples}).constrained
    assert SamplingParams(regex="|".join(f"x{i}" for i in range(9000))).constrained


def test_without_one_the_answer_is_free() -> None:
    params = SamplingParams()
    assert params.answer_grammar is None
    assert not params.constrained


def test_whitespace_is_a_part_of_what_is_asked() -> None:
    loose = SamplingParams(json_schema=SCHEMA, whitespace=True)
    assert loose.answer_grammar != SamplingParams(json_schema=SCHEMA).answer_grammar


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"regex": "a" + 3 * "\\"},
            "^regex is .*, whose last backslash has nothing behind it; double",
        ),
        ({"json_schema": 3}, "^json_schema is 3; give a JSON schema, as a dict, JSON text of an"),
        ({"json_schema": True}, "^json_schema is True; give a JSON schema"),
        ({"json_schema": "[1]"}, r"^json_schema is '\[1\]'; give a JSON schema"),
        ({"json_schema": "{"}, "^json_schema is '{', which is no JSON .*; give a JSON schema"),
        ({"json_schema": {"minimum": float("nan")}}, "which is no JSON .*; give a JSON schema"),
        ({"json_schema": {"enum": [object]}}, "which is no JSON .*; give a JSON schema"),
        ({"json_schema": CYCLE}, "which is no JSON .*; give a JSON schema"),
        ({"json_schema": '{"a":' * 5000 + "1" + "}" * 5000}, "no JSON .*; give a JSON schema"),
        ({"json_schema": {"items": [{"multipleOf": 99999989}]}}, "has multipleOf 99999989: the"),
        ({"json_schema": '{"multipleOf": 1e300}'}, "has multipleOf 1e[+]300: the digits of all su"),
        ({"json_schema": {"multipleOf": 0.12345678}}, "has multipleOf 0.12345678: the digits"),
        (
            {"json_schema": {"prefixItems": [{"multipleOf": 20011 + i} for i in range(3)]}},
            "has multipleOf 20013: the digits of all such numbers, read without a point, add up to",
        ),
        (
            {"json_schema": {"properties": {f"p{i}": {} for i in range(2001)}}},
            "^json_schema has an object of 2001 properties; give at most 2000$",
        ),
        (
            {"json_schema": {"items": {"pattern": "a?" * 3001}}},
            "^json_schema's pattern 'a.a.* has 3001 parts that may be left out or repeated",
        ),
        (
            {"json_schema": {"patternProperties": {"a{0,1}" * 3001: {}}}},
            "^json_schema's pattern 'a.*' has 3001 parts that may be left out or repeated",
        ),
        ({"regex": "(a|)" * 3001}, "^regex has 3001 parts that may be left out .*; give at most 3"),
        ({"grammar": 'start: A\nA: "a"*' + '"a"? ' * 3000}, "^grammar has 3001 parts that may be"),
        ({"regex": ""}, "^regex is ''; give a non-empty string"),
        ({"regex": b"a"}, "^regex is b'a'; give a non-empty string"),
        ({"regex": "a\udcff"}, r"with a surrogate, U\+DCFF, at character 1; give valid Unicode"),
        ({"grammar": 5}, "^grammar is 5; give a non-empty string"),
        ({"choice": "yes"}, "^choice is 'yes'; give a list of texts"),
        ({"choice": []}, r"^choice is \[\]; give a list of texts"),
        ({"choice": ["a", ""]}, "^choice holds ''; give non-empty strings"),
        ({"choice": ["a", 3]}, "^choice holds 3; give non-empty strings"),
        ({"choice": ["\ud800"]}, r"^choice is .* with a surrogate, U\+D800"),
        ({"regex": "a", "choice": ["a"]}, "^regex and choice are given; give one of them"),
        ({"whitespace": True}, "^whitespace is True without a json_schema; give one"),
        ({"additional_properties": True}, "^additional_properties is True without a json_schema"),
        ({"json_schema": int}, "^json_schema is <class 'int'>; give .* or a class of pydantic$"),
        ({"whitespace": 1, "json_schema": SCHEMA}, "^whitespace is 1; give True or False"),
        (
            {"regex": "a", "constraint": from_allowed_ids([1])},
            "^constraint and regex are given; give one of them",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_to_give(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SamplingParams(**given)


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar", "choice"])
def test_what_is_enormous_is_refused_by_its_size(name: str) -> None:
    text = "{" + "a" * MAX_GRAMMAR_CHARACTERS
    value = [text] if name == "choice" else text
    with pytest.raises(ConfigError, match=f"^{name} has 655.. characters; give at most 65536$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "ours"),
    [("guided_json", "json_schema"), ("guided_regex", "regex"), ("guided_choice", "choice")],
)
def test_the_names_of_other_engines_are_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"has no parameter '{name}'; did you mean {ours}[?]"):
        SamplingParams(**{name: "a"})

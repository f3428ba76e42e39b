"""Tools: what a request may say of them, what the template tells, and what answers call."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance  # noqa: F401  without it these tests are left out
import numpy as np
import pytest

from photon_ext.engine import Engine
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.errors import ConfigError, RequestError
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.models.text.chat_template import ChatTemplate
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.tools import ToolCall, Tools, calls_in
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNIT = {"enum": ["celsius", "fahrenheit"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}, "unit": UNIT},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TREE = {
    "type": "function",
    "function": {
        "name": "plant",
        "parameters": {
            "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}},
            "type": "object",
            "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "twig": {"$ref": "#"}},
            "required": ["leaf"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_time"}}
ASKED = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


@pytest.fixture(scope="module")
def engine(narrow: LoadedModel) -> Iterator[Engine]:
    assert narrow.tokenizer is not None
    backend, ends = narrow.tokenizer._backend, {"eos_token": "<|im_end|>"}
    tokenizer = Tokenizer(backend, ends, TEMPLATE, "the template with tools")
    sizes = {"max_rows": 4, "max_len": 512, "chunk": 128, "buckets": (1, 4)}
    with Engine.from_weights(narrow.config, narrow.weights, tokenizer, **sizes) as made:
        yield made


def schema_of(tools: Any, choice: Any = "required") -> dict[str, Any]:
    asked = Tools.of(tools, choice)
    assert asked is not None
    made: dict[str, Any] = json.loads(str(asked.constrain(SamplingParams()).json_schema))
    return made


def test_a_forced_call_has_the_functions_name_and_its_arguments() -> None:
    schema = schema_of([WEATHER])
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
    jsonschema.validate(good, schema)
    for bad in ({}, {**good, "name": "other"}, {**good, "arguments": {}}, {**good, "x": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def test_of_several_any_is_called_and_a_named_one_alone() -> None:
    tools = [WEATHER, TIME]
    time_call = {"name": "get_time", "arguments": {}}
    jsonschema.validate(time_call, schema_of(tools))
    jsonschema.validate(time_call, schema_of(tools, NAMED))
    assert schema_of(tools, NAMED) == schema_of([TIME])


@pytest.mark.parametrize("others", [[], [TIME]])
def test_references_in_parameters_lead_where_they_led(others: list[dict[str, Any]]) -> None:
    schema = schema_of([*others, TREE])
    call = {"name": "plant", "arguments": {"leaf": 3, "twig": {"leaf": 4}}}
    jsonschema.validate(call, schema)
    call["arguments"] = {"leaf": 3, "twig": {"leaf": 10}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(call, schema)
    asked = Tools.of([*others, TREE], "required")
    assert asked is not None
    tokenizer = byte_tokenizer()
    grammar = asked.constrain(SamplingParams()).answer_grammar
    assert grammar is not None
    constraint = GrammarCompiler(tokenizer, VOCAB, [0]).start(grammar)
    text = '{"name":"plant","arguments":{"leaf":3,"twig":{"leaf":4}}}'
    for token in tokenizer.encode(text, False):
        constraint.advance(token)
    assert constraint.finished
    assert "$defs" in TREE["function"]["parameters"]  # type: ignore[index]
    assert TREE["function"]["parameters"]["properties"]["twig"] == {"$ref": "#"}  # type: ignore[index]


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_the_model_decides_unless_a_call_is_asked_for(choice: str | None) -> None:
    asked = Tools.of([WEATHER], choice)
    assert asked is not None
    assert asked.given == (() if choice == "none" else (WEATHER,))
    assert not asked.constrain(SamplingParams()).constrained


@pytest.mark.parametrize(
    ("tools", "choice", "told"),
    [
        (WEATHER, None, "^tools is {'type': .*; give a list of"),
        ("x", None, "^tools is 'x'; give a list of"),
        (5, None, "^tools is 5; give a list of"),
        (["x"], None, "^tools hold 'x'; give {'type': 'function'"),
        ([{"type": "function", "function": {"name": ""}}], None, "^tools hold .*; give {'type'"),
        ([{"type": "retrieval"}], None, "^tools hold {'type': 'retrieval'}; give {'type'"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": 3}}],
            None,
            "^tools hold .*'parameters': 3.*; give {'type'",
        ),
        ([TIME, TIME], None, "^tools have the names get_time, get_time; give each one once"),
        ([TIME], "always", "^tool_choice is 'always'; give auto, none, required, or .*: get_time|"),
        ([WEATHER], NAMED, "^tool_choice is {.*}; give .* with the name of a tool: there are get_"),
        ([], "required", "^tool_choice is 'required'; give .*: there are no tools"),
        (None, "required", "^tool_choice is 'required'; give .*: there are no tools"),
        ([TIME], np.array(["auto", "none"]), r"^tool_choice is array\(.*; give auto, none, requi"),
        ([{"type": np.array([1, 2])}], None, "^tools hold {'type': array.*; give {'type'"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, choice: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Tools.of(tools, choice)


def test_a_call_and_another_constraint_contradict_each_other() -> None:
    asked = Tools.of([TIME], "required")
    assert asked is not None
    with pytest.raises(ConfigError, match=r"^tool_choice asks for a call, and the parameters have"):
        asked.constrain(SamplingParams(regex="a"))
    for wrong in ({1, 2}, math.nan):
        parameters = {"type": "function", "function": {"name": "f", "parameters": {"a": wrong}}}
        asked = Tools.of([parameters], "required")
        assert asked is not None
        with pytest.raises(
            ConfigError, match=r"^the parameters of tool 'f' are no JSON .*; give a"
        ):
            asked.constrain(SamplingParams())


def test_parameters_of_another_type_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    asked = Tools.of([tool], "required")
    assert asked is not None
    with pytest.raises(
        ConfigError, match=r"^the parameters of tool 'f' have the type 'array'; giv"
    ):
        asked.constrain(SamplingParams())


def test_more_tools_than_a_call_can_be_one_of_are_told_as_such() -> None:
    names = [f"tool_{i}" for i in range(1000)]
    asked = Tools.of([{"type": "function", "function": {"name": name}} for name in names], "auto")
    assert asked is not None
    assert not asked.constrain(SamplingParams()).constrained
    asked = Tools.of(asked.given, "required")
    assert asked is not None
    with pytest.raises(
        ConfigError, match=r"^tool_choice .* of its 1000 tools is refused: json_sch"
    ):
        asked.constrain(SamplingParams())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        ('{"name": "f", "parameters": {}}', [("f", {})]),
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"b": [2]}}</tool_call>',
            [("f", {}), ("g", {"b": [2]})],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
        ("It is sunny.", []),
        ('{"name": "f", "arguments": 3}', []),
        ('{"name": "f"', []),
        ("[1, 2]", []),
        ("[" * 100_000, []),
        ("<tool_call>x" + " " * 200_000 + "x", []),
        ('<tool_call>{"name": "f", "arguments": {}}<tool_call>x</tool_call>', []),
        (
            '{"name": "f", "arguments": {"a": "<tool_call>"}}',
            [("f", {"a": "<tool_call>"})],
        ),
        (
            'So: <tool_call> {"name": "f", "arguments": {"a": "</tool_call><tool_call>{}"}}\n'
            '</tool_call> and <tool_call>{"name": "g", "parameters": {}}',
            [("f", {"a": "</tool_call><tool_call>{}"}), ("g", {})],
        ),
        ('<tool_call>x<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("<tool_call>{" * 100_000, []),
    ],
)
def test_the_calls_in_a_text(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls_in(text) == tuple(ToolCall(name, arguments) for name, arguments in calls)


def test_hazard_f8_a_call_that_is_cut_anywhere_is_none() -> None:
    call = {"name": "f", "arguments": {"a": 'é \\ "', "b": ["\U0001f600", {"c": "</tool_call>"}]}}
    text = json.dumps(call)
    assert "\\u" in text
    for begin in ("", "<tool_call>"):
        for end in range(len(text)):
            assert calls_in(begin + text[:end]) == ()
        assert calls_in(begin + text) == (ToolCall("f", call["arguments"]),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters",
    [{}, {"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}, {"title": "x"}],
)
def test_arguments_are_an_object_whatever_the_parameters_say(parameters: dict[str, Any]) -> None:
    """The answer was {"name": "f", "arguments": true}, which is no call."""
    schema = schema_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert schema["properties"]["arguments"] == {**parameters, "type": "object"}


def test_hazard_f7_a_call_is_asked_of_tools_that_are_there_and_a_cut_one_is_none(
    engine: Engine,
) -> None:
    with pytest.raises(ConfigError, match=r"^tool_choice is 'required'; .* there are no tools"):
        engine.chat(ASKED, SamplingParams(1), tools=[], tool_choice="required")
    cut = engine.chat(ASKED, SamplingParams(1), tools=[TIME], tool_choice="required")
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())


def test_references_move_with_their_schema_and_data_stays_as_it_is() -> None:
    """A property may have a keyword's name."""
    data, inner = {"$ref": "#/leaf"}, {"$ref": "#/$defs/leaf"}
    parameters = {
        "$defs": {"leaf": {"const": data, "default": data}},
        "properties": {"const": inner, "kind": {"enum": [data]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = Tools.of([tool], "required")
    assert asked is not None
    schema = json.loads(str(asked.constrain(SamplingParams()).json_schema))
    moved = schema["properties"]["arguments"]
    assert moved["$defs"] == parameters["$defs"]
    assert moved["properties"] == {
        "const": {"$ref": "#/properties/arguments/$defs/leaf"},
        "kind": {"enum": [data]},
    }


def test_a_template_tells_the_tools_or_is_known_to_know_none() -> None:
    template = ChatTemplate(TEMPLATE, {}, "some/file")
    assert json.dumps(WEATHER) in template.render(ASKED, tools=[WEATHER])
    assert "You may call" not in template.render(ASKED)
    plain = ChatTemplate(
        "{% for m in messages %}{{ m.content }} tools{% endfor %}", {}, "some/file"
    )
    assert plain.render(ASKED).endswith(" tools")
    with pytest.raises(
        RequestError, match=r"^some/file: the chat template knows no tools, and 1 a"
    ):
        plain.render(ASKED, tools=[TIME])


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_that_is_asked_for_is_made(engine: Engine, choice: Any, temperature: float) -> None:
    params = SamplingParams(80, temperature, seed=3)
    output = engine.chat(ASKED, params, tools=[WEATHER, TIME], tool_choice=choice)
    assert output.finish_reason == "stop"
    (call,) = output.tool_calls
    assert call.name in ("get_weather", "get_time")
    if call.name == "get_weather":
        jsonschema.validate(call.arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
    else:
        assert choice == "required"
        assert call.arguments == {}


def test_tools_lengthen_the_prompt_unless_the_choice_is_none(engine: Engine) -> None:
    params = SamplingParams(2)
    without, none, auto = (
        engine.chat(ASKED, params, **named).prompt_tokens
        for named in ({}, {"tools": [TIME], "tool_choice": "none"}, {"tools": [TIME]})
    )
    assert without == none < auto
    (text,) = engine.generate([ASKED[0]["content"]], params, tools=[TIME])
    assert text.prompt_tokens == auto


@pytest.mark.parametrize(("prompt", "raw"), [([1, 2, 3], False), ("Hello", True)])
def test_tools_beside_a_prompt_without_a_template_are_refused(
    engine: Engine, prompt: Any, raw: bool
) -> None:
    with pytest.raises(
        RequestError, match=r"^1 tools are given with a prompt that no chat templat"
    ):
        engine.submit(prompt, SamplingParams(2), raw=raw, tools=[TIME])

"""The form of an answer: response_format, regex, choice, grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serve.http.server import CHAT, COMPLETIONS, HELLO, post, says
from tests.serve.http.stub import StubClient

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
NAMED = {"name": "person", "schema": SCHEMA, "strict": True, "description": "Somebody"}


def posted(model_dir: Path, path: str, **fields: Any) -> tuple[int, Any, dict[str, Any]]:
    """The status, the answer, and the parameters that the engine was given."""
    client = StubClient(says('{"age":1}'))
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    response = post(client, model_dir, path, {**prompt, **fields})
    return response.status_code, response.json(), {**client.asks[0].params} if client.asks else {}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"regex": "[0-9]+"}, "[0-9]+"),
        ({"choice": ["yes", "no"]}, ["yes", "no"]),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
    ],
)
def test_a_form_goes_to_the_engine(
    model_dir: Path, path: str, fields: dict[str, Any], expected: Any
) -> None:
    status, _, params = posted(model_dir, path, **fields)
    assert status == 200
    (name,) = fields
    assert params[name.replace("response_format", "json_schema")] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "text", "json_schema": NAMED}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"regex": "a\\"}, "regex"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"grammar": "x" * 70_000}, "grammar"),
        ({"regex": "a", "choice": ["a"]}, "response_format"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(
    model_dir: Path, fields: dict[str, Any], param: str
) -> None:
    status, answer, params = posted(model_dir, CHAT, **fields)
    assert (status, params) == (400, {})
    error = answer["error"]
    assert error["param"] == param or (param == "response_format" and error["param"] is None)
    assert error["message"]

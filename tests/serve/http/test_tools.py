"""Calls of tools and thoughts, told apart while they stream, in the formats of several models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from photon_ext.serve.http.call_parser import CallParser
from photon_ext.serve.http.parts import (
    AnswerParser,
    CallArguments,
    CallBegun,
    PlainText,
    Said,
    Thought,
)
from photon_ext.serve.http.thought_parser import ThoughtParser
from photon_ext.serve.http.tool_formats import FORCED, FORMATS
from tests.serve.http.server import CHAT, HELLO, events_of, on_a_port, post, says
from tests.serve.http.stub import StubClient
from tests.serve.http.words import ids_of, text_of

PARIS, ROME = {"city": "Paris", "days": [1, {"x": '}]\\"'}]}, {"city": "Röm \u2028"}
A = {"name": "weather", "arguments": PARIS}
B = {"name": "time", "arguments": ROME}
a, b = json.dumps(A), json.dumps(B, ensure_ascii=False)
llama_a, llama_b = (each.replace('"arguments"', '"parameters"') for each in (a, b))
TWO = [("weather", PARIS), ("time", ROME)]
TRANSCRIPTS = {
    "hermes": f"<tool_call>\n{a}\n</tool_call>\n<tool_call>\n{b}\n</tool_call>",
    "llama3": f"{llama_a}; {llama_b}",
    "mistral": f"[TOOL_CALLS][{a}, {b}]",
    "granite": f"<|tool_call|>[{a}, {b}]",
    "phi": f"<|tool_call|>[{a}, {b}]<|/tool_call|>",
}
OTHERS = {
    "llama3": f"<|python_tag|>{llama_a}; {llama_b}",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS)}[TOOL_CALLS]time{json.dumps(ROME)}",
    "granite": f"<tool_call>[{a}, {b}]",
    "phi": f"functools[{a}, {b}]",
    "hermes": f"<tool_call>{a}</tool_call><tool_call>{b}",
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]


class Read:
    """What an answer consists of, joined."""

    def __init__(self, parser: AnswerParser, pieces: list[str]) -> None:
        self.said = self.thought = ""
        self.names: list[str] = []
        self.ids: list[str] = []
        self.arguments: list[str] = []
        parts = [part for piece in pieces for part in parser.feed(piece)]
        for part in [*parts, *parser.finish()]:
            match part:
                case Said(text):
                    self.said += text
                case Thought(text):
                    self.thought += text
                case CallBegun(call, call_id, name):
                    assert call == len(self.names)
                    self.names.append(name)
                    self.ids.append(call_id)
                    self.arguments.append("")
                case CallArguments(call, text):
                    assert call == len(self.names) - 1
                    self.arguments[call] += text

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [*zip(self.names, map(json.loads, self.arguments), strict=True)]

    @property
    def all(self) -> tuple[str, str, list[str], list[str]]:
        return self.said, self.thought, self.names, self.arguments


def cuts(text: str) -> list[list[str]]:
    """The text whole, by characters, in pieces of three, and cut in two anywhere."""
    three = [text[i : i + 3] for i in range(0, len(text), 3)]
    return [[text], [*text], three, *([text[:i], text[i:]] for i in range(1, len(text)))]


def read_all(make: Callable[[], AnswerParser], text: str) -> Read:
    """Cut in any way it is the same."""
    whole = Read(make(), [text])
    for pieces in cuts(text):
        assert Read(make(), pieces).all == whole.all, pieces
    return whole


@pytest.mark.parametrize("name", FORMATS)
def test_hazard_a4_calls_are_the_same_however_an_answer_is_cut(name: str) -> None:
    for text in (TRANSCRIPTS[name], OTHERS[name], f"\n\n{TRANSCRIPTS[name]}\n"):
        read = read_all(lambda: CallParser(FORMATS[name]), text)
        assert read.calls == TWO
        assert read.said == ""
        assert read.thought == ""


@pytest.mark.parametrize("name", sorted({*FORMATS} - {"llama3"}))
def test_text_before_calls_is_said(name: str) -> None:
    read = read_all(lambda: CallParser(FORMATS[name]), f"Let me look <.\n{TRANSCRIPTS[name]}")
    assert (read.said, read.calls) == ("Let me look <.\n", TWO)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Use <tool_call> as a tag."),
        ("hermes", '<tool_call>{"nam": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", "a <tool_cal"),
        ("hermes", "<tool_call>"),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"answer": '),
        ("llama3", "\n {x}"),
        ("llama3", "<|python_tag|>print(1)"),
        ("phi", "functools.partial(f)"),
        ("mistral", "[TOOL_CALLS] what?"),
        ("granite", "  "),
    ],
)
def test_what_only_looks_like_a_call_is_said(name: str, text: str) -> None:
    read = read_all(lambda: CallParser(FORMATS[name]), text)
    assert read.names == []
    assert "".join(read.said.split()).startswith("".join(text.split())[:20])


def test_arguments_may_come_before_the_name_or_not_at_all() -> None:
    text = '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call><tool_call>{"name": "g"}'
    read = read_all(lambda: CallParser(FORMATS["hermes"]), text)
    assert read.calls == [("f", {"x": 1}), ("g", {})]


def test_hazard_a6_calls_have_numbers_and_ids_and_arguments_are_json_once() -> None:
    inner = json.dumps(json.dumps(PARIS))
    text = f'<tool_call>{{"name": "f", "arguments": {inner}}}</tool_call><tool_call>{b}'
    read = read_all(lambda: CallParser(FORMATS["hermes"]), text)
    assert read.calls == [("f", PARIS), ("time", ROME)]
    assert len({*read.ids}) == 2
    assert all(each.startswith("call_") for each in read.ids)
    (short,) = {*map(len, Read(CallParser(FORMATS["mistral"]), [TRANSCRIPTS["mistral"]]).ids)}
    assert short == 9


def test_a_call_that_is_cut_has_the_arguments_so_far() -> None:
    text = a[: a.index("Paris") + 3]
    read = read_all(lambda: CallParser(FORCED), text)
    assert (read.names, read.arguments) == (["weather"], ['{"city": "Par'])
    assert read.said == ""


def test_long_arguments_are_read_in_no_time() -> None:
    """Read character by character, each copied all before it."""
    arguments = json.dumps({"city": "x" * 600_000})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    began = time.thread_time()
    read = Read(CallParser(FORMATS["hermes"]), [text])
    assert time.thread_time() - began < 3.0  # 0.2 s
    assert read.calls == [("weather", json.loads(arguments))]


def test_one_call_may_be_enough() -> None:
    read = read_all(lambda: CallParser(FORMATS["hermes"], 1), TRANSCRIPTS["hermes"] + " and so on")
    assert (read.calls, read.said) == (TWO[:1], "")


@pytest.mark.parametrize(
    ("text", "within", "thought", "said"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", False, "hm, so", "Yes."),
        ("hm </ so\n</think>\n\nYes.", True, "hm </ so", "Yes."),
        ("\n<think>hm", False, "hm", ""),
        ("hm, so", True, "hm, so", ""),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("No <think> here.", False, "", "No <think> here."),
        ("  <thin", False, "", "  <thin"),
        ("", False, "", ""),
    ],
)
def test_hazard_a17_thoughts_are_told_apart_however_an_answer_is_cut(
    text: str, within: bool, thought: str, said: str
) -> None:
    read = read_all(lambda: ThoughtParser(PlainText(), within), text)
    assert (read.thought, read.said) == (thought, said)


def test_hazard_a17_calls_may_follow_a_thought() -> None:
    text = f"<think>\nI call.\n</think>\n\n{TRANSCRIPTS['hermes']}"
    read = read_all(lambda: ThoughtParser(CallParser(FORMATS["hermes"]), False), text)
    assert (read.thought, read.said, read.calls) == ("I call.", "", TWO)


# --- by the endpoint ------------------------------------------------------------------------------


def ask(model_dir: Path, client: StubClient, parser: str = "hermes", **fields: Any) -> Any:
    body = {"messages": HELLO, "tools": TOOLS, **fields}
    response = post(client, model_dir, CHAT, body, tool_parser=parser)
    assert response.status_code == 200, response.text
    return events_of(response) if fields.get("stream") else response.json()


def calls_of_events(events: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """As clients join them: by their index."""
    found: dict[int, dict[str, str]] = {}
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] not in found
                found[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
            found[call["index"]]["arguments"] += call["function"]["arguments"]
    assert [*found] == [*range(len(found))]
    return [(each["name"], json.loads(each["arguments"])) for each in found.values()]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_hazard_a5_marks_that_are_special_tokens_reach_the_parser(
    model_dir: Path, name: str, cut: int
) -> None:
    for text in (TRANSCRIPTS[name], OTHERS[name]):
        client = StubClient(says(text, cuts=(cut,)))
        answer = ask(model_dir, client, name)
        (choice,) = answer["choices"]
        told = [
            (each["function"]["name"], each["function"]["arguments"])
            for each in choice["message"]["tool_calls"]
        ]
        assert [(each, json.loads(arguments)) for each, arguments in told] == TWO
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        events = ask(model_dir, StubClient(says(text, cuts=(cut,))), name, stream=True)
        assert calls_of_events(events) == TWO
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_are_told_to_the_template_and_not_where_none_is_chosen(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    ask(model_dir, client)
    answer = ask(model_dir, client, tool_choice="none")
    told = [text_of([*each.ids]) for each in client.asks]
    assert ["weather" in each for each in told] == [True, False]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_has_to_come_has_a_schema(model_dir: Path, choice: Any) -> None:
    for form in (None, {"type": "json_object"}):  # which would be that of a text
        client = StubClient(says(a))
        (made,) = ask(model_dir, client, tool_choice=choice, response_format=form)["choices"]
        assert made["finish_reason"] == "tool_calls"
        (call,) = made["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == PARIS
        schema = client.asks[0].params["json_schema"]
        assert len(schema.get("anyOf", [schema])) == (2 if choice == "required" else 1)


def test_one_call_ends_the_answer_where_several_are_not_taken(model_dir: Path) -> None:
    for cut in (1, 1000):
        client = StubClient(says(TRANSCRIPTS["hermes"], cuts=(cut,)))
        answer = ask(model_dir, client, parallel_tool_calls=False)
        (choice,) = answer["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        assert answer["usage"]["completion_tokens"] == len(ids_of(f"<tool_call>\n{a}"))
        assert client.running == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    model_dir: Path, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, **fields}
    response = post(StubClient(says("Hi")), model_dir, CHAT, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_model_whose_calls_are_not_known_gets_no_tools(model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    body = {"messages": HELLO, "tools": TOOLS}
    client, changes = StubClient(says(a)), {"chat_template": str(template)}
    response = post(client, model_dir, CHAT, body, **changes)
    assert response.status_code == 400
    assert "--tool-parser" in response.json()["error"]["message"]
    forced = post(client, model_dir, CHAT, {**body, "tool_choice": "required"}, **changes)
    assert forced.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_thoughts_are_apart_in_answers(model_dir: Path) -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    answer = ask(model_dir, StubClient(says(text)))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 8
    deltas = [
        each["choices"][0]["delta"]
        for each in ask(model_dir, StubClient(says(text, cuts=(100,))), stream=True)
    ]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "hm"
    assert "".join(each.get("content", "") for each in deltas) == "Yes."
    assert not any({"content", "reasoning_content"} <= {*each} for each in deltas)
    whole = ask(model_dir, StubClient(says(text)), separate_reasoning=False)
    assert whole["choices"][0]["message"]["content"] == text
    form = {"tools": None, "regex": ".*"}
    whole = ask(model_dir, StubClient(says(text)), **form)
    assert whole["choices"][0]["message"]["content"] == text


def test_hazard_a17_whether_an_answer_begins_in_a_thought_follows_from_the_prompt(
    model_dir: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
        "{% else %}<think>\n\n</think>\n\n{% endif %}"
    )
    for kwargs, text, thought, said in (
        ({}, "hm</think>Yes", "hm", "Yes"),
        ({"enable_thinking": True}, "hm", "hm", ""),
        ({"enable_thinking": False}, "Yes", None, "Yes"),
    ):
        body = {"messages": HELLO, "chat_template_kwargs": kwargs}
        client = StubClient(says(text))
        response = post(client, model_dir, CHAT, body, chat_template=str(template))
        message = response.json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, said)


def test_the_openai_client_joins_streamed_calls(model_dir: Path) -> None:
    client = StubClient(says(f"Wait.\n{TRANSCRIPTS['hermes']}"))
    with (
        on_a_port(client, model_dir) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as asking,
        asking.chat.completions.stream(
            model="stub",
            messages=HELLO,
            tools=TOOLS,  # type: ignore[arg-type]
        ) as stream,
    ):
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Wait.\n"
    found = [
        (each.function.name, json.loads(each.function.arguments))
        for each in message.tool_calls or ()
    ]
    assert found == TWO

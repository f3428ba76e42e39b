"""`photon-ext chat --url`: a conversation with a server, whatever that sends."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from photon_ext.cli.remote_server import base_url
from photon_ext.errors import ConfigError
from tests.cli.command import blocked_torch, run
from tests.cli.scripted_server import Reply, Scripted, Terminal, said, scripted

Talk = Callable[..., tuple[int, str, str]]
LINE_SEPARATOR = "\u2028"
TEXT = f"Zażółć {LINE_SEPARATOR} gęślą\x85 🜂\n\njaźń"


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Runs the command at an address with what the user types, line by line; then Ctrl-D."""
    monkeypatch.delenv("PHOTON_API_KEY", raising=False)

    def run_chat(server: Scripted | str, *lines: str, options: tuple[str, ...] = ()) -> object:
        rest: Iterator[str] = iter(lines)

        def read(prompt: str = "") -> str:
            if (line := next(rest, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr(builtins, "input", read)
        address = server if isinstance(server, str) else server.address
        return run(capsys, "chat", "--url", address, *options)

    return run_chat  # type: ignore[return-value]


def test_what_is_asked_is_what_was_set(talk: Talk) -> None:
    replies = [Reply(said(text)) for text in ("One.", "Two.")]
    with scripted(*replies) as server:
        options = ("--system", "Be kind.", "--temperature", "0", "--stop", "end", "--api-key", "k")
        code, out, err = talk(server, "a", "/set max_new_tokens 7", "b", options=options)
    assert (code, out, err) == (0, "One.\nTwo.\n", "")
    first, second = server.asked
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}]
    sampling = {"temperature": 0.0, "stop": ["end"]}  # the rest is as the server has it
    assert first == {"model": "first", "stream": True, "messages": turns, **sampling}
    answered = {"role": "assistant", "content": "One."}
    assert second["messages"] == [*turns, answered, {"role": "user", "content": "b"}]
    assert second["max_tokens"] == 7
    assert server.keys == ["Bearer k"] * 3


def test_a_model_that_is_named_is_asked_and_a_key_may_be_in_the_environment(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOTON_API_KEY", "one two")
    with scripted(Reply(said("Hi."))) as server:
        talk(server, "a", options=("--model", "second"))
    assert server.asked[0]["model"] == "second"
    assert server.keys == ["Bearer one"]


@pytest.mark.parametrize("size", [1, 7])
def test_an_answer_may_be_cut_anywhere(talk: Talk, size: int) -> None:
    """Within characters, lines and ends of lines; with comments, and data of several lines."""
    event = json.dumps({"choices": [{"delta": {"content": TEXT}}]}, ensure_ascii=False, indent=0)
    lines = [f"data:{' ' * (index % 2)}{line}" for index, line in enumerate(event.split("\n"))]
    stream = "\r\n".join([": ping", "event: x", *lines, "", ""]).encode() + b"".join(said("!"))
    cuts = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    with scripted(Reply(cuts)) as server:
        code, out, err = talk(server, "a")
    assert (code, out, err) == (0, f"{TEXT}!\n", "")


def test_thoughts_are_no_part_of_what_was_said(talk: Talk) -> None:
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "Hm."}}]}\n\n'
    with scripted(Reply([thought, *said("Yes.")]), Reply(said("No."))) as server:
        code, out, _ = talk(server, "a", "b")
    assert (code, out) == (0, "Yes.\nNo.\n")
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


JSON = {"Content-Type": "application/json"}
FAULTS = [
    (Reply([b'{"error": {"message": "No key."}}'], 401, JSON), "answers 401: No key.; give a key"),
    (
        Reply([b'{"error": {"message": "Full."}}'], 429, {**JSON, "Retry-After": "3"}),
        "answers 429: Full.; it asks to wait 3 s; try again later",
    ),
    (Reply([b'{"detail": "Off."}'], 503, JSON), "answers 503: Off."),
    (Reply([b"<h1>Bad\x1b[2J gateway</h1>"], 502, {}), "answers 502: <h1>Bad\ufffd[2J gateway"),
    (Reply([b"{}"], 200, JSON), "sends application/json, not a stream of events"),
    (Reply([b""], 308, {"Location": "http://127.0.0.1:9/"}), "answers 308: Permanent Redirect"),
    (
        Reply([*said("Half", end=False), b'data: {"error": {"message": "It died."}}\n\n']),
        "the answer broke off: It died.",
    ),
    (Reply([b'data: {"choices": ["x"]}\n\n']), "sends events of another shape"),
    (Reply(said("Half", end=False), breaks=True), "the server ended the connection before"),
    (Reply(said("Half", end=False)), "the server ended the connection before the answer"),
]


@pytest.mark.parametrize(("reply", "told"), FAULTS)
def test_what_goes_wrong_is_told_in_a_line_and_can_be_tried_again(
    talk: Talk, reply: Reply, told: str
) -> None:
    with scripted(reply, Reply(said("Whole."))) as server:
        code, out, err = talk(server, "a", "/retry")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("photon-ext chat: ")
    assert told in err
    assert out.splitlines()[-1] == "Whole."
    assert server.asked[0] == server.asked[1]


def test_where_no_server_is_the_command_ends(talk: Talk) -> None:
    code, out, err = talk("127.0.0.1:9", "a")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "http://127.0.0.1:9/v1 cannot be reached (ConnectionRefusedError" in err
    with scripted(models=Reply([b'{"data": []}'], headers={})) as server:
        code, _, err = talk(server, "a")
    assert (code, "lists no model; give --model" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--device", "cpu"), "--device says how a model is run here, and --url is given"),
        (("--max-len", "9"), "--max-len says"),
        (("--api-key", "a\nb"), "the API key has characters that no header holds"),
        (("--top-p", "2"), "top_p is 2.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    talk: Talk, options: tuple[str, ...], told: str
) -> None:
    code, out, err = talk("127.0.0.1:9", options=options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_urls_are_taken_as_people_write_them() -> None:
    for url in ("localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1/"):
        assert base_url(url) == "http://localhost:8000/v1"
    assert base_url("https://a.b/openai/v1") == "https://a.b/openai/v1"
    for url in ("", "ftp://a", "http://", "http://a:99999", "http://a/?b", "http://me:pw@a"):
        with pytest.raises(ConfigError, match="the URL is"):
            base_url(url)


def test_in_a_terminal_lines_are_edited_and_ctrl_c_ends_an_answer(tmp_path: Path) -> None:
    """The whole program, which needs no torch: Tab, the arrow keys, Ctrl-C, Ctrl-D."""
    blocked_torch(tmp_path, "raise ImportError('there is no torch')")
    endless = (one for _ in range(10**9) for one in said("tick ", end=False))
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "Hm."}}]}\n\n'
    hostile = said("\x1b]52;c;AAAA\x07red\x9b31m")
    with (
        scripted(Reply(endless), Reply([thought, *hostile])) as server,
        Terminal(tmp_path, "chat", "--url", server.address) as terminal,
    ):
        terminal.shows("first at http://127.0.0.1")
        terminal.asks()
        terminal.type("go on\r")
        terminal.shows("tick tick")
        terminal.type("\x03")
        assert server.left.wait(30)  # the server hears of it
        terminal.asks()
        terminal.type("\x1b[A, please\r")  # the line before
        terminal.shows("\ufffd]52;c;AAAA\ufffdred\ufffd31m\r\n")
        terminal.asks()
        assert b"\x1b[2mHm.\x1b[22m" in terminal.raw
        terminal.type("/he\t\r")
        terminal.shows("the last message again")
        terminal.asks()
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    assert "Traceback" not in terminal.screen
    first, second = ([one["content"] for one in each["messages"]] for each in server.asked)
    assert first == ["go on"]
    assert second[1].startswith("tick tick")  # what had come is kept
    assert second[2] == "go on, please"

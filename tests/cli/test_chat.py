"""`photon-ext chat`: turns are kept, answers come in pieces, Ctrl-C ends an answer alone."""

from __future__ import annotations

import builtins
import importlib.util
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from photon_ext import Engine
from photon_ext.cli import chat
from tests.cli.command import run

Messages = list[dict[str, str]]
OPTIONS = ("--device", "cpu", "--max-new-tokens", "4")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Messages]:
    """What the engine was asked, turn by turn."""
    seen: list[Messages] = []
    submit = Engine.submit

    def noted(self: Engine, prompt: Any, *rest: Any, **named: Any) -> Any:
        seen.append(prompt)
        return submit(self, prompt, *rest, **named)

    monkeypatch.setattr(Engine, "submit", noted)
    return seen


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the user types, line by line; then Ctrl-D."""
    rest: Iterator[str | type[BaseException]] = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def test_each_turn_sees_those_before(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    chat_model: str,
    asked: list[Messages],
) -> None:
    typed(monkeypatch, "w5 w6", "", "w7", "/exit", "w8")
    code, out, err = run(capsys, "chat", "--model", chat_model, "--system", "w9", *OPTIONS)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert asked == [
        [{"role": "system", "content": "w9"}, {"role": "user", "content": "w5 w6"}],
        [
            {"role": "system", "content": "w9"},
            {"role": "user", "content": "w5 w6"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "w7"},
        ],
    ]
    assert len(second.split()) == 4


def test_a_new_chat_forgets_the_turns_and_keeps_the_system_message(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    chat_model: str,
    asked: list[Messages],
) -> None:
    typed(monkeypatch, "w5", "/new", "w6")
    code, _, _ = run(capsys, "chat", "--model", chat_model, "--system", "w9", *OPTIONS)
    assert code == 0
    assert [[message["content"] for message in turn] for turn in asked] == [
        ["w9", "w5"],
        ["w9", "w6"],
    ]


def test_commands_are_not_sent_to_the_model(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    chat_model: str,
    asked: list[Messages],
) -> None:
    typed(monkeypatch, "/help", "/quit now", "/etc/w5 w6", "//help w7")
    code, _, err = run(capsys, "chat", "--model", chat_model, *OPTIONS)
    assert code == 0
    assert err.splitlines() == [chat.HELP, f"there is no command '/quit'; {chat.HELP}"]
    assert [turn[-1]["content"] for turn in asked] == ["/etc/w5 w6", "/help w7"]


def test_on_a_terminal_lines_are_edited_and_loading_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chat_model: str
) -> None:
    typed(monkeypatch)
    monkeypatch.setattr(chat, "_is_terminal", lambda: True)
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    code, _, err = run(capsys, "chat", "--model", chat_model, *OPTIONS)
    assert (code, err) == (0, f"{chat.HELP}\n")
    assert "readline" in sys.modules or importlib.util.find_spec("readline") is None
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run(capsys, "chat", "--model", chat_model, *OPTIONS)
    assert (code, err) == (0, f"loading {chat_model} ...\n{chat.HELP}\n")


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    chat_model: str,
    asked: list[Messages],
) -> None:
    pieces: list[str] = []
    say = chat.say

    def interrupted(text: str, end: str = "\n") -> None:
        say(text, end=end)
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "say", interrupted)
    typed(monkeypatch, "w5", KeyboardInterrupt, "w6")
    code, _, err = run(
        capsys, "chat", "--model", chat_model, "--device", "cpu", "--max-new-tokens", "200"
    )
    assert code == 0
    assert chat.HELP in err  # Ctrl-C where nothing is answered says what ends the chat
    kept = asked[1][1]["content"]
    assert kept.startswith("".join(pieces[:3]))
    assert len(kept.split()) < 200
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]


def test_what_does_not_fit_is_said_and_leaves_no_turn(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    chat_model: str,
    asked: list[Messages],
) -> None:
    typed(monkeypatch, "w5 " * 20, "w6 w7")
    code, out, err = run(capsys, "chat", "--model", chat_model, "--max-len", "6", "--device", "cpu")
    assert code == 0
    refused, full = err.splitlines()
    assert refused.startswith("photon-ext chat: the prompt has 21 tokens and the context holds 6")
    assert refused.endswith("; /new begins another chat")
    assert full == "[the context is full; /new begins another chat]"
    assert [message["content"] for message in asked[1]] == ["w6 w7"]
    assert len(out.split()) == 4


def test_a_wrong_option_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], chat_model: str
) -> None:
    code, out, err = run(capsys, "chat", "--model", chat_model, "--temperature", "-1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "temperature is -1.0" in err

"""`photon-ext chat`: turns are kept, answers come in pieces, Ctrl-C ends an answer alone."""

from __future__ import annotations

import builtins
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from photon_ext import Engine
from photon_ext.cli import chat, conversation
from tests.cli.command import run

Messages = list[dict[str, str]]
Talk = Callable[..., tuple[int, str, str]]
FOUR = ("--max-new-tokens", "4")


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


@pytest.fixture
def talk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chat_model: str
) -> Talk:
    """Runs `photon-ext chat` with what the user types, line by line; then Ctrl-D."""

    def run_chat(*lines: str | type[BaseException], options: Sequence[str] = FOUR) -> Any:
        rest: Iterator[str | type[BaseException]] = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(rest, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)
        return run(capsys, "chat", "--model", chat_model, "--device", "cpu", *options)

    return run_chat


def test_each_turn_sees_those_before(talk: Talk, asked: list[Messages]) -> None:
    code, out, err = talk("w5 w6", "", "w7", "/quit", "w8", options=("--system", "w9", *FOUR))
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    begun = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w5 w6"}]
    answered = {"role": "assistant", "content": first}
    assert asked == [begun, [*begun, answered, {"role": "user", "content": "w7"}]]
    assert len(second.split()) == 4


def test_a_new_chat_forgets_the_turns_and_keeps_the_system_message(
    talk: Talk, asked: list[Messages]
) -> None:
    code, _, _ = talk("w5", "/clear", "w6", options=("--system", "w9", *FOUR))
    assert code == 0
    contents = [[message["content"] for message in turn] for turn in asked]
    assert contents == [["w9", "w5"], ["w9", "w6"]]


def test_commands_are_not_sent_to_the_model(talk: Talk, asked: list[Messages]) -> None:
    code, _, err = talk("/help", "/leave now", "/etc/w5 w6", "//help w7")
    assert code == 0
    help_, unknown = err.splitlines()[:-1], err.splitlines()[-1]
    names = ["/help", "/clear", "/system", "/set", "/retry", "/save", "/quit"]
    assert [line.split()[0] for line in help_] == [*names, "Ctrl-C"]
    assert unknown.startswith("there is no command '/leave'; /help lists the commands")
    assert [turn[-1]["content"] for turn in asked] == ["/etc/w5 w6", "/help w7"]


def test_settings_hold_from_the_next_answer_on(talk: Talk) -> None:
    lines = ("w5", "/set max_tokens 2", "w5", "/set max_new_tokens", "w5", "/set stop w1", "/set")
    code, out, err = talk(*lines, options=("--max-new-tokens", "4", "--temperature", "0"))
    assert code == 0
    first, second, third = (len(line.split()) for line in out.splitlines())
    assert (first, second) == (4, 2)
    assert third > 200  # as far as the context goes
    assert "max_new_tokens 512, temperature 0.0, seed (not set)" in err
    assert "stop ('w1',)" in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temperature hot", "temperature is 'hot'; give 0 for greedy decoding, or a number"),
        ("/set top-p 2", "top_p is 2.0; give a number from"),
        ("/set warmth 1", "there is no setting 'warmth'; there are max_new_tokens, temperature"),
        ("/retry", "nothing has been asked yet"),
        ("/save", "/save has no file; name one"),
        ("/save /proc/x", "'/proc/x' cannot be written (No such file or directory); name another"),
    ],
)
def test_a_command_that_cannot_be_followed_says_why(talk: Talk, line: str, told: str) -> None:
    code, out, err = talk(line)
    assert (code, out, err.count("\n")) == (0, "", 1)
    assert told in err


def test_the_last_message_is_asked_again_and_the_chat_saved(
    talk: Talk, asked: list[Messages], tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    save = f"/save {path}"
    code, out, err = talk("w5", "w6", "/system w9", "/retry", save, save, "/system", "w7")
    assert code == 0
    first, _, again, _ = out.splitlines()
    assert [message["content"] for message in asked[2]] == ["w9", "w5", first, "w6"]
    assert json.loads(path.read_text()) == [*asked[2], {"role": "assistant", "content": again}]
    assert f"'{path}' cannot be written (File exists); name another" in err
    assert [message["role"] for message in asked[3]][::2] == ["user"] * 3


def test_on_a_terminal_lines_are_edited_and_loading_is_told(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, chat_model: str
) -> None:
    monkeypatch.setattr(chat, "_is_terminal", lambda: True)
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    code, _, err = talk()
    assert (code, err) == (0, f"{chat_model}. {chat.HINT}\n")
    assert "readline" in sys.modules or importlib.util.find_spec("readline") is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = talk()
    assert (code, err) == (0, f"loading {chat_model} ...\n{chat_model}. {chat.HINT}\n")


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, asked: list[Messages]
) -> None:
    pieces: list[str] = []
    say = conversation.say

    def interrupted(text: str, end: str = "\n") -> None:
        say(text, end=end)
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation, "say", interrupted)
    code, _, err = talk("w5", KeyboardInterrupt, "w6", options=("--max-new-tokens", "200"))
    assert code == 0
    assert chat.HINT in err  # Ctrl-C where nothing is answered says what ends the chat
    kept = asked[1][1]["content"]
    assert kept.startswith("".join(pieces[:3]))
    assert len(kept.split()) < 200
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]


def test_what_does_not_fit_is_said_and_leaves_no_turn(talk: Talk, asked: list[Messages]) -> None:
    code, out, err = talk("w5 " * 20, "w6 w7", options=("--max-len", "6"))
    assert code == 0
    refused, full = err.splitlines()
    assert refused.startswith("photon-ext chat: the prompt has 21 tokens and the context holds 6")
    assert refused.endswith("; /clear begins another chat")
    assert full == "[the context is full; /clear begins another chat]"
    assert [message["content"] for message in asked[1]] == ["w6 w7"]
    assert len(out.split()) == 4


def test_a_wrong_option_is_told_in_one_line(talk: Talk) -> None:
    code, out, err = talk(options=("--temperature", "-1"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "temperature is -1.0" in err

"""Conversation: the turns of a chat, with a model here or at a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from photon_ext.cli.terminal import complain, printable, say
from photon_ext.errors import PhotonError

Message: TypeAlias = dict[str, str]
_FAINT, _PLAIN = "\x1b[2m", "\x1b[22m"


class AnswerFailed(PhotonError):
    """There is no answer, or it broke off."""


class Piece(NamedTuple):
    """
    Attributes:
        text: what comes next in an answer.
        is_thought: the model thinks, and does not answer yet.
        note: what the user should know of the end of the answer.
    """

    text: str
    is_thought: bool = False
    note: str = ""


class Model(Protocol):
    """Who answers."""

    def answer(
        self, messages: list[Message], given: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """Closing the generator ends the answer. `given`: keywords of
        SamplingParams. Raises AnswerFailed.
        """


class Conversation:
    """
    Attributes:
        messages: the turns so far, but for the system message.
        system: its text; "": there is none.
    """

    def __init__(self, model: Model, system: str | None) -> None:
        self.system = system or ""
        self.messages: list[Message] = []
        self._model = model
        self._last: tuple[list[Message], str] | None = None  # the turns before it, and what it was

    def clear(self) -> None:
        """Forgets all turns."""
        self.messages, self._last = [], None

    def turn(self, text: str, given: Mapping[str, Any]) -> None:
        """Prints the answer to `text`. One that failed leaves no turn behind; one that Ctrl-C
        ended stays as far as it came.
        """
        self._last = self.messages, text
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            said = self._say_answer(asked, given)
        except AnswerFailed as error:
            complain(f"photon-ext chat: {error}")
            return
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def retry(self, given: Mapping[str, Any]) -> None:
        """Asks once more what was asked last, whether it was answered or not."""
        if self._last is None:
            complain("nothing has been asked yet")
            return
        self.messages, text = self._last
        self.turn(text, given)

    def save(self, path: Path) -> None:
        """Writes all messages as JSON, to a new file. Raises OSError, ValueError."""
        text = json.dumps(self._whole(self.messages), indent=2, ensure_ascii=False)
        content = f"{text}\n".encode()
        with path.open("xb") as file:
            file.write(content)

    def _whole(self, messages: list[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def _say_answer(self, messages: list[Message], given: Mapping[str, Any]) -> str:
        """Prints pieces as they come; Ctrl-C ends them. Raises AnswerFailed."""
        answer = _Answer()
        try:
            with closing(self._model.answer(self._whole(messages), given)) as pieces:
                for piece in pieces:
                    answer.say(piece)
        except AnswerFailed:
            if answer.begun:
                answer.end()
            raise
        except KeyboardInterrupt:
            pass
        answer.end()
        return answer.text


class _Answer:
    """An answer on the terminal. Thoughts are shown faint, and only on a terminal.

    Attributes:
        text: what was said, without thoughts.
        begun: something is on the terminal.
    """

    def __init__(self) -> None:
        self.text = ""
        self.begun = self._thinking = False
        self._notes: list[str] = []
        self._terminal = sys.stdout.isatty()

    def say(self, piece: Piece) -> None:
        if piece.note:
            self._notes.append(piece.note)
        if not piece.is_thought:
            self._show_thinking(False)
            self.text += piece.text
            self._print(piece.text)
        elif self._terminal:
            self._show_thinking(True)
            self._print(piece.text)

    def end(self) -> None:
        self._show_thinking(False)
        say("")
        for note in self._notes:
            complain(f"[{note}]")

    def _print(self, text: str) -> None:
        self.begun = True
        say(printable(text) if self._terminal else text, end="")

    def _show_thinking(self, thinking: bool) -> None:
        if thinking != self._thinking:
            self._thinking = thinking
            say(_FAINT if thinking else f"{_PLAIN}\n\n", end="")

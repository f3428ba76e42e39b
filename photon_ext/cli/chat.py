"""`photon-ext chat`: a conversation in the terminal, which the model sees whole at each turn."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from photon_ext.cli.model import open_engine, sampling_params
from photon_ext.cli.terminal import complain, say
from photon_ext.engine import Engine, Output, Request
from photon_ext.errors import RequestError, shown
from photon_ext.sampling import SamplingParams

EXIT, NEW, TELL = "/exit", "/new", "/help"
HELP = (
    f"{EXIT} or Ctrl-D ends the chat, {NEW} begins another, Ctrl-C ends an answer, // begins a "
    "line that is sent with one /"
)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    params = sampling_params(arguments)
    with open_engine(arguments) as engine:
        if _is_terminal():
            _edit_lines()
            complain(HELP)
        chat = Chat(engine, params, arguments.system)
        while (text := _read()) not in (None, EXIT):
            if text == NEW:
                chat.begin()
            elif text == TELL:
                complain(HELP)
            elif (command := _command(text)) is not None:
                complain(f"there is no command {shown(command)}; {HELP}")
            elif text:
                chat.turn(text.replace("//", "/", 1) if text.startswith("//") else text)
    return 0


class Chat:
    """The turns so far."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine, self._params, self._system = engine, params, system
        self.begin()

    def begin(self) -> None:
        """Forgets all turns but the system message."""
        self._messages = [] if self._system is None else [self._message("system", self._system)]

    def turn(self, text: str) -> None:
        """Prints the answer to `text`. One that failed, or was refused, leaves no turn behind; one
        that Ctrl-C ended stays as far as it came.
        """
        asked = [*self._messages, self._message("user", text)]
        try:
            request = self._engine.submit(asked, self._params)
        except RequestError as error:
            complain(f"photon-ext chat: {error}; {NEW} begins another chat")
            return
        output = _answer(request)
        if output.error is not None:
            complain(f"photon-ext chat: {output.error}")
            return
        if output.stop_reason == "max_len":
            complain(f"[the context is full; {NEW} begins another chat]")
        self._messages = [*asked, self._message("assistant", output.text)]

    @staticmethod
    def _message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}


def _answer(request: Request) -> Output:
    """Streams the answer; Ctrl-C ends it."""
    try:
        for event in request.iter():
            say(event.text, end="")
    except KeyboardInterrupt:
        request.cancel()
    output = request.result()
    say("")
    return output


def _read() -> str | None:
    """The user's next line; None at the end. Ctrl-C drops what was typed."""
    while True:
        try:
            return (input("> ") if _is_terminal() else input()).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            say("")
            complain(HELP)
        except (UnicodeDecodeError, RuntimeError) as error:  # the latter: stdin is closed
            raise RequestError(f"stdin cannot be read ({error}); send text") from error


def _command(text: str | None) -> str | None:
    """A first word such as /help; a path has another / or a dot."""
    word = (text or "").partition(" ")[0]
    return word if word[:1] == "/" and word[1:].isalpha() else None


def _edit_lines() -> None:
    """From here on `input` knows the keys of an editor, and the lines before."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()

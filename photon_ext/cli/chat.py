"""`photon-ext chat`: a conversation in the terminal, which the model sees whole at each turn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from photon_ext.cli.arguments import CHAT_TOKENS
from photon_ext.cli.chat_settings import NAMES, ChatSettings
from photon_ext.cli.conversation import Conversation, Model
from photon_ext.cli.terminal import complain, printable, say
from photon_ext.errors import ConfigError, RequestError, shown

DEFAULT_MODEL = "smollm2"
HINT = "/help lists the commands; Ctrl-C ends an answer, Ctrl-D the chat"
_SLASHES = "// begins a message that is sent with one /"
# what says how a model is run here
_ENGINE_DEFAULTS = {
    "device": "auto",
    "dtype": None,
    "quantize": None,
    "kv_dtype": None,
    "depth": 2,
    "backend": None,
    "max_len": None,
}


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    own = {name: getattr(arguments, name) for name in NAMES}
    given = {name: value for name, value in own.items() if value not in (None, [])}
    if arguments.url is not None:
        _check_remote(arguments)
        settings = ChatSettings(given, {})
        from photon_ext.cli.remote_model import RemoteModel, RemoteServer

        remote = RemoteModel(RemoteServer(arguments.url, arguments.api_key), arguments.model)
        return _chat(remote, settings, arguments.system, f"{remote.name} at {arguments.url}")
    if arguments.api_key is not None:
        raise ConfigError("--api-key goes with --url; a model that runs here asks for none")
    settings = ChatSettings(given, {"max_new_tokens": CHAT_TOKENS})
    from photon_ext.cli.local_model import LocalModel
    from photon_ext.cli.model import open_engine

    arguments.model = arguments.model or DEFAULT_MODEL
    with open_engine(arguments) as engine:
        return _chat(LocalModel(engine), settings, arguments.system, arguments.model)


def _check_remote(arguments: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for name, default in _ENGINE_DEFAULTS.items():
        if getattr(arguments, name) != default:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} says how a model is run here, and --url is given; leave it")


def _chat(model: Model, settings: ChatSettings, system: str | None, name: str) -> int:
    chat = Chat(Conversation(model, system), settings)
    if _is_terminal():
        chat.edit_lines()
        complain(printable(f"{name}. {HINT}"))
    while not chat.is_over and (text := _read()) is not None:
        with suppress(KeyboardInterrupt):  # which came when an answer had ended
            chat.take(text)
    return 0


class Command(NamedTuple):
    """
    Attributes:
        run: gets what stands behind the command's name.
        argument: what that is.
    """

    run: Callable[[str], None]
    argument: str
    help: str


class Chat:
    """What a user types is a command, or a message.

    Attributes:
        is_over: the user has left.
    """

    def __init__(self, conversation: Conversation, settings: ChatSettings) -> None:
        self.is_over = False
        self._conversation = conversation
        self._settings = settings
        self._commands = {
            "/help": Command(self._help, "", "this list"),
            "/clear": Command(self._clear, "", "begins a new conversation"),
            "/system": Command(self._system, "TEXT", "the system message from here on"),
            "/set": Command(self._set, "NAME VALUE", "such as seed 7; alone: tells all"),
            "/retry": Command(self._retry, "", "asks the last message again"),
            "/save": Command(self._save, "FILE", "writes the conversation as JSON"),
            "/quit": Command(self._quit, "", "ends the chat, as does Ctrl-D"),
        }

    def take(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word in self._commands:
            try:
                self._commands[word].run(rest.strip())
            except ConfigError as error:
                complain(f"photon-ext chat: {error}")
        elif word[:1] == "/" and word[1:].isalpha():  # a path has another / or a dot
            complain(f"there is no command {shown(word)}; {HINT}; {_SLASHES}")
        elif text:
            message = text.removeprefix("/") if text.startswith("//") else text
            self._conversation.turn(message, self._settings.given)

    def edit_lines(self) -> None:
        """From here on `input` knows the keys of an editor, the lines before, and commands, which
        Tab completes.
        """
        with suppress(ImportError):  # not on every system
            import readline

            def complete(text: str, state: int) -> str | None:
                begun = text == readline.get_line_buffer()
                fits = [name for name in self._commands if begun and name.startswith(text or "/")]
                return fits[state] if state < len(fits) else None

            readline.set_completer_delims(" ")
            readline.set_completer(complete)
            readline.parse_and_bind("tab: complete")

    def _help(self, rest: str) -> None:
        for name, command in self._commands.items():
            complain(f"{f'{name} {command.argument}':18} {command.help}")
        complain(f"Ctrl-C ends an answer, and {_SLASHES}")

    def _clear(self, rest: str) -> None:
        self._conversation.clear()

    def _system(self, rest: str) -> None:
        self._conversation.system = rest
        if not rest:
            complain("there is no system message from here on")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name:
            self._settings.set(name, value.strip())
        else:
            complain(self._settings.told())

    def _retry(self, rest: str) -> None:
        self._conversation.retry(self._settings.given)

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save has no file; name one")
        try:
            self._conversation.save(Path(rest).expanduser())
        except (OSError, ValueError, RuntimeError) as error:
            told = getattr(error, "strerror", None) or error
            raise ConfigError(f"{shown(rest)} cannot be written ({told}); name another") from error

    def _quit(self, rest: str) -> None:
        self.is_over = True


def _read() -> str | None:
    """The user's next line; None at the end. Ctrl-C drops what was typed."""
    while True:
        try:
            return (input("> ") if _is_terminal() else input()).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            say("")
            complain(HINT)
        except (UnicodeDecodeError, RuntimeError) as error:  # the latter: stdin is closed
            raise RequestError(f"stdin cannot be read ({error}); send text") from error


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()

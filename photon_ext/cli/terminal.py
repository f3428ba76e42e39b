"""What the commands print, and where."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from photon_ext.errors import PhotonError

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class OutputError(PhotonError):
    """stdout cannot be written."""


def check_streams() -> None:
    """Before anything is written. A stderr that is closed is one that nobody reads.

    Raises:
        OutputError: stdout is closed.
    """
    if sys.stderr is None:  # to print, None would mean stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stdout is None:
        raise OutputError("stdout is closed; open it, or send it to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a character that the terminal does not have is no reason to stop
        sys.stdout.reconfigure(errors="replace")


def say(text: str, end: str = "\n") -> None:
    """Prints to stdout, at once.

    Raises:
        BrokenPipeError: its reader has left. OutputError: it cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"stdout cannot be written ({error.strerror}); send it to where there is room"
        ) from error


def printable(text: str) -> str:
    """For a terminal, which a model must not move about in, or give commands to: control
    characters but for ends of lines and tabs are shown as U+FFFD.
    """
    return text.translate(_CONTROLS)


def complain(text: str) -> None:
    """Prints to stderr; where that cannot be written, nobody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """What is written to `stream`, what it still holds included, goes nowhere from here on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)

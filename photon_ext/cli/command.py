"""Runs one command: what goes wrong becomes one line on stderr and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, cast

from photon_ext.cli import INTERRUPTED, starting
from photon_ext.cli.arguments import WRONG, make_parser
from photon_ext.cli.terminal import OutputError, check_streams, complain, drop
from photon_ext.errors import PhotonError, shortened

DONE = 0
# torch has an exception of its own for a GPU's memory only
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
MOST_SHOWN = 2000  # characters of a message: a model's file may put any text into one


class Missing(PhotonError):
    """What the command needs is not installed, or not built."""


def run(argv: Sequence[str] | None) -> int:
    """Parses the arguments and runs the command; returns its exit code."""
    name = "photon-ext"
    try:
        check_streams()
        arguments = make_parser().parse_args(argv)
        name = f"photon-ext {arguments.command}"
        return _imported(arguments.command, _needs_torch(arguments))(arguments)
    except (PhotonError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, PhotonError) or _is_out_of_memory(error)):
            raise
        complain(f"{name}: {_one_line(error, name)}")
        if isinstance(error, OutputError) and sys.stdout is not None:
            drop(sys.stdout)
        return WRONG
    except BrokenPipeError:  # the reader of our output has left
        drop(sys.stdout)
        return DONE
    except KeyboardInterrupt:
        complain("\ninterrupted")
        return INTERRUPTED


def _needs_torch(arguments: argparse.Namespace) -> bool:
    """`info` does without, `serve` leaves it to its children, a chat and `bench` to a server."""
    return arguments.command not in ("info", "serve") and getattr(arguments, "url", None) is None


def _imported(command: str, needs_torch: bool) -> Callable[..., int]:
    """`run` of the command's module.

    Raises:
        Missing: a package that it needs cannot be imported.
    """
    with starting():
        try:
            if needs_torch:
                import_module("photon_ext._library")
            return cast("Callable[..., int]", import_module(f"photon_ext.cli.{command}").run)
        except ImportError as error:
            _refuse(error)


def _refuse(error: ImportError) -> NoReturn:
    raise Missing(f"{error}; photon-ext info says what is missing") from error


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or (isinstance(error, RuntimeError) and OUT_OF_MEMORY in str(error))
    )


def _one_line(error: BaseException, name: str) -> str:
    text = shortened(" ".join(str(error).split()), MOST_SHOWN)
    lower = "--batch" if name.endswith("trace") else "--max-len"
    return f"out of memory: {text}; lower {lower}" if _is_out_of_memory(error) else text

"""The files of a model directory: what may be opened at all, and those that hold text."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from photon_ext.errors import ModelError, shortened

_KINDS = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}


def present(path: Path) -> bool:
    """Whether there is something at `path`.

    Raises:
        ModelError: the system does not say, or there is a link that leads nowhere. To pass over it
            would lose a chat template or end tokens without a word.
    """
    try:
        if path.exists():
            return True
    except OSError as error:  # the name is too long, or a folder may not be entered
        raise ModelError(
            f"{shortened(str(path))}: cannot be looked for ({error.strerror}); give the path of a "
            "directory that this process may read"
        ) from error
    if path.is_symlink():
        target = shortened(os.readlink(path))
        raise ModelError(
            f"{path}: is a link to {target}, which is not there; get that file, or remove the link"
        )
    return False


def check_regular(path: Path) -> None:
    """Raises ModelError, naming the file, where there is something else than a regular file.

    Whoever opens a FIFO waits without end.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # whoever opens it says so
        return
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "a device")
        raise ModelError(
            f"{path}: is {kind}, expected a regular file; copy the model's own file there"
        )


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ModelError, naming the file, where it is missing or is not one."""
    if not present(path):
        raise ModelError(
            f"{path}: no such file; a Hugging Face model directory has one, copy it there"
        )
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"{path}: not a readable UTF-8 file ({shortened(str(error))}); download it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError, naming the file, where it is missing or is not one."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """A JSON object from the text of a file; ModelError, naming the file, where it is not one."""
    try:
        value = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: an integer of more digits than Python reads, too
        raise ModelError(
            f"{path}: not a readable JSON file ({shortened(str(error))}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(
            f"{path}: expected a JSON object, found {type(value).__name__}; download it again"
        )
    return value

"""Reading the files of a model directory: what may be opened at all, and the small ones that
hold text.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from photon_ext.errors import ModelError

_KINDS = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}


def check_regular(path: Path) -> None:
    """Raises ModelError, naming the file, where there is something else than a regular file: a
    FIFO would be waited for without end.
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
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{path}: no such file; a Hugging Face model directory has one, copy it there"
        ) from None
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"{path}: not a readable UTF-8 file ({error}); download it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError, naming the file, where it is missing or is not one."""
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(
            f"{path}: not a readable JSON file ({error}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(
            f"{path}: expected a JSON object, found {type(value).__name__}; download it again"
        )
    return value

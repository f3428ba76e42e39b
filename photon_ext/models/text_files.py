"""Reading the small text files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from photon_ext.errors import ModelError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ModelError, naming the file, where it is missing or is not one."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a Hugging Face model directory has one, copy it there") from None
    except (OSError, UnicodeError) as error:
        raise ModelError(f"{path}: not a readable UTF-8 file ({error}); download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError, naming the file, where it is missing or is not one."""
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not a readable JSON file ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}; download it again")
    return value

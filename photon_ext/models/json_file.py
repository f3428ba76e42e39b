"""Reading the small JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from photon_ext.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError, naming the file, where it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a Hugging Face model directory has one, copy it there") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not JSON
        raise ModelError(f"{path}: not a readable JSON file ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}; download it again")
    return value

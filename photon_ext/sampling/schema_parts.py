"""The parts of a JSON schema, which is given as Python values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# keywords whose value holds schemas by name, and those whose value is data
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "enum", "default", "examples"})


def objects_in(value: object) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value, those within others included."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            yield value


def schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    """All schemas of one, itself included, and not the data in them; their items may be changed."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in _NAMED and isinstance(value, dict):
                    pending += value.values()
                elif name not in _DATA:
                    pending.append(value)
            yield part


def referred(root: Any, target: object) -> Any:
    """Where a reference within the document `root` leads. Raises LookupError: nowhere, or into
    another document.
    """
    if not isinstance(target, str) or (target != "#" and not target.startswith("#/")):
        raise LookupError("it refers to another document")
    for name in target.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        try:
            root = root[int(name)] if isinstance(root, list) else root[name]
        except (LookupError, TypeError, ValueError) as error:
            raise LookupError("a reference leads nowhere") from error
    return root

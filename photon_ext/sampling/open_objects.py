"""Objects whose schema says nothing about properties that it does not name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from photon_ext.sampling.schema_parts import referred, schemas_in

_SAID = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_CHOICES = ("anyOf", "oneOf")
# what may name properties
_NAMING = {"properties", "$ref", "allOf", *_CHOICES}


def close_objects(schema: dict[str, Any]) -> None:
    """Lets objects have no properties but those that the schema names. Those that name none stay
    open, as do those that several schemas describe together (allOf, or beside $ref, anyOf, oneOf):
    each names a part.
    """
    together = _described_together(schema)
    for part in schemas_in(schema):
        names = part.get("properties")
        if not isinstance(names, dict) or part.keys() & _SAID or id(part) in together:
            continue
        if all(name in names for name in _listed(part.get("required"))):
            part["additionalProperties"] = False


def _described_together(root: dict[str, Any]) -> set[int]:
    """The ids of the schemas of values that another one describes as well."""
    pending: list[dict[str, Any]] = []
    for part in schemas_in(root):
        all_of = sum(map(_may_name, _listed(part.get("allOf"))))
        choices = sum(any(map(_may_name, _listed(part.get(name)))) for name in _CHOICES)
        if all_of + choices + ("$ref" in part) + ("properties" in part) > 1:
            pending.append(part)
    found: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) not in found:
            found.add(id(part))
            pending += _in_place(root, part)
    return found


def _may_name(part: object) -> bool:
    return isinstance(part, dict) and not part.keys().isdisjoint(_NAMING)


def _in_place(root: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the same value within one."""
    found = [one for name in ("allOf", *_CHOICES) for one in _listed(part.get(name))]
    with suppress(LookupError):  # there is none, or the library will say so
        found.append(referred(root, part.get("$ref")))
    return [one for one in found if isinstance(one, dict)]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

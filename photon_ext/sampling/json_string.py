"""JSON strings as patterns: characters as they are written between quotation marks, and the texts
of `pattern` and `format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from photon_ext.sampling.pattern import (
    Characters,
    Either,
    Joined,
    NotRegular,
    Pattern,
    Repeated,
    joined,
    literal,
    without,
)
from photon_ext.sampling.regex_pattern import regex_pattern, search_pattern

_ESCAPED = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_SPECIAL = (*range(32), 34, 92, 127)
_HEX = Characters(((48, 57), (65, 70), (97, 102)))
_PLAIN = without((code, code) for code in _SPECIAL)
_ANY_SPECIAL = (
    joined("\\", Characters(tuple(sorted((ord(c), ord(c)) for c in _ESCAPED.values())))),
    joined("\\u00", Characters(((48, 49),)), _HEX),
    joined("\\u007", Characters(((70, 70), (102, 102)))),
)
_CHARACTER = Either((Characters(_PLAIN), *_ANY_SPECIAL))

_DAYS = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    "02-(0[1-9]|[12][0-9]))"
)
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_DATE = f"[0-9]{{4}}-{_DAYS}"
_TIME = rf"{_HOURS}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_HOURS})"
_BYTE = "([0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}
"""After RFC 3339, RFC 2673 and RFC 9562."""


def string_pattern(schema: Mapping[str, Any]) -> Pattern:
    """The strings of a schema, with quotation marks. Raises NotRegular."""
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    form = schema.get("pattern"), schema.get("format")
    if form == (None, None):
        return joined('"', Repeated(_CHARACTER, least, None if most is None else int(most)), '"')
    if len(schema) > 1:
        raise NotRegular(f"a string has {' and '.join(sorted(schema))}")
    pattern, name = form
    if pattern is not None:
        return joined('"', _quoted(search_pattern(pattern)), '"')
    if name not in _FORMATS:
        raise NotRegular(f"a string has the format {name}")
    return joined('"', _quoted(regex_pattern(_FORMATS[name])), '"')


def string_constant(text: str) -> Pattern:
    """One string, with quotation marks."""
    return joined('"', _quoted(literal(text)), '"')


def _quoted(pattern: Pattern) -> Pattern:
    """The same texts as they are written in a string."""
    if isinstance(pattern, Characters):
        return _quoted_characters(pattern)
    if isinstance(pattern, Repeated):
        return pattern._replace(part=_quoted(pattern.part))
    parts = tuple(map(_quoted, pattern.parts))
    return Joined(parts) if isinstance(pattern, Joined) else Either(parts)


def _quoted_characters(pattern: Characters) -> Pattern:
    forbidden = without(pattern.ranges)
    plain = Characters(without([*forbidden, *((code, code) for code in _SPECIAL)]))
    special = [c for c in _SPECIAL if not any(low <= c <= high for low, high in forbidden)]
    if not special:
        return plain
    if len(special) == len(_SPECIAL):
        return Either((plain, *_ANY_SPECIAL))
    return Either((plain, *(form for code in special for form in _special(code))))


def _special(code: int) -> list[Pattern]:
    """The ways to write a character that cannot stand for itself."""
    forms = ["\\" + _ESCAPED[code]] if code in _ESCAPED else []
    if code not in (34, 92):
        forms += [f"\\u{code:04x}", f"\\u{code:04X}"]
    return [literal(form) for form in dict.fromkeys(forms)]

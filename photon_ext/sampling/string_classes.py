"""Regular expressions of JSON strings, as llguidance takes them at their word.

A class with all control characters and without the quotation mark or the backslash, such as
`[^"]`, matches these two all the same: the library writes control characters as escapes, all of
them as any escape. Such a class goes without U+0000, and is then read character by character.
"""

from __future__ import annotations

from photon_ext.sampling.pattern import (
    Characters,
    Joined,
    NotRegular,
    Pattern,
    Ranges,
    Repeated,
    without,
)
from photon_ext.sampling.regex_pattern import search_pattern

_CONTROLS = {*range(32)} - {10}  # a line end is apart
_QUOTED = (34, 92)


def served_regex(regex: str) -> str:
    """A schema's `pattern` that the library serves as it is meant; as it is where it has no such
    class, or is not read here.
    """
    try:
        pattern = search_pattern(regex)
        return f"^{_text(pattern)}$" if _is_widened(pattern) else regex
    except (NotRegular, RecursionError):
        return regex


def _is_widened(pattern: Pattern) -> bool:
    """Whether it has a class that matches more than it says."""
    if isinstance(pattern, Characters):
        return _all_in(_CONTROLS, pattern.ranges) and not _all_in(_QUOTED, pattern.ranges)
    if isinstance(pattern, Repeated):
        return _is_widened(pattern.part)
    return any(map(_is_widened, pattern.parts))


def _all_in(codes: set[int] | tuple[int, ...], ranges: Ranges) -> bool:
    return all(any(first <= code <= last for first, last in ranges) for code in codes)


def _text(pattern: Pattern) -> str:
    """The pattern as a regular expression."""
    if isinstance(pattern, Characters):
        ranges = pattern.ranges
        if _is_widened(pattern):
            ranges = without([*without(ranges), (0, 0)])
        if not ranges:
            raise NotRegular("a class without characters")
        return f"[{''.join(f'{_escaped(first)}-{_escaped(last)}' for first, last in ranges)}]"
    if isinstance(pattern, Repeated):
        most = "" if pattern.most is None else pattern.most
        return f"(?:{_text(pattern.part)}){{{pattern.least},{most}}}"
    if len(pattern.parts) == 1:
        return _text(pattern.parts[0])
    separator = "" if isinstance(pattern, Joined) else "|"
    return f"(?:{separator.join(map(_text, pattern.parts))})"


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 128 else chr(code)

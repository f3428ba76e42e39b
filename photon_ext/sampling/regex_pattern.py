"""Regular expressions as patterns: those that mean the same in Rust's syntax and in Python's, whose
parser reads them. A check against the host's masks follows (sampling/token_automaton.py), so that
a difference that is overlooked here costs speed alone.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from photon_ext.sampling.pattern import (
    Characters,
    Either,
    Joined,
    NotRegular,
    Pattern,
    Ranges,
    Repeated,
    without,
)

if sys.version_info >= (3, 11):
    import re._constants as codes
    import re._parser as parser
else:
    import sre_constants as codes
    import sre_parse as parser

_LINE_END = ((10, 10),)
_ANYTHING = Repeated(Characters(without(())), 0, None)
_DIGIT: dict[Any, Ranges] = {codes.CATEGORY_DIGIT: ((48, 57),)}
_WORD: dict[Any, Ranges] = {codes.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122))}
_PLAIN_FLAGS = re.UNICODE


def regex_pattern(text: str) -> Pattern:
    """The texts that a regular expression matches from begin to end. Raises NotRegular: it has
    something that is not read here.
    """
    return _Reader(_DIGIT).joined(_parsed(text))


def search_pattern(text: str) -> Pattern:
    """The texts in which a regular expression is found, as a schema's `pattern` has it: where it
    does not begin with ^, or end with $, there may be anything. Raises NotRegular.
    """
    items = list(_parsed(text))
    begins = bool(items) and items[0] == (codes.AT, codes.AT_BEGINNING)
    ends = len(items) > begins and items[-1] == (codes.AT, codes.AT_END)
    inner = _Reader({**_DIGIT, **_WORD}).joined(items[begins : len(items) - ends])
    parts = [] if begins else [_ANYTHING]
    return Joined((*parts, inner, *([] if ends else [_ANYTHING])))


def _parsed(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # set operations, which Rust has
            tree = parser.parse(text)
    except (re.error, FutureWarning, DeprecationWarning, OverflowError, RecursionError) as error:
        raise NotRegular(f"a regular expression is not read on the device ({error})") from error
    if tree.state.flags & ~_PLAIN_FLAGS:
        raise NotRegular("a regular expression has flags")
    return tree


class _Reader:
    """Reads what the parser gives, with these classes."""

    def __init__(self, classes: Mapping[Any, Ranges]) -> None:
        self._classes = classes
        self._readers: dict[Any, Callable[[Any], Pattern]] = {
            codes.LITERAL: lambda value: Characters(((value, value),)),
            codes.NOT_LITERAL: lambda value: Characters(without([(value, value)])),
            codes.ANY: lambda value: Characters(without(_LINE_END)),
            codes.IN: self._set,
            codes.BRANCH: lambda value: Either(tuple(map(self.joined, value[1]))),
            codes.SUBPATTERN: self._group,
            codes.MAX_REPEAT: self._repeat,
            codes.MIN_REPEAT: self._repeat,
        }

    def joined(self, items: Any) -> Pattern:
        return Joined(tuple(self._item(code, value) for code, value in items))

    def _item(self, code: Any, value: Any) -> Pattern:
        read = self._readers.get(code)
        if read is None:
            raise NotRegular(f"a regular expression has {str(code).lower().replace('_', ' ')}")
        return read(value)

    def _repeat(self, value: Any) -> Pattern:
        least, most, items = value
        return Repeated(self.joined(items), least, None if most is codes.MAXREPEAT else int(most))

    def _group(self, value: Any) -> Pattern:
        _, added, removed, items = value
        if added or removed:
            raise NotRegular("a regular expression has flags")
        return self.joined(items)

    def _set(self, items: Any) -> Pattern:
        negated = items[0][0] is codes.NEGATE
        ranges: list[tuple[int, int]] = []
        for code, value in items[negated:]:
            if code is codes.LITERAL:
                ranges.append((value, value))
            elif code is codes.RANGE:
                ranges.append(value)
            elif code is codes.CATEGORY and value in self._classes:
                ranges += self._classes[value]
            else:
                raise NotRegular("a regular expression has a class such as \\w or \\s")
        return Characters(without(ranges) if negated else without(without(ranges)))

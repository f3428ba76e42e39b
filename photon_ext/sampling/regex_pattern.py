"""Regular expressions as patterns: those that mean the same in Rust's syntax and in Python's, whose
parser reads them. A check against the host's masks follows (engine/compiled_automaton.py), so that
a difference that is overlooked here costs speed alone.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
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
_DIGITS = ((48, 57),)
_PLAIN_FLAGS = re.UNICODE


def regex_pattern(text: str) -> Pattern:
    """The texts that a regular expression matches from begin to end. Raises NotRegular: it has
    something that is not read here.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # set operations, which Rust has
            tree = parser.parse(text)
    except (re.error, FutureWarning, DeprecationWarning, OverflowError, RecursionError) as error:
        raise NotRegular(f"the regular expression is not read on the device ({error})") from error
    if tree.state.flags & ~_PLAIN_FLAGS:
        raise NotRegular("the regular expression has flags")
    return _joined(tree)


def _joined(items: Any) -> Pattern:
    return Joined(tuple(_item(code, value) for code, value in items))


def _item(code: Any, value: Any) -> Pattern:
    read = _READERS.get(code)
    if read is None:
        raise NotRegular(f"the regular expression has {str(code).lower().replace('_', ' ')}")
    return read(value)


def _branch(value: Any) -> Pattern:
    return Either(tuple(map(_joined, value[1])))


def _repeat(value: Any) -> Pattern:
    least, most, items = value
    return Repeated(_joined(items), least, None if most is codes.MAXREPEAT else int(most))


def _group(value: Any) -> Pattern:
    _, added, removed, items = value
    if added or removed:
        raise NotRegular("the regular expression has flags")
    return _joined(items)


def _set(items: Any) -> Pattern:
    negated = items[0][0] is codes.NEGATE
    ranges: list[tuple[int, int]] = []
    for code, value in items[negated:]:
        if code is codes.LITERAL:
            ranges.append((value, value))
        elif code is codes.RANGE:
            ranges.append(value)
        elif (code, value) == (codes.CATEGORY, codes.CATEGORY_DIGIT):
            ranges += _DIGITS
        else:
            raise NotRegular("the regular expression has a class such as \\w or \\s")
    return Characters(without(ranges) if negated else _merged(ranges))


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    return without(without(ranges))


_READERS: dict[Any, Callable[[Any], Pattern]] = {
    codes.LITERAL: lambda value: Characters(((value, value),)),
    codes.NOT_LITERAL: lambda value: Characters(without([(value, value)])),
    codes.ANY: lambda value: Characters(without(_LINE_END)),
    codes.IN: _set,
    codes.BRANCH: _branch,
    codes.SUBPATTERN: _group,
    codes.MAX_REPEAT: _repeat,
    codes.MIN_REPEAT: _repeat,
}

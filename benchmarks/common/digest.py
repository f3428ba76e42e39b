"""A digest of the sources: it says whether a result belongs to the present tree."""

from __future__ import annotations

import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

GENERATED = frozenset({"photon_ext/_build_info.py"})  # written by setup.py, differs by machine
CPP = frozenset({".cpp", ".cu", ".cuh", ".h"})
CPP_LITERAL_OR_GAP = re.compile(
    rb"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?://[^\n]*|/\*.*?\*/|\s)+""", re.DOTALL
)
PLAIN_STRING = re.compile(r"[bBrRuU]*['\"]")  # one without values in it
# after these
STATEMENT_BEGINS = frozenset(
    {tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
)


def source_digest(root: Path) -> str:
    """sha256 over the paths and code of setup.py, csrc/** and photon_ext/**/*.py, in path order:
    no remark makes a result stale.
    """
    digest = hashlib.sha256()
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        code = _code(path)
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(code)}\0".encode())
        digest.update(code)
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    yield from root.glob("setup.py")  # compilers' flags
    yield from (
        path
        for path in (root / "csrc").rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )
    package = (root / "photon_ext").rglob("*.py")
    yield from (path for path in package if path.relative_to(root).as_posix() not in GENERATED)


def _code(path: Path) -> bytes:
    """What a file says to its compiler: C++ without comments and layout, Python without comments
    and docstrings.
    """
    content = path.read_bytes()
    if path.suffix in CPP:
        return CPP_LITERAL_OR_GAP.sub(lambda found: found[1] or b" ", content).strip()
    return _without_remarks(content).encode() if path.suffix == ".py" else content


def _without_remarks(python: bytes) -> str:
    """Without empty lines too, but for those within a string."""
    tokens = list(tokenize.tokenize(io.BytesIO(python).readline))
    encoding = tokens[0].string
    lines = io.StringIO(python.decode(encoding), newline=None).readlines()
    # rows whose end is inside of a token
    within = {row for token in tokens for row in range(token.start[0], token.end[0])}
    for remark in reversed(_remarks(tokens)):
        (first, begin), (last, end) = remark.start, remark.end
        lines[first - 1 : last] = [
            lines[first - 1][:begin].rstrip() + lines[last - 1][end:],
            *[""] * (last - first),
        ]
        within.difference_update(range(first, last))
    return "".join(line for row, line in enumerate(lines, 1) if line.strip() or row in within)


def _remarks(tokens: list[tokenize.TokenInfo]) -> list[tokenize.TokenInfo]:
    """Comments, and strings that are a whole statement, in the order of the text."""
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    words = [token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL)]
    strings = [
        word
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
        if PLAIN_STRING.match(word.string)
        and before.type in STATEMENT_BEGINS
        and after.type == tokenize.NEWLINE
    ]
    return sorted([*strings, *comments], key=lambda token: token.start)

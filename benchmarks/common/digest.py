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
CPP_LITERAL_OR_GAP = re.compile(rb"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?://[^\n]*|/\*.*?\*/|\s)+""", re.DOTALL)
STATEMENT_BEGINS = frozenset({tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})  # after these


def source_digest(root: Path) -> str:
    """sha256 over the paths and code of setup.py, csrc/** and photon_ext/**/*.py, in path order: no remark makes a result stale."""
    digest = hashlib.sha256()
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        code = _code(path)
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(code)}\0".encode())
        digest.update(code)
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    yield from root.glob("setup.py")  # compilers' flags
    yield from (path for path in (root / "csrc").rglob("*") if path.is_file() and not path.name.startswith("."))
    package = (root / "photon_ext").rglob("*.py")
    yield from (path for path in package if path.relative_to(root).as_posix() not in GENERATED)


def _code(path: Path) -> bytes:
    """What a file says to its compiler: C++ without comments and layout, Python without comments and docstrings."""
    content = path.read_bytes()
    if path.suffix in CPP:
        return CPP_LITERAL_OR_GAP.sub(lambda found: found[1] or b" ", content).strip()
    return _without_remarks(content).encode() if path.suffix == ".py" else content


def _without_remarks(python: bytes) -> str:
    """Lines that are left empty by it go too; others stay, so that no line within a string is lost."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(python).readline)
    lines = io.StringIO(python.decode(encoding), newline=None).readlines()
    for remark in reversed(_remarks(python)):
        (first, begin), (last, end) = remark.start, remark.end
        rest = (lines[first - 1][:begin] + lines[last - 1][end:]).rstrip()
        lines[first - 1 : last] = [rest + "\n"] if rest else []
    return "".join(lines)


def _remarks(python: bytes) -> list[tokenize.TokenInfo]:
    """Comments, and strings that are a whole statement, in the order of the text."""
    tokens = [token for token in tokenize.tokenize(io.BytesIO(python).readline) if token.type != tokenize.NL]
    words = [token for token in tokens if token.type != tokenize.COMMENT]
    strings = [
        word
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
        if word.type == tokenize.STRING and before.type in STATEMENT_BEGINS and after.type == tokenize.NEWLINE
    ]
    return sorted([*strings, *(token for token in tokens if token.type == tokenize.COMMENT)], key=lambda token: token.start)

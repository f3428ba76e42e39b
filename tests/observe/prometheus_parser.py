"""A strict reader of Prometheus' text format 0.0.4, as its specification describes it; raises
ValueError at what is not allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_SUFFIXES = {"summary": ("", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
_UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass
class Metric:
    """One family: its type, and values by (name, sorted labels)."""

    kind: str
    help: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Metric]:
    """Families by name."""
    if not text.endswith("\n"):
        raise ValueError("the last line has no line feed")
    families: dict[str, Metric] = {}
    helps: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, words = line.removeprefix("# HELP ").partition(" ")
            if not _NAME.fullmatch(name) or name in helps or not words:
                raise ValueError(f"a wrong or second HELP: {line}")
            helps[name] = words
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            if name in families or kind not in _SUFFIXES or name not in helps:
                raise ValueError(f"a wrong or second TYPE, or one without HELP: {line}")
            families[name] = Metric(kind, helps[name])
            current = name
        else:
            _sample(line, current, families[current])
    for name, family in families.items():
        if family.kind == "counter" and not name.endswith("_total"):
            raise ValueError(f"the counter {name} does not end with _total")
        if not family.values:
            raise ValueError(f"{name} has no sample")
    return families


def _sample(line: str, current: str, family: Metric) -> None:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ValueError(f"no sample: {line}")
    name, labels, value = match.group(1), match.group(2) or "", float(match.group(3))
    if name not in {current + suffix for suffix in _SUFFIXES[family.kind]}:
        raise ValueError(f"{name} stands among the samples of {current}")
    pairs = tuple(
        sorted(
            (key, re.sub(r"\\.", lambda m: _UNESCAPED[m.group()], text))
            for key, text in _LABEL.findall(labels)
        )
    )
    if ",".join(found.group() for found in _LABEL.finditer(labels)) != labels:
        raise ValueError(f'labels are not name="value" with commas between: {line}')
    if (name, pairs) in family.values:
        raise ValueError(f"a sample twice: {line}")
    family.values[name, pairs] = value

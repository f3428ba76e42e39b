"""The options of an engine as flags of a command: their names, types and help are those of
EngineOptions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, get_args

from photon_ext.checks import Activations, Backend, KvDtype, Prefill
from photon_ext.engine.options import EngineOptions

_NO_FLAG = ("kernel_plan",)  # an object of Python
_CHOICES = {
    "Prefill | None": get_args(Prefill),
    "Backend | None": get_args(Backend),
    "KvDtype | None": get_args(KvDtype),
    "Activations | None": get_args(Activations),
}


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "tuple[int, ...] | None": _counts,
    "str | Path | None": str,
    "str | Policy": str,
}


def add_engine_flags(parser: argparse.ArgumentParser, without: Iterable[str] = ()) -> None:
    """Adds a flag for each option; one that is not given leaves the option as it is."""
    told = _told(EngineOptions.__doc__ or "")
    for field in fields(EngineOptions):
        if field.name in (*_NO_FLAG, *without):
            continue
        flag, kind = f"--{field.name.replace('_', '-')}", str(field.type)
        given: dict[str, Any] = {"default": argparse.SUPPRESS, "help": told.get(field.name)}
        if kind == "bool":
            given["action"] = argparse.BooleanOptionalAction
        elif kind in _CHOICES:
            given["choices"] = _CHOICES[kind]
        else:
            given |= {"type": _TYPES[kind], "metavar": "N,N" if "tuple" in kind else None}
        parser.add_argument(flag, **given)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as keywords of an engine."""
    given = vars(arguments)
    return {field.name: given[field.name] for field in fields(EngineOptions) if field.name in given}


def _told(text: str) -> dict[str, str]:
    """What the docstring says of each attribute, as argparse wants it."""
    _, _, attributes = text.partition("Attributes:")
    found: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        if begin := re.match(r" {8}(\w+): (.*)", line):
            name, found[begin[1]] = begin[1], begin[2]
        elif name and line.startswith(" " * 12):
            found[name] += f" {line.strip()}"
    return {one: words.replace("%", "%%") for one, words in found.items()}

"""Every option of an engine is a flag of `photon-ext serve`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from photon_ext.cli.arguments import make_parser
from photon_ext.cli.engine_flags import _told, engine_options
from photon_ext.engine.options import EngineOptions

# one value of each kind; what follows from it
GIVEN: dict[str, tuple[list[str], Any]] = {
    "max_rows": (["--max-rows", "7"], 7),
    "max_waiting": (["--max-waiting", "0"], 0),
    "policy": (["--policy", "priority"], "priority"),
    "buckets": (["--buckets", "1,8"], (1, 8)),
    "prefill": (["--prefill", "mixed"], "mixed"),
    "backend": (["--backend", "portable"], "portable"),
    "kv_dtype": (["--kv-dtype", "fp8"], "fp8"),
    "graph": (["--no-graph"], False),
    "exact": (["--exact"], True),
    "automata_dir": (["--automata-dir", "x"], "x"),
}


def options(*arguments: str) -> dict[str, Any]:
    return engine_options(make_parser().parse_args(["serve", *arguments]))


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_gives_its_option_alone(name: str) -> None:
    given, value = GIVEN[name]
    assert options(*given) == {name: value}


def test_without_flags_all_options_are_the_engines_own() -> None:
    assert options() == {}


def test_every_option_has_a_flag_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    told = _told(EngineOptions.__doc__ or "")
    for field in fields(EngineOptions):
        if field.name != "kernel_plan":  # an object of Python
            assert f"--{field.name.replace('_', '-')}" in text
            assert told[field.name]
    assert "requests that run at once; more wait" in " ".join(text.split())


@pytest.mark.parametrize("wrong", [["--max-rows", "x"], ["--prefill", "x"], ["--buckets", "1,x"]])
def test_what_is_no_value_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*wrong)
    assert wrong[0] in capsys.readouterr().err

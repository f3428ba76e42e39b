"""A row parameter is defined once: whoever adds one edits a handful of files."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

from photon_ext import ConfigError, RowParams

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {ROOT / "photon_ext/serve/http", ROOT / "photon_ext/bench"}
MOST = 6  # the table, its column in layout.py and row_state.h, who reads it there, the reference


def files_naming(parameter: str) -> list[str]:
    """Files of photon_ext and csrc that name it, in whatever case. Servers and clients of HTTP have
    the fields of others' protocols.
    """
    files = [
        *(path for path in (ROOT / "photon_ext").rglob("*.py") if OTHERS.isdisjoint(path.parents)),
        *filter(Path.is_file, (ROOT / "csrc").rglob("*")),
    ]
    return sorted(
        str(path.relative_to(ROOT))
        for path in files
        if parameter in path.read_text(encoding="utf-8").lower()
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_tokens", "did you mean max_new_tokens[?] There are max_new_tokens, temp"),
        ("temprature", "did you mean temperature[?] There are"),
        ("stop", "did you mean stop_token_ids[?] There are"),
        ("qqq", "there are max_new_tokens, temperature"),
    ],
)
def test_a_parameter_that_a_row_does_not_have_is_named_with_the_nearest(
    name: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"^a row has no parameter '{name}'; {remedy}"):
        RowParams(**{name: 5})
    with pytest.raises(ConfigError, match=f"no parameter '{name}'"):
        replace(RowParams(), **{name: 5})
    assert list(signature(RowParams).parameters)[:2] == ["max_new_tokens", "temperature"]


@pytest.mark.parametrize(
    "parameter",
    [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logprobs_mode",
    ],
)
def test_the_name_of_a_row_parameter_stands_in_few_files(parameter: str) -> None:
    found = files_naming(parameter)
    assert "photon_ext/row_params.py" in found
    assert len(found) <= MOST, found

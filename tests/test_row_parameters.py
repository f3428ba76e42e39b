"""A row parameter is defined once: whoever adds one edits a handful of files."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST = 6  # the table, its column in layout.py and row_state.h, who reads it there, the reference


def files_naming(parameter: str) -> list[str]:
    """Files of photon_ext and csrc that name it, in whatever case."""
    files = [
        *(ROOT / "photon_ext").rglob("*.py"),
        *filter(Path.is_file, (ROOT / "csrc").rglob("*")),
    ]
    return sorted(
        str(path.relative_to(ROOT))
        for path in files
        if parameter in path.read_text(encoding="utf-8").lower()
    )


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

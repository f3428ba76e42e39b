"""tests/HAZARDS.md names tests that exist, and names every test that is about one failure."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DEFINED = {
    name
    for path in TESTS.rglob("test_*.py")
    for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}
LIST = (TESTS / "HAZARDS.md").read_text()


def test_every_test_named_in_the_list_exists() -> None:
    assert set(re.findall(r"`(test_\w+)`", LIST)) <= DEFINED


def test_every_numbered_test_stands_in_its_line() -> None:
    lines = dict(re.findall(r"^\| ([A-Z]?\d+) \|(.*)$", LIST, re.MULTILINE))
    lettered = [number for number in lines if not number.isdigit()]
    assert [*lines] == [*map(str, range(1, 45)), *lettered]
    assert lettered == sorted(lettered, key=lambda number: (number[0], int(number[1:])))
    for name in DEFINED:
        for number in re.findall(r"hazard_([a-z]\d+)_", name):
            assert f"`{name}`" in lines[number.upper()], (name, number)
        for first, last in re.findall(r"hazard_(\d+)(?:_to_(\d+))?", name):
            for number in range(int(first), int(last or first) + 1):
                assert f"`{name}`" in lines[str(number)], (name, number)

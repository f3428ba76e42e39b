"""Result files survive failures, with a line per run; the report tells which runs are stale."""

import json
import subprocess
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.common.environment import environment, source_trees
from benchmarks.common.result import ResultFile, read_runs
from benchmarks.report import State


def fail(message: str) -> dict[str, Any]:
    raise RuntimeError(message)


def test_each_entry_is_on_disk_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results" / "decode.jsonl"
    result = ResultFile("decode", Namespace(json=str(path), batches=[1]), path)
    result.measure({"batch": 1}, lambda: {"value": float("nan"), "tokens": (1, 2)})
    assert json.loads(path.read_text())["entries"][0]["status"] == "ok"
    assert result.measure({"batch": 8}, lambda: fail("no room")) is None
    result.measure({"batch": 32}, lambda: {"value": 2.0})
    data = json.loads(path.read_text())
    found = [(entry["batch"], entry["status"]) for entry in data["entries"]]
    assert found == [(1, "ok"), (8, "failed"), (32, "ok")]
    assert data["entries"][0]["value"] is None
    assert data["entries"][1]["error"] == "RuntimeError: no room"
    assert data["arguments"] == {"batches": [1]}
    assert set(data["environment"]) >= {"commit", "dirty", "trees", "torch", "gpu"}


def test_a_file_has_a_line_for_each_run_and_the_last_of_those_that_measure_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "decode.jsonl"
    for model, new_option in (("a", None), ("b", None), ("a", {"spin": False})):
        arguments = Namespace(json=path, model=model, **new_option or {})
        ResultFile("decode", arguments, path).measure({"batch": 1}, lambda: {"ms": 2.0})
    ResultFile("kernels", Namespace(model="a"), path)
    runs = read_runs(path)
    kept = [(run["benchmark"], run["arguments"]) for run in runs]
    assert kept == [
        ("decode", {"model": "b"}),
        ("decode", {"model": "a", "spin": False}),
        ("kernels", {"model": "a"}),
    ]
    assert len(path.read_text().splitlines()) == 3


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """csrc and photon_ext in one commit."""
    root = tmp_path / "repository"
    for folder in ("csrc", "photon_ext"):
        (root / folder).mkdir(parents=True)
        (root / folder / "a.txt").write_text("first\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


@pytest.mark.parametrize("folder", ["csrc", "photon_ext"])
def test_a_result_is_stale_once_its_sources_have_changed(
    repository: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "source_trees", partial(source_trees, root=repository))
    measured = environment(repository)
    older = {"commit": measured["commit"]}  # results from before trees were noted
    (repository / "README.md").write_text("a remark\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "second")
    present = source_trees("HEAD", repository)
    assert measured["dirty"] is False
    assert [report.state_of(each, present) for each in (measured, older)] == [State.CURRENT] * 2
    (repository / folder / "a.txt").write_text("second\n")
    dirty = environment(repository)
    assert report.state_of(dirty, present) is State.UNKNOWN
    git(repository, "commit", "-qam", "third")
    present = source_trees("HEAD", repository)
    assert [report.state_of(each, present) for each in (measured, older)] == [State.STALE] * 2


def test_every_result_that_is_kept_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 0
    listed = capsys.readouterr().out
    assert "unreadable" not in listed
    for path in report.RESULTS.glob("*.jsonl"):
        assert path.name in listed
        if not path.name.startswith("cpu"):
            assert report.main([str(path), "--markdown"]) == 0
            assert "| --- |" in capsys.readouterr().out

"""Result files survive failures, with a line per run; the report tells which runs are stale."""

import json
import subprocess
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.common.environment import REPOSITORY, environment, source_trees
from benchmarks.common.result import BenchmarkError, ResultFile, read_runs
from benchmarks.report import State
from photon_ext.errors import ModelError


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


def test_what_is_printed_is_what_the_file_has(tmp_path: Path) -> None:
    """1.0049999 is 1.00, but of six digits it is 1.005, which may be 1.01: tables made of the one
    and of the other would differ."""
    path = tmp_path / "r.jsonl"
    entry = ResultFile("test", Namespace(), path).measure(
        {"what": "a"}, lambda: {"ms": 1.0049999, "runs": [2 / 3], "rows": (1, 2)}
    )
    assert entry == json.loads(path.read_text())["entries"][0]
    assert entry is not None
    assert (entry["ms"], entry["runs"], entry["rows"]) == (1.005, [0.666667], [1, 2])


def test_an_error_that_says_what_to_do_has_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    result = ResultFile("decode", Namespace(), None)

    def raises(error: Exception) -> dict[str, Any]:
        raise error

    told = "'nope' is no model; use one of tiny"
    for error in (ModelError(told), BenchmarkError("tokens differ"), KeyError("x")):
        result.measure({"model": "nope"}, lambda error=error: raises(error))
    assert [bool(entry["trace"]) for entry in result.entries] == [False, False, True]
    printed = capsys.readouterr().out
    assert f"failed: {{'model': 'nope'}}: ModelError: {told}\nfailed: " in printed


def test_after_a_lost_device_the_rest_is_skipped_not_tried(tmp_path: Path) -> None:
    result = ResultFile("decode", Namespace(), tmp_path / "r.jsonl")
    result.measure({}, lambda: fail("CUDA error: an illegal memory access was encountered"))
    assert result.measure({}, lambda: pytest.fail("was tried")) is None
    assert result.entries[1]["error"].startswith("skipped")


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


def test_without_history_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment(tmp_path)
    assert (found["commit"], found["dirty"], found["trees"]) == (None, None, None)
    assert report.state_of(found, None) is State.UNKNOWN
    assert report.state_of({"commit": "0" * 40}, source_trees("HEAD")) is State.UNKNOWN
    monkeypatch.setenv("PHOTON_COMMIT", "abc")
    copied = environment(REPOSITORY)
    assert (copied["commit"], copied["dirty"], copied["trees"]) == ("abc", None, None)


def test_report_lists_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "source_trees", lambda commit: {"csrc": "1", "photon_ext": "2"})
    result = ResultFile("decode", Namespace(), tmp_path / "new.jsonl")
    labels = {"what": "decode", "model": "qwen3-4b", "batch": 8, "depth": 2}
    result.measure(labels, lambda: {"ms_per_step": {"median": 2.5}})
    (data,) = read_runs(tmp_path / "new.jsonl")
    data["environment"] |= {"trees": {"csrc": "1", "photon_ext": "2"}, "dirty": False}
    current = json.dumps(data)
    data["environment"]["trees"]["csrc"] = "0"
    data["entries"].append({"status": "failed"})
    data["entries"].append({"status": "missing", "reason": "not in this build"})
    peer = {"what": "peer", "peer": "vllm", "batch": 1, "ms_per_step": 1.57}
    data["entries"].append({"status": "ok", **peer})
    (tmp_path / "new.jsonl").write_text(f"{current}\n{json.dumps(data)}\n")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "foreign.jsonl").write_text("[1]")
    assert report.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    now, old = (line for line in lines if line.startswith("new.jsonl"))
    assert "current" in now
    assert "qwen3-4b B8 d2 2.5 ms" in now
    assert "stale" in old
    assert old.partition(" stale")[0].split()[-2:] == ["2", "1"]
    assert "vllm B1 1.57 ms" in old
    assert [line.split()[0] for line in lines if "unreadable" in line] == [
        "broken.jsonl",
        "foreign.jsonl",
    ]
    assert "3 of them not current" in lines[-1]


def test_every_result_that_is_kept_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 0
    listed = capsys.readouterr().out
    assert "unreadable" not in listed
    for path in report.RESULTS.glob("*.jsonl"):
        assert path.name in listed
        if not path.name.startswith("cpu"):
            assert report.main([str(path), "--markdown"]) == 0
            assert "| --- |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["{", "[1]", "{}", '{"benchmark": "adopt", "environment": {}, "entries": [-1]}']
)
def test_a_file_that_is_no_result_is_named(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    assert report.main([str(tmp_path / "x.jsonl")]) == 1
    assert "x.jsonl: not a result file of benchmarks" in capsys.readouterr().err
    assert report.main([str(tmp_path)]) == 0, "a list goes on"
    assert "unreadable" in capsys.readouterr().out


@pytest.mark.parametrize(("benchmark", "what"), [("adopt", "steps"), ("bubble", "gain")])
def test_a_damaged_result_is_named(
    tmp_path: Path, benchmark: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [{"what": what, "status": "ok"}]
    data = {"benchmark": benchmark, "environment": {"commit": 5}, "entries": entries}
    (tmp_path / "x.jsonl").write_text(json.dumps(data))
    assert report.main([str(tmp_path / "x.jsonl")]) == 1
    assert "x.jsonl is damaged: KeyError" in capsys.readouterr().err

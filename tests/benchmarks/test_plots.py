"""benchmarks.plots: which entries become bars, and a PNG where matplotlib is installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from benchmarks.common.result import read_runs
from benchmarks.report import RESULTS

DECODES = RESULTS / "decode-h200.jsonl"


def write(path: Path, benchmark: str, entries: list[dict[str, Any]], device: str = "auto") -> Path:
    environment, arguments = {"gpu": "H200", "cpu": "EPYC"}, {"device": device}
    data = {"benchmark": benchmark, "environment": environment, "arguments": arguments}
    path.write_text(json.dumps({**data, "entries": entries}))
    return path


def points_in(path: Path) -> list[plots.Point]:
    return [point for run in read_runs(path) for point in plots.points_of(run)]


def peer(title: str, batch: int, ms: float, status: str = "ok") -> dict[str, Any]:
    labels = {"what": "peer", "model": "qwen3-4b", "title": title, "version": "1.0", "batch": batch}
    return {**labels, "status": status, "ms_per_step": ms, "floor_share": 2 / ms}


def test_points_of_peers_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    entries = [
        peer("vLLM", 1, 4.0),
        peer("vLLM", 8, 5.0, "failed"),
        {"what": "floor", "status": "ok"},
        peer("ours", 1, 2.5),
    ]
    points = points_in(write(tmp_path / "p.jsonl", "peers", entries))
    assert points == [
        plots.Point("qwen3-4b", "H200", "vLLM 1.0", 1, 0.5, 4.0),
        plots.Point("qwen3-4b", "H200", "ours 1.0", 1, 0.8, 2.5),
    ]
    on_cpu = points_in(write(tmp_path / "c.jsonl", "peers", entries, device="cpu"))
    assert {point.machine for point in on_cpu} == {"EPYC"}


def test_without_matplotlib_the_error_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.main([str(DECODES), "--output", str(tmp_path / "floor.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "floor.png").exists()


def test_a_png_is_written_and_its_directory_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path, gains = tmp_path / "new" / "floor.png", tmp_path / "gains.png"
    entries = [peer(f"engine {i}", batch, 2.5 + i) for i in range(9) for batch in (1, 8, 32)]
    peers = write(tmp_path / "p.jsonl", "peers", entries)
    assert plots.main([str(peers), "--output", str(path)]) == 0
    bubbles = str(RESULTS / "bubble-h200.jsonl")
    assert plots.main(["--gains", bubbles, "--output", str(gains)]) == 0
    for made in (path, gains):
        assert made.read_bytes().startswith(b"\x89PNG")
        assert made.stat().st_size > 20_000
    assert plots.main([str(RESULTS / "cpu.jsonl"), "--output", str(path)]) == 1
    assert "no decode steps" in capsys.readouterr().err
    assert plots.main(["--gains", str(DECODES), "--output", str(gains)]) == 1
    assert "no gains in these files" in capsys.readouterr().err

"""benchmarks.plots: which entries become bars, and a PNG where matplotlib is installed."""

import json
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


def peer(title: str, batch: int, ms: float, status: str = "ok") -> dict[str, Any]:
    labels = {"what": "peer", "model": "qwen3-4b", "title": title, "version": "1.0", "batch": batch}
    return {**labels, "status": status, "ms_per_step": ms, "floor_share": 2 / ms}


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


def test_steps_of_other_formats_and_contexts_are_no_bars_of_the_same_panel(tmp_path: Path) -> None:
    step = {"what": "decode", "status": "ok", "model": "qwen3-4b", "batch": 1, "depth": 2}
    step |= {"ms_per_step": {"median": 2.0}, "floor_share": 0.5}
    (run,) = read_runs(write(tmp_path / "d.jsonl", "decode", [step]))
    given: list[dict[str, Any]] = [
        {"context": 512, "quantize": "none"},
        {"context": 4096, "quantize": "int4"},
        {"kv_dtype": "fp8", "quantize": None},
        {"quantize": "fp8", "activations": "fp8"},
    ]
    found = [plots.points_of({**run, "arguments": each})[0].model for each in given]
    expected = ["qwen3-4b", "qwen3-4b, weights in int4, context 4,096"]
    expected += ["qwen3-4b, keys and values in fp8", "qwen3-4b, weights in fp8, tokens in fp8"]
    assert found == expected

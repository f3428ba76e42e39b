"""The benchmark of depth 1 against depth 2, whole, on a tiny model and the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks import bubble, report
from benchmarks.attribution.serving import Load, open_server, serve
from benchmarks.common.models import open_model
from benchmarks.common.progress import Progress
from benchmarks.common.result import BenchmarkError
from benchmarks.common.tables import Table, markdown_table
from benchmarks.report import headline

DEVICE = torch.device("cpu")
TINY = "--model tiny --device cpu --dtype float32"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one whole run."""
    path = tmp_path_factory.mktemp("bubble") / "bubble.json"
    arguments = (
        "--model tiny,nonesuch --device cpu --dtype float32 --streams 1,3 --requests 4 "
        "--calibrate 3 --rounds 2 --length 16 --prompt 8 --long tiny --long-tokens 40 "
        "--long-sequences 3 --meter-cost"
    )
    assert bubble.main([*arguments.split(), "--json", str(path)]) == 1, "nonesuch is no model"
    return path


@pytest.fixture(scope="module")
def made(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def of(data: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [entry for entry in data["entries"] if entry["what"] == what]


def test_every_entry_is_there_and_the_wrong_model_fails_alone(made: dict[str, Any]) -> None:
    entries = made["entries"]
    whats = ["model", "gain", "gain", "meter", "meter", "long", "long", "model"]
    assert [entry["what"] for entry in entries] == whats
    assert [entry["status"] for entry in entries] == ["ok"] * 7 + ["failed"]
    assert "nonesuch" in entries[-1]["error"]


def test_gains_are_wall_times_and_predictions_are_medians(made: dict[str, Any]) -> None:
    for entry in of(made, "gain"):
        rates, parts = entry["tokens_per_s"], entry["parts"]
        assert entry["observed"] == pytest.approx(rates["pipe"] / rates["block"] - 1, abs=1e-4)
        assert entry["requests"] == entry["streams"] * 4 * 2
        assert entry["tokens_equal"]
        assert entry["stopped"] >= 0.9 * entry["requests"]
        assert 5 < entry["length"] < 50
        assert entry["met"] == (abs(entry["observed"] - entry["predicted"]) <= entry["tolerance"])
        allowed = max(0.005, 0.1 * abs(entry["predicted"]))
        assert entry["tolerance"] == pytest.approx(allowed, rel=1e-4)
        assert (entry["cause"] is None) == entry["met"]
        assert entry["block_ms"] > 0 < entry["pipe_ms"]
        assert entry["verdict"]
        left = (parts["period_ms"] - parts["device_ms"]) * 1e3
        assert parts["left_over_us"] == pytest.approx(left, abs=0.1)
        for name, shown in (("ordinary_device", "device"), ("ordinary_host", "gap")):
            for side in ("block", "pipe"):
                there = entry["effects"][name]["medians"][side]["there"]
                assert there == entry["medians"][side][shown] > 0
    one, _ = of(made, "gain")
    assert one["periods"]["pipe"]["dead_ms"] > 0 == one["periods"]["block"]["dead_ms"]


def test_short_answers_that_end_by_their_cap_have_the_steps_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "bubble.json"
    given = f"{TINY} --streams 1,8 --requests 6 --calibrate 6 --answer 3 --prompt 64"
    assert bubble.main([*given.split(), "--json", str(path)]) == 0
    for entry in of(json.loads(path.read_text()), "gain"):
        assert (entry["length"], entry["stopped"], entry["capped"]) == (3.0, 0, True)
        assert entry["tokens_equal"]
        assert entry["zombie_share"] == 0
        for steps in entry["steps"].values():
            for kind in steps.values():
                assert kind["here"] == pytest.approx(kind["model"], rel=0.15)
        assert entry["gaps_us"]["pipe"]["p99"] >= entry["gaps_us"]["pipe"]["p50"] > 0


def test_long_answers_have_an_active_share(made: dict[str, Any]) -> None:
    depths = of(made, "long")
    assert [entry["depth"] for entry in depths] == [2, 1], "what matters more comes first"
    assert [row["wall_s"] for row in made["published"]] == [300.6, 234.5]
    for entry in depths:
        assert entry["tokens_in_all"] == 3 * 40
        assert 0 < entry["active_share"] < 1
        assert entry["gap_us"] > 0
        wall_s = entry["tokens_in_all"] / entry["tokens_per_s"]
        assert entry["wall_s"] == pytest.approx(wall_s, rel=1e-4)


def test_the_meter_is_compared_with_none(made: dict[str, Any]) -> None:
    for entry in of(made, "meter"):
        on, off = entry["rounds"]["on"], entry["rounds"]["off"]
        assert len(on) == len(off) == bubble.METER_ROUNDS
        assert entry["ratio"] == pytest.approx(
            median(a / b for a, b in zip(on, off, strict=True)), rel=1e-4
        )
        assert entry["on_ms"] == pytest.approx(median(on), rel=1e-4)


def test_the_report_shows_the_tables_with_the_published_rows(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(file), "--markdown"]) == 0
    text = capsys.readouterr().out
    for title in ("depth 2 over depth 1", "the meter's cost", "40 tokens in each of 3 sequences"):
        assert f"## {title}" in text
    assert "| published: transformers, asynchronous | - | 234.5 | 99.4% |" in text
    assert text.index("| tiny | 1 | ") < text.index("| tiny | 2 | "), "blocking, then pipelined"
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.strip().splitlines()}) == 1
    assert report.main([str(file)]) == 0
    assert "published: transformers, synchronous" in capsys.readouterr().out
    assert "tiny x3 " in headline(json.loads(file.read_text()))
    other = tmp_path / "floor.json"
    other.write_text(json.dumps({**json.loads(file.read_text()), "benchmark": "floor"}))
    assert report.main([str(other)]) == 1


def test_a_row_that_fails_is_an_entry_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_at_two_streams(engine: Any, load: Load, seed: int) -> Any:
        if load.streams == 2:
            raise RuntimeError("CUDA error: out of memory")
        return serve(engine, load, seed)

    monkeypatch.setattr(bubble, "serve", fails_at_two_streams)
    file = tmp_path / "bubble.json"
    sizes = "--streams 2,1 --requests 3 --calibrate 4 --length 16 --prompt 8"
    assert bubble.main([*TINY.split(), *sizes.split(), "--json", str(file)]) == 1
    entries = json.loads(file.read_text())["entries"]
    found = [(entry["what"], entry["status"]) for entry in entries]
    assert found == [("model", "ok"), ("gain", "failed"), ("gain", "ok")]
    assert "out of memory" in entries[1]["error"]


def test_a_model_of_which_nothing_is_asked_is_not_made() -> None:
    args = bubble.arguments(["--model", "qwen3-4b", "--no-gain", "--long", "tiny"])
    assert bubble.models_of(args) == ["tiny"]
    args = bubble.arguments(["--model", "qwen3-4b", "--no-gain", "--meter-cost"])
    assert bubble.models_of(args) == ["qwen3-4b"]


def test_depths_and_rounds_generate_what_they_should() -> None:
    """Equal tokens at both depths; other seeds, other tokens."""
    config, weights = open_model("tiny", torch.float32, DEVICE)
    load, digests = Load(3, 3, 8, 16, 96, 1.0), []
    for depth in (1, 2):
        with open_server(config, weights, load, depth) as engine:
            digests += [serve(engine, load, seed).digest for seed in (1, 2)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_timing_gives_device_times_and_gaps() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    load = Load(2, 3, 8, None, 40, 1.0)
    with open_server(config, weights, load, 2, timing=True) as engine:
        served = serve(engine, load, 1)
    steps = served.log.steps
    assert all((step.device_us or 0) > 0 for step in steps)
    assert sum(step.gap_us or 0 for step in steps) == pytest.approx(served.gap_s * 1e6)
    assert 0 < served.gap_s < served.log.wall_s
    assert sum(step.rows for step in steps) == served.tokens


def test_a_request_that_fails_is_an_error() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    weights.head.norm[:] = math.nan
    load = Load(1, 1, 8, None, 8, 1.0)
    with (
        open_server(config, weights, load, 2) as engine,
        pytest.raises(BenchmarkError, match="a request failed: no token can be"),
    ):
        serve(engine, load, 1)


def test_markdown_escapes_bars() -> None:
    table = markdown_table(("a|b", "c"), [[1, None]])
    assert table == "| a\\|b | c |\n| --- | --- |\n| 1 | - |\n"


def test_a_table_is_rich_in_a_terminal_and_plain_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    table = Table("title", ("name", "ms"), [["[bold]one", 1.0], ["two", None]], ["a remark"])
    table.show()
    plain = "\ntitle\nname       ms\n---------  --\n[bold]one   1\ntwo         -\na remark\n"
    assert capsys.readouterr().out == plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    table.show()
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("title", "[bold]one", "a remark"))
    assert "---------" not in shown


def test_progress_prints_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.show("first")
    progress.show("second, too soon for a line")
    assert capsys.readouterr().err == "[0 s] first\n"

"""The benchmark of depth 1 against depth 2, whole, on a tiny model and the CPU."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks import bubble, plots, report
from benchmarks.common.bubble_tables import effect_rows
from benchmarks.common.progress import Progress
from benchmarks.common.sampling_time import sampling_ms
from benchmarks.common.serving import Load, Server, serve
from benchmarks.common.shapes import open_model
from benchmarks.common.steady import medians
from benchmarks.common.table import markdown_table
from benchmarks.report import headline
from photon_ext import ops

DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("bubble")
    arguments = (
        "--model tiny,nonesuch --device cpu --dtype float32 --streams 1,3 --requests 4 --calibrate "
        "3 --rounds 2 --length 16 --prompt 8 "
        "--long tiny --long-tokens 40 --long-sequences 3 --meter-cost"
    )
    files = ["--json", str(folder / "bubble.json"), "--markdown", str(folder / "bubble.md")]
    assert bubble.main([*arguments.split(), *files]) == 1, "nonesuch is no model"
    data: dict[str, Any] = json.loads((folder / "bubble.json").read_text())
    return data, (folder / "bubble.md").read_text()


def of(data: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [entry for entry in data["entries"] if entry["what"] == what]


def test_every_entry_is_there_and_the_wrong_model_fails_alone(
    made: tuple[dict[str, Any], str],
) -> None:
    data, _ = made
    assert [entry["what"] for entry in data["entries"]] == [
        "model",
        "gain",
        "gain",
        "meter",
        "meter",
        "long",
        "long",
        "model",
    ]
    assert [entry["status"] for entry in data["entries"]] == ["ok"] * 7 + ["failed"]
    assert "nonesuch" in data["entries"][-1]["error"]


def test_gains_are_wall_times_and_predictions_are_medians(made: tuple[dict[str, Any], str]) -> None:
    for entry in of(made[0], "gain"):
        rates = entry["tokens_per_s"]
        assert entry["observed"] == pytest.approx(rates["pipe"] / rates["block"] - 1, abs=1e-4)
        assert entry["requests"] == entry["streams"] * 4 * 2
        assert entry["tokens_equal"]
        assert entry["stopped"] >= 0.9 * entry["requests"]
        assert 5 < entry["length"] < 50
        assert entry["met"] == (abs(entry["observed"] - entry["predicted"]) <= entry["tolerance"])
        assert entry["tolerance"] == pytest.approx(
            max(0.005, 0.1 * abs(entry["predicted"])), rel=1e-4
        )
        assert (entry["cause"] is None) == entry["met"]
        assert entry["block_ms"] > 0 < entry["pipe_ms"]
        assert entry["verdict"]
        assert entry["from_parts"]["overlap"] == 0, "on a CPU the model hides nothing"
        explained = sum(effect["points"] for effect in entry["effects"].values())
        assert explained == pytest.approx(entry["observed"] - entry["predicted"], abs=0.02)
        for side in ("block", "pipe"):
            sorts = entry["medians"][side]["sorts"].values()
            assert sum(sort["ms"] * sort["share"] for sort in sorts) == pytest.approx(
                entry["periods"][side]["decode_ms"], rel=1e-4
            )
            assert all(ms >= 0 for ms in entry["medians"][side]["parts"].values())
            assert (
                entry["medians"][side]["pace"]["device_ms"]
                > 0
                < entry["medians"][side]["pace"]["gap_ms"]
            )
            course = entry["course"][side]
            assert (
                min(course["stretches_ms"])
                <= course["step_ms"]["median"]
                <= max(course["stretches_ms"])
            )
            assert 8 < course["context"] <= course["longest"] < 8 + 6 * 16
    one, three = of(made[0], "gain")
    assert one["periods"]["pipe"]["dead_ms"] > 0 == one["periods"]["block"]["dead_ms"]
    assert (one["short"], three["short"]["requests"]) == (None, 3 * 2)


def test_ordinary_steps_have_a_part_of_the_device_and_one_of_the_host(
    made: tuple[dict[str, Any], str],
) -> None:
    for entry in of(made[0], "gain"):
        assert "level" not in entry["effects"]
        for name, shown in (("ordinary_device", "device_ms"), ("ordinary_host", "gap_ms")):
            medians_shown = entry["effects"][name]["medians"]
            for side in ("block", "pipe"):
                assert medians_shown[side]["there"] == entry["medians"][side]["pace"][shown]
                assert medians_shown[side]["here"] > 0


def test_a_table_shows_medians_where_a_result_has_them() -> None:
    """Older ones have none."""
    excess = {"steps": 10.0, "ms": 5.0}
    effect = {"cause": "gaps", "points": 0.01, "block": excess, "pipe": excess}
    medians_shown = {"of": "median gap", "block": {"here": 0.31, "there": 0.49}}
    run = {
        "requests": 3,
        "rounds": 1,
        "effects": {"old": effect, "new": {**effect, "medians": medians_shown}, "oldest": 0.1},
    }
    old, new = effect_rows({"model": "tiny", "streams": 3}, run)
    assert old[-1] == "gaps"
    assert new[-1] == "gaps (median gap at depth 1 0.310 ms here, 0.490 in the run of the medians)"


def test_parts_add_up_to_the_device_time(made: tuple[dict[str, Any], str]) -> None:
    for entry in of(made[0], "gain"):
        parts = entry["parts"]
        assert parts["forward_ms"] + parts["sampling_ms"] == pytest.approx(
            parts["device_ms"], rel=1e-3
        )
        assert parts["left_over_us"] == pytest.approx(
            (parts["period_ms"] - parts["device_ms"]) * 1e3, abs=0.1
        )
        assert parts["gap_us"] >= 0


def test_long_answers_have_an_active_share(made: tuple[dict[str, Any], str]) -> None:
    depths = of(made[0], "long")
    assert [entry["depth"] for entry in depths] == [2, 1], "what matters more comes first"
    assert [row["wall_s"] for row in made[0]["published"]] == [300.6, 234.5]
    for entry in depths:
        assert entry["tokens_in_all"] == 3 * 40
        assert 0 < entry["active_share"] < 1
        assert entry["gap_us"] > 0
        gaps = entry["long_gaps"]
        assert gaps["above_us"] == 50
        assert gaps["sum_ms"] / 1e3 <= (1 - entry["active_share"]) * entry["wall_s"] * 1.001
        assert [gap["gap_us"] for gap in gaps["longest"]] == sorted(
            (gap["gap_us"] for gap in gaps["longest"]), reverse=True
        )
        assert (f"tiny, depth {entry['depth']}: {gaps['count']} gaps above 50" in made[1]) == (
            gaps["count"] > 0
        )
        assert entry["wall_s"] == pytest.approx(
            entry["tokens_in_all"] / entry["tokens_per_s"], rel=1e-4
        )


def test_the_meter_is_compared_with_none(made: tuple[dict[str, Any], str]) -> None:
    for entry in of(made[0], "meter"):
        on, off = entry["rounds"]["on"], entry["rounds"]["off"]
        assert len(on) == len(off) == bubble.METER_ROUNDS
        assert entry["ratio"] == pytest.approx(
            median(a / b for a, b in zip(on, off, strict=True)), rel=1e-4
        )
        assert entry["on_ms"] == pytest.approx(median(on), rel=1e-4)


def test_the_meter_s_cost_has_that_of_the_gaps_events_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: list[tuple[bool, bool]] = []
    server = Server.__init__

    def noted(*args: Any, timing: bool, meter: bool, **rest: Any) -> None:
        options.append((timing, meter))
        server(*args, timing=timing, meter=meter, **rest)

    monkeypatch.setattr(Server, "__init__", noted)
    monkeypatch.setattr(bubble, "METER_ROUNDS", 1)
    assert (
        bubble.main(
            [
                "--model",
                "tiny",
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--streams",
                "1",
                "--no-gain",
                "--meter-cost",
            ]
        )
        == 0
    )
    assert options == [(False, False), (True, True)]


def test_tables_are_markdown_with_the_published_rows(made: tuple[dict[str, Any], str]) -> None:
    _, text = made
    for title in (
        "a pipelined step, medians",
        "depth 2 over depth 1",
        "what the medians do not predict",
    ):
        assert f"## tiny: {title}" in text
    for title in ("40 tokens in each of 3 sequences", "the meter's cost"):
        assert f"## tiny: {title}" in text
    assert "| published: transformers, asynchronous | - | 234.5 | 99.4% |" in text
    assert text.index("| tiny | 1 | ") < text.index("| tiny | 2 | "), "blocking, then pipelined"
    assert "| tiny | 3 | 1 each |" in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.strip().splitlines()}) == 1


def test_the_report_has_a_line_for_it(made: tuple[dict[str, Any], str]) -> None:
    assert "tiny x3 " in headline(made[0])


def number(text: str) -> float:
    """A cell's, which a file has rounded before it is rounded for the table."""
    return float(text.strip("+%"))


def near(one: float, other: float) -> bool:
    """Apart from the last of three digits."""
    return math.isclose(one, other, rel_tol=0.011, abs_tol=0.0011)


def test_the_report_shows_the_tables_of_a_result(
    made: tuple[dict[str, Any], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bubble.json"
    file.write_text(json.dumps(made[0]))
    assert report.main([str(file), "--markdown"]) == 0
    shown, expected = capsys.readouterr().out.split(), made[1].split()
    assert len(shown) == len(expected)
    assert all(
        one == other or near(number(one), number(other))
        for one, other in zip(shown, expected, strict=True)
    )
    assert report.main([str(file)]) == 0
    assert "published: transformers, synchronous" in capsys.readouterr().out
    file.write_text(json.dumps({**made[0], "benchmark": "decode"}))
    assert report.main([str(file)]) == 1


def test_a_row_that_fails_is_an_entry_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = bubble.serve

    def fails_at_two_streams(engine: Any, load: Load, seed: int) -> Any:
        if load.streams == 2:
            raise RuntimeError("CUDA error: out of memory")
        return original(engine, load, seed)

    monkeypatch.setattr(bubble, "serve", fails_at_two_streams)
    file = tmp_path / "bubble.json"
    given = (
        "--model tiny --device cpu --dtype float32 --no-timing --streams 2,1 --requests 3 "
        "--calibrate 4 --short 0 --length 16 --prompt 8"
    )
    assert bubble.main([*given.split(), "--json", str(file)]) == 1
    entries = json.loads(file.read_text())["entries"]
    assert [(entry["what"], entry["status"]) for entry in entries] == [
        ("model", "ok"),
        ("gain", "failed"),
        ("gain", "ok"),
    ]
    assert "out of memory" in entries[1]["error"]
    assert not {"ordinary_device", "ordinary_host"} & set(entries[2]["effects"]), (
        "nothing was timed on the device"
    )
    assert entries[2]["medians"]["block"]["pace"] is None


def test_a_model_of_which_nothing_is_asked_is_not_made() -> None:
    args = bubble.arguments(["--model", "qwen3-4b", "--no-gain", "--long", "tiny"])
    assert bubble.models_of(args) == ["tiny"]
    assert bubble.models_of(
        bubble.arguments(["--model", "qwen3-4b", "--no-gain", "--meter-cost"])
    ) == ["qwen3-4b"]


def test_the_number_of_runs_is_known() -> None:
    args = bubble.arguments(
        ["--model", "a,b", "--streams", "1,8", "--rounds", "3", "--long", "a", "--meter-cost"]
    )
    one, eight = 2 * (4 + 3) + 1, 2 * (4 + 2 * 3) + 1
    assert bubble.parts_of(args) == 2 * (one + eight + 2 * 2 * bubble.METER_ROUNDS) + 2


def test_depths_and_rounds_generate_what_they_should() -> None:
    """Equal tokens at both depths; other seeds, other tokens."""
    config, weights = open_model("tiny", torch.float32, DEVICE)
    load, digests = Load(3, 3, 8, 16, 96, 1.0), []
    for depth in (1, 2):
        with Server(config, weights, load, depth) as server:
            digests += [serve(server.engine, load, seed).digest for seed in (1, 2)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_timing_gives_device_times_and_gaps() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    load = Load(2, 3, 8, None, 40, 1.0)
    with Server(config, weights, load, 2, timing=True) as server:
        served = serve(server.engine, load, 1)
    found = medians([served.log], 2)
    assert found.device is not None
    assert found.decode is not None
    assert 0 < found.device < found.decode * 2
    assert 0 < served.gap_s < served.log.wall_s
    assert found.dead is None


def test_a_request_that_fails_is_an_error() -> None:
    config, weights = open_model("tiny", torch.float32, DEVICE)
    weights.final_norm[:] = math.nan
    load = Load(1, 1, 8, None, 8, 1.0)
    with (
        Server(config, weights, load, 2) as server,
        pytest.raises(bubble.BenchmarkError, match="a request failed: no token can be"),
    ):
        serve(server.engine, load, 1)


def test_sampling_alone_takes_longer_for_more_rows() -> None:
    one, many = (
        sampling_ms(DEVICE, rows, 5000, torch.float32, 4, 1.0, fast=False) for rows in (1, 64)
    )
    assert 0 < one < many


@pytest.mark.parametrize(("backend", "fast"), [("hopper", True), ("portable", False)])
def test_sampling_alone_is_timed_with_the_kernel_that_steps_run(
    backend: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = ops.sample_into, set()

    def sample_into(
        out: Any,
        logits: Any,
        segments: Any,
        row_state: Any,
        row_errors: Any = None,
        hopper: bool = False,
    ) -> None:
        found.add(hopper)
        run(out, logits, segments, row_state, row_errors, fast)

    monkeypatch.setattr(ops, "sample_into", sample_into)
    sizes = "--streams 1 --requests 2 --calibrate 3 --short 0 --length 16 --prompt 8"
    model = ("--model", "tiny", "--device", "cpu", "--dtype", "float32")
    assert bubble.main([*model, "--backend", backend, *sizes.split()]) == 0
    assert found == {fast}


def test_a_plot_without_matplotlib_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit):
        bubble.main(["--model", "tiny", "--plot", "x.png"])
    assert "--plot: plots need matplotlib: pip install" in capsys.readouterr().err


def test_a_plot_is_a_png(made: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.common.bubble_plot import plot_gains

    plot_gains(of(made[0], "gain"), tmp_path / "new" / "bars.png", "title")
    assert (tmp_path / "new" / "bars.png").read_bytes().startswith(b"\x89PNG")
    file = tmp_path / "bubble.json"
    file.write_text(json.dumps(made[0]))
    assert (
        plots.main(["--gains", str(file), str(file), "--output", str(tmp_path / "gains.png")]) == 0
    )
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")
    file.write_text(json.dumps({**made[0], "entries": []}))
    assert plots.main(["--gains", str(file)]) == 1


@pytest.mark.parametrize(
    "arguments", ["--requests 0", "--requests 1,2", "--length x", "--streams 0"]
)
def test_wrong_numbers_are_refused(arguments: str) -> None:
    with pytest.raises(SystemExit):
        bubble.main(arguments.split())


def test_markdown_escapes_bars() -> None:
    assert markdown_table(("a|b", "c"), [[1, None]]) == "| a\\|b | c |\n| --- | --- |\n| 1 | - |\n"


def test_progress_prints_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3) as progress:
        progress.show("first")
        progress.step()
        progress.show("second, too soon for a line")
    assert capsys.readouterr().err == "[0/3, 0 s] first\n"

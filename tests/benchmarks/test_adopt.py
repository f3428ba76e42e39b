"""The ladder: every stage of both loops gives the tokens of the first one, and the figures beside
it are what they say."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import photon_ext
from benchmarks import adopt, report
from benchmarks.common.models import SHAPES
from benchmarks.common.result import BenchmarkError
from benchmarks.ladder.measure import (
    Subject,
    check_tokens,
    count_allocations,
    step_times,
    timed_run,
)
from benchmarks.ladder.models import build_model
from benchmarks.ladder.stages import LADDERS, Stage
from benchmarks.ladder.verdict import Figures, verdict
from photon_ext.models.config import Family, RopeScaling, RopeScalingKind
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import KernelPlan

NO_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LOOPS = [pytest.param(loop, marks=[NO_TRANSFORMERS] if loop == "hf" else []) for loop in LADDERS]
NAMES = [stage.name for stage in LADDERS["stock"]]
PROMPT = [3, 5, 7, 11, 13]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], Any]:
    return {}


@pytest.fixture
def model(models: dict[tuple[str, str], Any], loop: str, device: str) -> Any:
    if (loop, device) not in models:
        models[loop, device] = build_model(loop, "tiny", torch.float32, torch.device(device), 96)
    return models[loop, device]


def stage_of(loop: str, name: str) -> Stage:
    return next(stage for stage in LADDERS[loop] if stage.name == name)


def tokens_of(loop: str, name: str, *arguments: Any) -> list[int]:
    return list(stage_of(loop, name).decode(*arguments))


# --- the stages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_stage_gives_the_tokens_of_the_first(model: Any, loop: str, name: str) -> None:
    for prompt, count in (([3], 20), (PROMPT, 41), (list(range(40)), 24), (PROMPT, 1)):
        expected = tokens_of(loop, "measure", model, prompt, count, ())
        assert len(expected) == count
        assert tokens_of(loop, name, model, prompt, count, ()) == expected


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_ends_at_a_stop_id(model: Any, loop: str, name: str) -> None:
    free = tokens_of(loop, "measure", model, PROMPT, 30, ())
    unused = next(token for token in range(256) if token not in free)
    for index in (0, 1, 2, 11, 29):
        expected = free[: free.index(free[index]) + 1]
        assert tokens_of(loop, name, model, PROMPT, 30, (unused, free[index])) == expected


@NO_TRANSFORMERS
def test_both_loops_run_the_same_model(models: dict[tuple[str, str], Any], device: str) -> None:
    streams = []
    for loop in LADDERS:
        model = build_model(loop, "tiny", torch.float32, torch.device(device), 96)
        streams.append(tokens_of(loop, "measure", model, PROMPT, 60, ()))
    assert streams[0] == streams[1]
    assert len(set(streams[0])) > 20, "tokens that hardly vary show little when they are equal"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_llama_with_stretched_rotary_angles_climbs_too(
    monkeypatch: pytest.MonkeyPatch, loop: str, device: str
) -> None:
    scaling = RopeScaling(RopeScalingKind.LLAMA3, 8.0, 1.0, 4.0, original_max_positions=32)
    changes = {"family": Family.LLAMA, "tied_embeddings": False, "rope_scaling": scaling}
    monkeypatch.setitem(SHAPES, "llama", replace(SHAPES["tiny"], **changes))
    model = build_model(loop, "llama", torch.float32, torch.device(device), 64)
    streams = [tokens_of(loop, name, model, PROMPT, 40, ()) for name in NAMES]
    assert all(stream == streams[0] for stream in streams)
    assert len(set(streams[0])) > 10


@NO_TRANSFORMERS
def test_the_models_attention_is_put_back(device: str) -> None:
    model = build_model("hf", "tiny", torch.float32, torch.device(device), 64)
    own = model.config._attn_implementation
    tokens_of("hf", "attention", model, PROMPT, 4, ())
    assert model.config._attn_implementation == own


def test_an_unknown_model_and_too_many_positions_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(BenchmarkError, match="'nonesuch' is unknown; use one of tiny"):
        build_model("stock", "nonesuch", torch.float32, cpu, 64)
    with pytest.raises(BenchmarkError, match="4097 positions, tiny was made for 4096"):
        build_model("stock", "tiny", torch.float32, cpu, 4097)


# --- figures --------------------------------------------------------------------------------------


class CountingModel:
    """Stands in for a model: a decode loop of three allocations a token, and before the first as
    many as there will be tokens."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)


def counting_decode(
    model: CountingModel, prompt: list[int], tokens: int, stops: tuple[int, ...]
) -> Iterator[int]:
    kept = [torch.empty(4, device=model.device) for _ in range(tokens)]
    for token in range(tokens):
        kept = [torch.empty(8, device=model.device) for _ in range(3)]
        yield token
    del kept


def test_allocations_are_counted_in_steady_steps(device: str) -> None:
    assert count_allocations(Subject(CountingModel(device), PROMPT, 32), counting_decode) == 3


def test_steady_steps_exclude_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def decode(
        model: CountingModel, prompt: list[int], tokens: int, stops: tuple[int, ...]
    ) -> Iterator[int]:
        clock[0] += 5.0  # the prompt
        for token in range(tokens):
            if token % 8 == 0:  # a burst
                clock[0] += 0.016
            yield token

    monkeypatch.setattr("benchmarks.ladder.measure.time.perf_counter", lambda: clock[0])
    runs = [timed_run(Subject(CountingModel(), PROMPT, 32), decode) for _ in range(2)]
    timed = step_times(runs)
    assert runs[0].tokens == list(range(32))
    assert timed["ms_per_step"] == pytest.approx(2.0)
    assert timed["first_ms"] == pytest.approx(5016.0)
    assert len(timed["runs_ms_per_step"]) == 2


def test_a_stage_that_ends_early_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="9 tokens came, 32 were expected"):
        timed_run(Subject(CountingModel(), PROMPT, 32), lambda *_: iter(range(9)))


def test_tokens_must_be_equal_in_float32_only() -> None:
    assert check_tokens([1, 2, 3], [1, 2, 3], torch.float32) == 3
    assert check_tokens([1, 2, 3], [1, 9, 3], torch.bfloat16) == 1
    told = r"differ from index 1 on: \[9, 3\], expected \[2, 3\]"
    with pytest.raises(BenchmarkError, match=told):
        check_tokens([1, 2, 3], [1, 9, 3], torch.float32)
    with pytest.raises(BenchmarkError, match="2 tokens came, 3 were expected"):
        check_tokens([1, 2, 3], [1, 2], torch.bfloat16)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((10, 0.1, 4), (5, 0.1, 4), "helps, x2.00: 10 to 5 ms, of which kernels 4 to 4 ms"),
        ((10, 0.1), (5, 0.1), "helps, x2.00: 10 to 5 ms"),
        ((10, 0.1, 4), (10.1, 0.1, 4), "no help here, x0.99"),
        ((10, 6), (9.9, 0.1), "no help here, x1.01"),
        ((10, 0.1, 4), (9.5, 0.6), "cannot be told, x1.05: runs differ by up to 1.2 ms"),
        ((10, 0.1, 4), (5, math.inf), "cannot be told from one run, x2.00"),
        ((10, 0.1), (20, 0.1), "slower, x0.50: 10 to 20 ms"),
    ],
)
def test_the_verdict_follows_the_figures(
    before: tuple[float, ...], after: tuple[float, ...], says: str
) -> None:
    assert verdict(Figures(*before), Figures(*after)).startswith(says)
    assert verdict(None, Figures(*before)) == "the start"


# --- the command ----------------------------------------------------------------------------------


def climbed(
    tmp_path: Path, loop: str, device: str, *more: str
) -> tuple[int, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Exit status, and the entries for times and for records by stage."""
    file = tmp_path / "adopt.json"
    given = f"--loop {loop} --device {device} --tokens 32 --prompt 5 --repeats 1"
    status = adopt.main([*given.split(), *more, "--json", str(file)])
    entries = json.loads(file.read_text())["entries"]
    by_stage = (
        {entry["stage"]: entry for entry in entries if entry["what"] == what}
        for what in ("steps", "records")
    )
    return (status, *by_stage)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_ladder_is_climbed(
    tmp_path: Path, loop: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, steps, found = climbed(tmp_path, loop, device)
    assert status == 0
    assert list(steps) == list(found) == NAMES
    for name in NAMES:
        assert steps[name]["tokens_equal"] == 32
        assert steps[name]["ms_per_step"] > 0
        assert steps[name]["verdict"]
        if device == "cuda":
            assert 0 <= found[name]["gap_share"] < 1
            assert found[name]["kernel_ms"] > 0
    assert found["step"]["allocations_per_step"] == 0 < found["measure"]["allocations_per_step"]
    printed = capsys.readouterr().out
    assert report.main([str(tmp_path / "adopt.json")]) == 0
    again = capsys.readouterr().out
    for stage in LADDERS[loop]:
        assert f"{stage.name}: {steps[stage.name]['verdict']}" in printed
    assert again.strip() in printed, "the table can be had from the file"


@pytest.mark.parametrize("loop", LOOPS)
def test_our_step_takes_the_fast_kernels(
    tmp_path: Path, loop: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    create = Decoder.__init__

    def noted(self: Decoder, *arguments: Any, plan: KernelPlan, **more: Any) -> None:
        made.append(plan.hopper)
        create(self, *arguments, plan=plan, **more)

    monkeypatch.setattr(Decoder, "__init__", noted)
    more = ("--backend", "hopper", "--dtype", "bfloat16")
    status, steps, found = climbed(tmp_path, loop, device, *more)
    assert status == 0
    assert list(found) == NAMES
    assert set(made) == {True}
    kernels = "hopper" if device == "cuda" and photon_ext.hopper_runs() else "portable"
    told = {name: entry["kernels"] for name, entry in steps.items() if "kernels" in entry}
    assert told == {"step": kernels}


def test_a_stage_that_fails_is_an_entry_and_the_ladder_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> Iterator[int]:
        raise RuntimeError("operation not permitted when stream is capturing")

    def wrong(*arguments: object) -> Iterator[int]:
        return iter([1] * 32)

    monkeypatch.setattr("benchmarks.ladder.stock.graph.decode", refuses)
    monkeypatch.setattr("benchmarks.ladder.stock.slots.decode", wrong)
    status, steps, found = climbed(tmp_path, "stock", "cpu")
    assert status == 1
    assert [name for name in NAMES if steps[name]["status"] == "failed"] == ["slots", "graph"]
    assert "operation not permitted" in steps["graph"]["error"]
    assert "tokens differ from index 0" in steps["slots"]["error"]
    assert list(found) == [name for name in NAMES if name not in ("slots", "graph")]
    assert "verdict" in steps["pipeline"]

"""The ladder: every stage gives the tokens of the first one, and the command measures them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import adopt, report
from benchmarks.common.result import read_runs
from benchmarks.ladder.models import build_model
from benchmarks.ladder.stages import STAGES, Stage

pytest.importorskip("transformers")

PROMPT = [3, 5, 7, 11, 13]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_gives_the_tokens_of_the_first_and_ends_at_a_stop_id(
    stage: Stage, device: str
) -> None:
    model = build_model("tiny", torch.float32, torch.device(device), 96)
    for prompt, count in (([3], 20), (PROMPT, 41), (list(range(40)), 24), (PROMPT, 1)):
        expected = list(STAGES[0].decode(model, prompt, count, ()))
        assert len(expected) == count
        assert list(stage.decode(model, prompt, count, ())) == expected
    free = list(STAGES[0].decode(model, PROMPT, 30, ()))
    assert len(set(free)) > 10, "tokens that hardly vary show little when they are equal"
    for index in (0, 1, 11):
        expected = free[: free.index(free[index]) + 1]
        assert list(stage.decode(model, PROMPT, 30, (free[index],))) == expected


def test_the_ladder_is_climbed_and_a_stage_that_fails_is_an_entry(
    tmp_path: Path,
    device: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*arguments: object) -> Iterator[int]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("benchmarks.ladder.stages.graph.decode", refuses)
    path = tmp_path / "adopt.jsonl"
    given = f"--device {device} --tokens 32 --prompt 5 --repeats 1 --json {path}"
    assert adopt.main(given.split()) == 1
    (run,) = read_runs(path)
    steps = {entry["stage"]: entry for entry in run["entries"] if entry["what"] == "steps"}
    assert list(steps) == [stage.name for stage in STAGES]
    failed = steps.pop("graph")
    assert "operation not permitted" in failed["error"]
    assert all(entry["tokens_equal"] == 32 and entry["verdict"] for entry in steps.values())
    records = {entry["stage"]: entry for entry in run["entries"] if entry["what"] == "records"}
    assert records["step"]["allocations_per_step"] == 0 < records["measure"]["allocations_per_step"]
    printed = capsys.readouterr().out
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out.strip() in printed

"""The verdict over counted steps, on a CPU session with a counter that says what it is told to."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import activity
from benchmarks.common.models import open_model
from benchmarks.common.result import ResultFile
from benchmarks.common.session import Session
from benchmarks.cuda_calls.counts import Counts

MODEL = activity.Model("tiny", *open_model("tiny", torch.float32, torch.device("cpu")))


class OnePlant:
    """A planted call that shows as a synchronization."""

    def __init__(self, session: Session) -> None:
        del session

    def seen(self, session: Session, count: activity.Count) -> dict[str, bool]:
        return {"sync": count(session, 2, lambda: None).calls["cudaStreamSynchronize"] == 1}


def counter(sees_plants: bool, extra: str | None = None) -> activity.Count:
    def count(session: Session, steps: int, plant: Callable[[], object] | None) -> Counts:
        activity._steps(session, steps, plant)
        counts = Counts("fake", steps)
        counts.calls.update({"cudaGraphLaunch": steps, "cudaEventSynchronize": steps})
        if plant is not None and sees_plants:
            counts.calls["cudaStreamSynchronize"] += 1
        if plant is None and extra is not None:
            counts.calls[extra] += 1
        return counts

    return count


@pytest.mark.parametrize(
    ("count", "valid", "passed", "says"),
    [
        (counter(True), True, True, "10/10  True"),
        (counter(True, "cudaMalloc"), True, False, "allocation: {'cudaMalloc': 1}"),
        (counter(False), False, False, "planted sync not seen"),
    ],
)
def test_a_count_passes_only_if_it_sees_what_is_planted_and_nothing_else(
    count: activity.Count,
    valid: bool,
    passed: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(activity.SOURCES, "fake", count)
    monkeypatch.setattr(activity, "Plants", OnePlant)
    result = ResultFile("activity", Namespace(), None)
    activity.count_all([MODEL], Namespace(sources=["fake"], batches=[2], steps=10), result)
    entry: dict[str, Any] = result.entries[0]
    assert (entry["valid"], entry["passed"], entry["quiet_steps"]) == (valid, passed, 10)
    assert says in capsys.readouterr().out

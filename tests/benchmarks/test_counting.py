"""How the calls of a steady step are counted, fed by hand: there need not be a driver."""

import ctypes
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks import activity
from benchmarks.common.kineto import counts, idle, window
from benchmarks.common.models import open_model
from benchmarks.common.result import ResultFile
from benchmarks.common.session import Session
from benchmarks.cuda_calls import callbacks
from benchmarks.cuda_calls.callbacks import ApiCounter, CallbackData, CopyParams
from benchmarks.cuda_calls.counts import Counts
from photon_ext.observe.api import CallKind
from tests.observe.kineto_records import Loop

ENTER, EXIT = 0, 1


def call(
    counter: ApiCounter,
    domain: int,
    name: str,
    params: CopyParams | None = None,
    *,
    inside: Sequence[str] = (),
) -> None:
    """What CUPTI does around one API call that makes others."""
    for site in (ENTER, EXIT):
        address = ctypes.addressof(params) if params is not None else None
        data = CallbackData(site, name.encode(), address)
        counter._callback(None, domain, 1, ctypes.addressof(data))
        if site == ENTER:
            for inner in inside:
                call(counter, callbacks.DRIVER_API, inner)


def test_a_call_is_counted_once_and_a_copy_by_where_its_memory_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {1: "Pageable", 2: "Pinned", 3: "Device"}
    monkeypatch.setattr(callbacks, "memory_kind", kinds.__getitem__)
    counter, runtime, driver = ApiCounter(), callbacks.RUNTIME_API, callbacks.DRIVER_API
    call(counter, runtime, "cudaGraphLaunch", inside=("cuGraphLaunch", "cuCtxGetCurrent"))
    call(counter, runtime, "cudaMemcpyAsync", CopyParams(dst=3, src=1, nbytes=64))
    call(counter, driver, "cuMemcpyHtoDAsync_v2", CopyParams(dst=3, src=2, nbytes=100))
    found = counter.counts(1)
    assert found.of(CallKind.GRAPH_LAUNCH) == 1
    assert found.copied_bytes == {"HtoD Pageable -> Device": 64, "HtoD Pinned -> Device": 100}
    assert found.pageable == 1


def test_activity_records_become_calls_and_gaps() -> None:
    loop = Loop(steps=6)
    found = counts(window(loop.records()), 6)
    assert found.faults(quiet_steps=6) == []
    at = loop.commits[1].time / 1e3  # in a commit, after its wait
    loop.document.call("cudaStreamSynchronize", at - 15, at - 5)
    assert counts(window(loop.records()), 6).faults(quiet_steps=6)
    measured = idle(Loop(depth=1, steps=6).records())
    assert (measured["kernels"], measured["node_gap_us"]) == (3, pytest.approx(4))
    assert measured["step_gap_us"]["median"] == pytest.approx(4 + 8 + 20 + 8 + 5 + 10 + 12 + 3)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("cudaGraphLaunch", "graph launches"),
        ("cuLaunchKernel", "outside of graphs"),
        ("cuEventSynchronize", "event waits"),
        ("cudaStreamSynchronize", "sync: "),
        ("cudaMalloc", "allocation: "),
    ],
)
def test_one_call_too_many_is_a_fault(name: str, fault: str) -> None:
    steady = Counts("test", 10)
    steady.calls.update(("cudaGraphLaunch", "cudaEventSynchronize", "cudaMemcpyAsync") * 10)
    assert steady.faults(quiet_steps=10) == []
    steady.calls[name] += 1
    assert [fault in found for found in steady.faults(quiet_steps=10)] == [True]


class OnePlant:
    """A planted call that shows as a synchronization."""

    def __init__(self, session: Session) -> None:
        del session

    def seen(self, session: Session, count: activity.Count) -> dict[str, bool]:
        return {"sync": count(session, 2, lambda: None).calls["cudaStreamSynchronize"] == 1}


@pytest.mark.parametrize(
    ("sees_plants", "extra"), [(True, None), (True, "cudaMalloc"), (False, None)]
)
def test_a_count_passes_only_if_it_sees_what_is_planted_and_nothing_else(
    sees_plants: bool, extra: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(session: Session, steps: int, plant: Callable[[], object] | None) -> Counts:
        activity._steps(session, steps, plant)
        found = Counts("fake", steps)
        found.calls.update({"cudaGraphLaunch": steps, "cudaEventSynchronize": steps})
        if plant is not None and sees_plants:
            found.calls["cudaStreamSynchronize"] += 1
        if plant is None and extra is not None:
            found.calls[extra] += 1
        return found

    monkeypatch.setitem(activity.SOURCES, "fake", count)
    monkeypatch.setattr(activity, "Plants", OnePlant)
    result = ResultFile("activity", Namespace(), None)
    model = activity.Model("tiny", *open_model("tiny", torch.float32, torch.device("cpu")))
    activity.count_all([model], Namespace(sources=["fake"], batches=[2], steps=10), result)
    entry: dict[str, Any] = result.entries[0]
    passes = sees_plants and extra is None
    assert (entry["valid"], entry["passed"], entry["quiet_steps"]) == (sees_plants, passes, 10)

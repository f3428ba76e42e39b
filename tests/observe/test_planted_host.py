"""Bubbles planted into a real pipeline on the host backend: named in its own streams' records.

Steps take some milliseconds, because a shared machine may wake a thread a millisecond late.
"""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from photon_ext.observe import timeline
from photon_ext.observe.host_work import DESCHEDULED_NS, spans
from photon_ext.observe.records import DeviceKind
from tests.observe.planted import (
    REPEATS,
    STEPS,
    allow_all,
    commit_waits,
    open_pipeline,
    postpone_out_copies,
    sleep_300us,
    traced,
)

LONG = 4 * REPEATS  # a busy machine keeps a thread off its cores for longer than a short step


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sleep_in_commit_is_named_at_depth_one_and_hidden_at_depth_two(depth: int) -> None:
    report = traced(open_pipeline(depth, repeats=LONG), on_event=sleep_300us).report
    assert report.host_us["commit"] >= 300
    waited = commit_waits(report)
    if depth == 1:
        assert min(waited) >= 300
        assert report.waited_us["commit"] >= 300
    else:
        assert median(waited) < 300  # but where the host was off its core for a whole step


@pytest.mark.parametrize(("depth", "planted"), [(1, True), (2, True), (1, False), (2, False)])
def test_an_out_copy_behind_the_next_forward_is_named(depth: int, planted: bool) -> None:
    pipeline = open_pipeline(depth)
    if planted:
        postpone_out_copies(pipeline)
    late = traced(pipeline).report.late_copies
    if depth == 1 or not planted:  # at depth 1 there is no next forward to wait for
        assert late is None
    else:
        assert late is not None
        assert late.copies >= STEPS // 2
        assert late.us > 1000


def test_masks_that_take_longer_than_the_forward_are_named() -> None:
    pipeline = open_pipeline(2, constrained=True)
    compute = pipeline._runtime.streams.compute

    def slow_fill(row: object, words: memoryview) -> None:
        while not compute.query():  # type: ignore[attr-defined]
            time.sleep(1e-3)  # other work may slow the forward
        time.sleep(30e-3)
        allow_all(row, words)

    report = traced(pipeline, slow_fill).report
    assert report.waited_us["mask"] > 2000
    assert next(iter(report.waited_us)) == "mask"


def test_a_blocking_wait_in_the_callers_own_code_is_named() -> None:
    """A caller that waits for the device between two turns, with a depth of 2 to no avail."""
    pipeline = open_pipeline(2)
    with timeline() as recording:
        while pipeline.busy:
            pipeline.tick()
            with torch.profiler.record_function("check the answer"):
                pipeline._runtime.streams.compute.synchronize()  # type: ignore[attr-defined]
                time.sleep(500e-6)
    assert recording.report.waited_us["other code of the host (check the answer)"] >= 400


def test_a_kernel_whose_thread_lost_the_cpu_ends_where_its_work_did() -> None:
    """A replay of three kernels: the second was off the CPU for 700 of its 1000 us."""
    work = [
        ("graph", None, 1, 0, 3_000_000, 3, 0),
        ("kernel", "a", 1, 0, 1_000_000, 0, 1_000_000 - DESCHEDULED_NS + 1),
        ("kernel", "b", 1, 1_000_000, 2_000_000, 0, 300_000),
        ("kernel", "c", 1, 2_000_000, 3_000_000, 0, 1_000_000),
        ("wait", None, 1, 3_000_000, 9_000_000, 0, 0),
    ]
    found = list(spans(work, {}))
    assert [(span.name, span.start, span.end) for span in found[1:5]] == [
        ("a", 0, 1_000_000),
        ("b", 1_000_000, 1_300_000),
        ("descheduled", 1_300_000, 2_000_000),
        ("c", 2_000_000, 3_000_000),
    ]
    assert [span.correlation for span in found] == [1, 1, 1, 1, 1, 0]
    assert [span.kind for span in spans(work, {}, cpu_clock=False)].count(DeviceKind.KERNEL) == 3
    assert len(list(spans(work, {}, cpu_clock=False))) == len(work)

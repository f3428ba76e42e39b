"""Bubbles planted into a real pipeline on the host backend: found and named in the records of its
own streams.

Steps take some milliseconds, because a shared machine may wake a thread a millisecond late.
"""

from __future__ import annotations

import time

import pytest
import torch

from photon_ext.observe import timeline
from photon_ext.observe.analysis.findings import FindingKind
from photon_ext.observe.analysis.gaps import Cause
from photon_ext.runtime import RowEvent
from tests.observe.planted import (
    REPEATS,
    STEPS,
    allow_all,
    open_pipeline,
    postpone_out_copies,
    traced,
)

LONG = 4 * REPEATS  # a busy machine keeps a thread off its cores for longer than a short step


def sleep_300us(_: RowEvent) -> None:
    time.sleep(300e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sleep_in_commit_is_named_at_depth_one_and_hidden_at_depth_two(depth: int) -> None:
    report = traced(open_pipeline(depth, repeats=LONG), on_event=sleep_300us).report
    assert report.host_us["commit"] >= 300
    steady = {step.number for step in report.steps.steady}
    waited = [
        gap
        for gap in report.gaps
        if gap.step in steady
        and any(s.cause is Cause.COMMIT and s.ns >= 300_000 for s in gap.shares)
    ]
    if depth == 1:
        assert len(waited) == len(steady)
        assert any(
            finding.kind is FindingKind.GAP and finding.where == "commit"
            for finding in report.findings
        )
    else:
        # where the host was kept off its core for a whole step
        assert len(waited) < len(steady) / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_an_out_copy_behind_the_next_forward_is_named(depth: int) -> None:
    pipeline = open_pipeline(depth)
    postpone_out_copies(pipeline)
    late = [
        finding
        for finding in traced(pipeline).report.findings
        if finding.kind is FindingKind.OUT_COPY
    ]
    assert len(late) == (1 if depth == 2 else 0)  # at depth 1 there is no next forward to wait for
    if late:
        assert late[0].times >= STEPS // 2
        assert late[0].us > 1000


@pytest.mark.parametrize("depth", [1, 2])
def test_an_out_copy_in_time_is_not(depth: int) -> None:
    assert [
        finding
        for finding in traced(open_pipeline(depth)).report.findings
        if finding.kind is FindingKind.OUT_COPY
    ] == []


def test_masks_that_take_longer_than_the_forward_are_named() -> None:
    def slow_fill(row: object, words: memoryview) -> None:
        time.sleep(20e-3)
        allow_all(row, words)

    report = traced(open_pipeline(2, constrained=True), slow_fill).report
    assert report.waited_us["mask"] > 2000
    assert (
        next(finding for finding in report.findings if finding.kind is FindingKind.GAP).where
        == "mask"
    )


def test_a_blocking_wait_in_the_callers_own_code_is_named() -> None:
    """A caller that waits for the device between two turns, with a depth of 2 to no avail."""
    pipeline = open_pipeline(2)
    with timeline() as recording:
        while pipeline.busy:
            pipeline.tick()
            with torch.profiler.record_function("check the answer"):
                pipeline._runtime.streams.compute.synchronize()  # type: ignore[attr-defined]
                time.sleep(500e-6)
    report = recording.report
    named = [
        finding
        for finding in report.findings
        if finding.kind is FindingKind.GAP and "check the answer" in finding.where
    ]
    assert named
    assert report.waited_us["other code of the host"] >= 400

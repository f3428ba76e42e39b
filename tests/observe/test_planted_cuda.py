"""On a GPU: planted bubbles are found and named in its own records; a clean pipeline has none."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from photon_ext.observe import Timeline, timeline
from photon_ext.observe.analysis.gaps import Cause
from photon_ext.observe.analysis.host import CallCost
from photon_ext.observe.analysis.steps import StepMethod
from photon_ext.observe.records import DeviceKind
from photon_ext.runtime.probe import Phase
from tests.observe.planted import (
    STEPS,
    VOCAB,
    allow_all,
    commit_waits,
    open_pipeline,
    postpone_out_copies,
    sleep_300us,
    traced,
)

pytestmark = pytest.mark.gpu
ROWS = 8


@pytest.fixture(scope="module", autouse=True)
def _warm_profiler() -> None:
    """The first profile of a process sets CUPTI up, which takes long and shows."""
    with timeline():
        torch.ones(8, device="cuda").sum().item()


def calls(recording: Timeline, cause: Cause) -> list[CallCost]:
    return [cost for cost in recording.report.calls if cost.cause is cause]


def test_a_clean_pipeline_has_nothing_but_its_gap() -> None:
    report = traced(open_pipeline(2, "cuda")).report
    assert (report.calls, report.late_copies) == ([], None)
    assert report.backend == "cuda"
    assert report.steps.method is StepMethod.HEAD
    assert len(report.steps.steps) == STEPS
    assert all(step.launch is not None for step in report.steps.steps)
    assert report.step_gap is not None
    assert report.step_gap.median_us < 100


def test_host_and_gpu_are_on_one_clock() -> None:
    """No step begins before its launch, nor ends after the wait for it: but for the error that the
    records state."""
    recording = traced(open_pipeline(2, "cuda"))
    records = recording.records
    slack = records.clock.host_ns + records.clock.device_ns + 5_000
    assert slack < 100_000
    waits = {span.step: span.end for span in records.host if span.phase is Phase.WAIT}
    for step in recording.report.steps.steps:
        assert step.launch is not None
        assert step.launch.start - slack <= step.start
        assert step.end <= waits[step.launch.step] + slack


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sleep_in_commit_is_named_at_depth_one_and_hidden_at_depth_two(depth: int) -> None:
    """By the median step: where the system keeps the host off its core for longer than the 2 ms of
    a step, the device waits at depth 2, too."""
    report = traced(open_pipeline(depth, "cuda"), on_event=sleep_300us).report
    waited = median(commit_waits(report))
    assert waited >= 300 if depth == 1 else waited == 0


def test_a_pageable_copy_in_the_mask_path_is_named() -> None:
    target, source = torch.empty(1 << 16, device="cuda"), torch.ones(1 << 16)

    def fill(row: object, words: memoryview) -> None:
        target.copy_(source)
        allow_all(row, words)

    recording = traced(open_pipeline(2, "cuda", constrained=True), fill)
    (copy,) = calls(recording, Cause.PAGEABLE)
    assert copy.where.startswith("mask: aten::copy_")
    assert copy.calls >= STEPS - 1


def test_masks_from_page_locked_memory_are_not() -> None:
    recording = traced(open_pipeline(2, "cuda", constrained=True), allow_all)
    assert calls(recording, Cause.PAGEABLE) == []
    copies = [span for span in recording.records.device if span.kind is DeviceKind.COPY]
    assert any(span.is_in_copy for span in copies)


def test_an_item_in_user_code_is_named() -> None:
    """A loop that is not ours. It asks for the token of each row: one item alone leaves the device
    idle for some microseconds only."""
    weight = torch.randn(VOCAB, VOCAB, device="cuda")
    x = torch.randn(ROWS, VOCAB, device="cuda")
    tokens = [0] * ROWS
    with timeline() as recording:
        for _ in range(STEPS):
            with torch.profiler.record_function("decode one token"):
                torch.cuda._sleep(500_000)
                x = (x @ weight + tokens[0]).softmax(dim=-1)
                tokens = [token.item() for token in x.argmax(dim=-1)]
    item = "aten::item in decode one token"
    (sync,) = (cost for cost in calls(recording, Cause.SYNC) if item in cost.where)
    assert sync.calls >= STEPS * ROWS
    assert len(recording.report.steps.steady) >= STEPS // 2
    assert any("aten::item" in name for name in recording.report.waited_us), recording.report.text()


def test_an_out_copy_behind_the_next_forward_is_named() -> None:
    pipeline = open_pipeline(2, "cuda")
    postpone_out_copies(pipeline)
    late = traced(pipeline).report.late_copies
    assert late is not None
    assert late.copies >= STEPS // 2
    assert late.us > 500


def test_nvtx_ranges_do_no_harm_and_everything_can_be_saved(tmp_path: Path) -> None:
    written = traced(open_pipeline(2, "cuda"), nvtx=True).save(tmp_path)
    names = {path.name for path in written}
    assert names >= {"trace.json", "timeline.html", "summary.txt", "summary.json"}

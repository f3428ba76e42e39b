"""Bubbles planted into a real pipeline on the host backend: found and named in the records of its own streams.

Steps take some milliseconds, because a shared machine may wake a thread a millisecond late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from photon_ext import ops
from photon_ext.layout import RECORD_WIDTH
from photon_ext.observe import timeline
from photon_ext.observe.analysis.findings import FindingKind
from photon_ext.observe.analysis.report import Report
from photon_ext.runtime import Pipeline, RowEvent, Runtime, StepTensors
from photon_ext.runtime.slot import Slot
from photon_ext.runtime.step import StepKey

VOCAB = 64
STEPS = 24
WORK, REPEATS = 2048, 12  # the square matrix that every step multiplies with, and how often: some 5 ms


class Model:
    """Counts, token after token, and takes its time over it."""

    def __init__(self) -> None:
        identity = torch.eye(VOCAB)
        self.identity, self.successor = identity, identity.roll(1, 0).contiguous()
        self.x, self.last, self.logits = torch.empty(8, VOCAB), torch.empty(8, VOCAB), torch.empty(8, VOCAB)
        self.weight, self.given, self.taken = torch.ones(WORK, WORK), torch.ones(8, WORK), torch.empty(8, WORK)

    def forward(self, step: StepTensors) -> None:
        lines, segments = len(step.decode_meta), len(step.segments)
        ops.embedding_into(self.x[:lines], step.decode_meta, self.identity)
        for _ in range(REPEATS):
            ops.linear_into(self.taken[:lines], self.given[:lines], self.weight)
        ops.select_lines_into(self.last[:segments], self.x[:lines], step.segments)
        ops.linear_into(self.logits[:segments], self.last[:segments], self.successor)
        step.logits = self.logits[:segments]


def traced(depth: int, on_event: Callable[[RowEvent], None] | None = None, late_copy: bool = False) -> Report:
    """The report of a pipeline that decodes one row."""
    runtime = Runtime(max_rows=1, max_len=STEPS + 8, depth=depth, device="cpu")
    pipeline = Pipeline(runtime, Model().forward, vocab_size=VOCAB, chunk=4)
    if late_copy:
        postpone_out_copies(pipeline)
    pipeline.admit([1, 2], max_new_tokens=STEPS)
    tokens: list[int] = []
    with timeline() as recording:
        while pipeline.busy:
            tokens += [event.token for event in pipeline.tick(on_event=on_event) if event.token is not None]
    assert tokens == [(3 + step) % VOCAB for step in range(STEPS)]  # what is planted changes no token
    return recording.report


def postpone_out_copies(pipeline: Pipeline) -> None:
    """Plants the bug: the event that the out-copy of step t waits for is recorded only after the forward of t+1 is enqueued."""
    open_steps: list[tuple[Slot, StepKey]] = []

    def finish() -> None:
        slot, key = open_steps.pop(0)
        slot._native.finalize(None, 0, key.segments * RECORD_WIDTH)

    def plant(slot: Slot) -> None:
        launch, wait = slot.launch, slot.wait

        def late_launch(key: StepKey, segments: list[int], staged: list[int], deltas: list[int], finish_now: bool) -> int:
            sent = launch(key, segments, staged, deltas, False)
            while open_steps:
                finish()
            open_steps.append((slot, key))
            return sent

        def late_wait(segments: int) -> object:
            if any(opened is slot for opened, _ in open_steps):
                finish()
            return wait(segments)

        slot.launch, slot.wait = late_launch, late_wait  # type: ignore[method-assign, assignment]

    for slot in pipeline._slots:
        plant(slot)  # type: ignore[arg-type]


def sleep_300us(_: RowEvent) -> None:
    time.sleep(300e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sleep_in_commit_is_named_at_depth_one_and_hidden_at_depth_two(depth: int) -> None:
    report = traced(depth, sleep_300us)
    assert report.host_us["commit"] >= 300
    waited = report.waited_us.get("commit", 0.0)
    if depth == 1:
        assert waited >= 300
        assert any(finding.kind is FindingKind.GAP and finding.where == "commit" for finding in report.findings)
    else:
        assert waited < 100


@pytest.mark.parametrize("depth", [1, 2])
def test_an_out_copy_behind_the_next_forward_is_named(depth: int) -> None:
    late = [finding for finding in traced(depth, late_copy=True).findings if finding.kind is FindingKind.OUT_COPY]
    assert len(late) == (1 if depth == 2 else 0)  # at depth 1 there is no next forward to wait for
    if late:
        assert late[0].times >= STEPS // 2
        assert late[0].us > 1000


@pytest.mark.parametrize("depth", [1, 2])
def test_an_out_copy_in_time_is_not(depth: int) -> None:
    assert [finding for finding in traced(depth).findings if finding.kind is FindingKind.OUT_COPY] == []


def test_a_blocking_wait_in_the_callers_own_code_is_named() -> None:
    """A caller that waits for the device between two turns, with a depth of 2 to no avail."""
    runtime = Runtime(max_rows=1, max_len=STEPS + 8, depth=2, device="cpu")
    pipeline = Pipeline(runtime, Model().forward, vocab_size=VOCAB, chunk=4)
    pipeline.admit([1, 2], max_new_tokens=STEPS)
    with timeline() as recording:
        while pipeline.busy:
            pipeline.tick()
            with torch.profiler.record_function("check the answer"):
                runtime.streams.compute.synchronize()
                time.sleep(500e-6)
    report = recording.report
    named = [finding for finding in report.findings if finding.kind is FindingKind.GAP and "check the answer" in finding.where]
    assert named
    assert report.waited_us["other code of the host"] >= 400

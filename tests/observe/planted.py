"""Pipelines that count, and take their time over it, with bubbles planted into them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from photon_ext import ops
from photon_ext.layout import RECORD_WIDTH
from photon_ext.observe import Timeline, timeline
from photon_ext.observe.analysis.gaps import Cause
from photon_ext.observe.analysis.report import Report
from photon_ext.runtime import Pipeline, RowEvent, RowParams, Runtime, StepTensors
from photon_ext.runtime.slot import Slot
from photon_ext.runtime.step import Fill, StepKey

VOCAB = 64
STEPS = 24
WORK, REPEATS = 2048, 12  # on the CPU: a square matrix, multiplied with so often: some 5 ms
CYCLES = 4_000_000  # on a GPU: some 2 ms


class Model:
    """Token t is followed by t + 1."""

    def __init__(self, device: str = "cpu", repeats: int = REPEATS) -> None:
        identity = torch.eye(VOCAB, device=device)
        self.on_cuda, self.repeats = device == "cuda", repeats
        self.identity, self.successor = identity, identity.roll(1, 0).contiguous()
        self.x, self.last, self.logits = (torch.empty(8, VOCAB, device=device) for _ in range(3))
        self.weight, self.given = torch.ones(WORK, WORK), torch.ones(8, WORK)
        self.taken = torch.empty(8, WORK)

    def forward(self, step: StepTensors) -> None:
        tokens, segments = len(step.decode_meta), len(step.segments)
        ops.embedding_into(self.x[:tokens], step.decode_meta, self.identity)
        if self.on_cuda:
            torch.cuda._sleep(CYCLES)
        for _ in range(0 if self.on_cuda else self.repeats):
            ops.linear_into(self.taken[:tokens], self.given[:tokens], self.weight)
        ops.select_tokens_into(self.last[:segments], self.x[:tokens], step.segments)
        ops.linear_into(self.logits[:segments], self.last[:segments], self.successor)
        step.logits = self.logits[:segments]


def open_pipeline(
    depth: int, device: str = "cpu", constrained: bool = False, repeats: int = REPEATS
) -> Pipeline:
    """A pipeline with one row admitted, and its first steps behind it."""
    runtime = Runtime(max_rows=1, max_len=STEPS + 16, depth=depth, device=device)
    forward = Model(device, repeats).forward
    pipeline = Pipeline(runtime, forward, vocab_size=VOCAB, chunk=4)
    pipeline.admit([1, 2], RowParams(STEPS, constrained=constrained))
    return pipeline


def traced(
    pipeline: Pipeline,
    fill: Fill | None = None,
    on_event: Callable[[RowEvent], None] | None = None,
    nvtx: bool = False,
) -> Timeline:
    """Decodes to the end under the timeline. What is planted changes no token."""
    tokens: list[int] = []
    with timeline(nvtx=nvtx) as recording:
        while pipeline.busy:
            events = pipeline.tick(fill, on_event)
            tokens += [token for event in events for token in event.tokens]
    assert tokens == [(3 + step) % VOCAB for step in range(STEPS)]
    return recording


def postpone_out_copies(pipeline: Pipeline) -> None:
    """Plants the bug: the event that the out-copy of step t waits for is recorded only after the
    forward of t+1 is enqueued."""
    open_steps: list[tuple[Slot, StepKey]] = []

    def finish() -> None:
        slot, key = open_steps.pop(0)
        slot._native.finalize(None, 0, key.segments * RECORD_WIDTH)

    def plant(slot: Slot) -> None:
        launch, wait = slot.launch, slot.wait

        def late_launch(key: StepKey, *given: object) -> int:
            sent = launch(key, *given[:3], False)  # type: ignore[arg-type]
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


def commit_waits(report: Report) -> list[float]:
    """Microseconds that the device waited for the commit before each steady step."""
    waits = dict.fromkeys((step.number for step in report.steps.steady), 0.0)
    for gap in report.gaps:
        if gap.step in waits:
            ns = (share.ns for share in gap.shares if share.cause is Cause.COMMIT)
            waits[gap.step] += sum(ns) / 1e3
    return list(waits.values())


def sleep_300us(_: RowEvent) -> None:
    time.sleep(300e-6)


def allow_all(_: object, words: memoryview) -> None:
    """A mask that allows every token."""
    for place in range(len(words)):
        words[place] = -1

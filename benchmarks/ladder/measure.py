"""A stage from outside: its tokens, ms per step, allocations, and on CUDA how long the device
worked for a step.

A stage has no clock in it. The time of a step is the time between tokens as they come out, over
eight of them: a stage may hand them out in bursts. The first eight tokens (prompt, capture, first
steps) are left out, and their time is given beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.common.result import BenchmarkError
from benchmarks.common.trace import record
from benchmarks.ladder.stages import Decode
from photon_ext.observe.analysis.steps import busy_time, kernels_of
from photon_ext.observe.records import DeviceSpan

WINDOW = 8  # steps that are timed together; carry_over.BURST
# one per step: torch's greedy choice, and the end of a step of the runtime
MARKERS = ("ArgMax", "publish_kernel")
WARM_UP = 16  # tokens of the run before those that are timed
# tokens at most of a run whose calls or kernels are looked at: one step is like the other
LOOKED_AT = 40
# steps at the beginning that are not steady: the prompt's, the first one, the one that is recorded
SKIPPED = 3


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, its prompt, and how many new tokens a run has."""

    model: Any
    prompt: Sequence[int]
    tokens: int

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    def run(self, decode: Decode, tokens: int | None = None) -> list[int]:
        """The tokens of one run without stop ids, up to the moment when the device has nothing
        left to do; None: of full length.
        """
        result = list(decode(self.model, self.prompt, tokens or self.tokens, ()))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return result


def check_tokens(expected: Sequence[int], found: Sequence[int], dtype: torch.dtype) -> int:
    """How many tokens are equal from the first on. In float32 they must all be: else BenchmarkError
    names the first that is not.

    In half precision two ways of summing round differently, and from the first near-tie on the
    texts part; that is no error.
    """
    pairs = zip(expected, found, strict=False)
    equal = next(
        (i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(expected), len(found))
    )
    if len(found) != len(expected):
        raise BenchmarkError(f"{len(found)} tokens came, {len(expected)} were expected")
    if dtype == torch.float32 and equal < len(expected):
        raise BenchmarkError(
            f"tokens differ from index {equal} on: {found[equal:][:6]}, expected "
            f"{expected[equal:][:6]}"
        )
    return equal


class TimedRun(NamedTuple):
    """One run: its tokens, the milliseconds of its first WINDOW tokens, and those of a step in
    every window behind them.
    """

    tokens: list[int]
    first_ms: float
    windows: list[float]


def timed_run(subject: Subject, decode: Decode) -> TimedRun:
    """A run of full length."""
    gc.collect()  # what an earlier run left in cycles is not collected in this one
    start = time.perf_counter()
    came = [
        (token, time.perf_counter())
        for token in decode(subject.model, subject.prompt, subject.tokens, ())
    ]
    if len(came) < 2 * WINDOW:
        raise BenchmarkError(f"{len(came)} tokens came, {subject.tokens} were expected")
    marks = [at for _, at in came[WINDOW - 1 :: WINDOW]]
    steps = [(after - before) * 1e3 / WINDOW for before, after in pairwise(marks)]
    return TimedRun([token for token, _ in came], (marks[0] - start) * 1e3, steps)


def step_times(runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Milliseconds of a steady step: the median over the windows of all runs; and of the first
    eight tokens, all included.
    """
    return {
        "ms_per_step": median(ms for run in runs for ms in run.windows),
        "runs_ms_per_step": [median(run.windows) for run in runs],
        "first_ms": median(run.first_ms for run in runs),
    }


def count_allocations(subject: Subject, decode: Decode) -> float:
    """Requests to torch's allocator in a steady step. On CUDA they are served from its cache, as a
    rule without a cudaMalloc.

    Counted between two tokens of one run, the first and the last eight left out: what a loop sets
    up, and how much, hangs on its length.
    """
    counter = _CudaRequests(subject.device) if subject.device.type == "cuda" else _CpuRequests()
    tokens = min(subject.tokens, LOOKED_AT)
    begin, end = WINDOW, tokens - WINDOW
    for came, _ in enumerate(decode(subject.model, subject.prompt, tokens, ()), start=1):
        if came == begin:
            counter.start()
        elif came == end:
            counter.stop()
    return counter.requests / (end - begin)


class _CudaRequests:
    """Requests to the device's allocator from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.requests = 0

    def start(self) -> None:
        self.requests = -self._total()

    def stop(self) -> None:
        self.requests += self._total()

    def _total(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["allocation.all.allocated"])


class _CpuRequests:
    """Requests of this thread for memory of the host from `start` to `stop`."""

    def __init__(self) -> None:
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        self.requests = 0

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        if results is None:
            raise BenchmarkError(
                "torch's profiler returned no records; this torch was built without kineto"
            )
        self.requests = sum(
            event.name() == "[memory]" and event.nbytes() > 0 for event in results.events()
        )


class DeviceSteps(NamedTuple):
    """What activity records say about steps, milliseconds each.

    Attributes:
        busy: time with at least one kernel running.
        period: from the end of the step before to the end of this one.
        gap: of it, before the step's first kernel.
        skipped: periods of the steps that are not steady, in order.
    """

    busy: list[float]
    period: list[float]
    gap: list[float]
    skipped: list[float]


def device_time(subject: Subject, decode: Decode, ms_per_step: float) -> dict[str, Any]:
    """How long the device worked for a steady step, from its own records, and what share of
    `ms_per_step` that leaves idle.

    Idle is all time between kernels, within a step and before it. Records slow the host down, and
    with it the gaps of a loop that launches kernel by kernel. So idle time is not taken from them:
    it is what is left of the step as it was timed without them. The traced period is given beside
    it.
    """
    steps = device_steps(
        kernels_of(record(lambda: subject.run(decode, min(subject.tokens, LOOKED_AT))))
    )
    busy_ms = median(steps.busy)
    return {
        "kernel_ms": busy_ms,
        "gap_share": max(0.0, 1 - busy_ms / ms_per_step),
        "traced": {
            "steps": len(steps.busy),
            "ms_per_step": median(steps.period),
            "step_gap_ms": median(steps.gap),
            "skipped_ms": steps.skipped,
        },
    }


def device_steps(kernels: Sequence[DeviceSpan]) -> DeviceSteps:
    """Cuts records, sorted by start, into steps that end with a marker kernel; steps with an odd
    number of kernels are not steady.

    Raises BenchmarkError without at least three steady steps.
    """
    ends = [
        index
        for index, kernel in enumerate(kernels)
        if any(marker in kernel.name for marker in MARKERS)
    ]
    counts = [after - before for before, after in pairwise(ends)]
    usual = max(set(counts[SKIPPED:]), key=counts.count, default=0)
    steps = DeviceSteps([], [], [], [])
    for index, (before, after) in enumerate(pairwise(ends)):
        period = (kernels[after].end - kernels[before].end) * 1e-6
        if index < SKIPPED or counts[index] != usual:
            steps.skipped.append(period)
            continue
        steps.busy.append(busy_time(kernels[before + 1 : after + 1]) * 1e-6)
        steps.gap.append(max(0, kernels[before + 1].start - kernels[before].end) * 1e-6)
        steps.period.append(period)
    if len(steps.busy) < 3:
        raise BenchmarkError(
            f"the records hold {len(ends)} steps and {len(steps.busy)} steady ones, expected at "
            "least 3"
        )
    return steps

"""A stage from outside: its tokens, ms per step, allocations, and on CUDA how long the device
worked for a step.

A stage has no clock in it. The time of a step is the time between tokens as they come out, over
eight of them: a stage may hand them out in bursts. The first eight tokens (prompt, capture, first
steps) are left out, and their time is given beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.common.kineto import idle, record
from benchmarks.common.result import BenchmarkError
from benchmarks.ladder.stages import Decode

WINDOW = 8  # steps that are timed together; carry_over.BURST
MARKERS = ("publish_kernel", "ArgMax")  # end a step of the runtime, and one of torch's
WARM_UP = 16  # tokens of the run before those that are timed
LOOKED_AT = 40  # tokens at most of a run whose calls or kernels are looked at


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
        """The tokens of one run without stop ids, up to the moment when the device has nothing left
        to do; None: of full length."""
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
    differs = (i for i, (a, b) in enumerate(pairs) if a != b)
    equal = next(differs, min(len(expected), len(found)))
    if len(found) != len(expected):
        raise BenchmarkError(f"{len(found)} tokens came, {len(expected)} were expected")
    if dtype == torch.float32 and equal < len(expected):
        differ = f"{found[equal:][:6]}, expected {expected[equal:][:6]}"
        raise BenchmarkError(f"tokens differ from index {equal} on: {differ}")
    return equal


class TimedRun(NamedTuple):
    """One run: its tokens, the milliseconds of its first WINDOW tokens, and those of a step in
    every window behind them."""

    tokens: list[int]
    first_ms: float
    windows: list[float]


def timed_run(subject: Subject, decode: Decode) -> TimedRun:
    """A run of full length."""
    gc.collect()  # what an earlier run left in cycles is not collected in this one
    start = time.perf_counter()
    tokens = decode(subject.model, subject.prompt, subject.tokens, ())
    came = [(token, time.perf_counter()) for token in tokens]
    if len(came) < 2 * WINDOW:
        raise BenchmarkError(f"{len(came)} tokens came, {subject.tokens} were expected")
    marks = [at for _, at in came[WINDOW - 1 :: WINDOW]]
    steps = [(after - before) * 1e3 / WINDOW for before, after in pairwise(marks)]
    return TimedRun([token for token, _ in came], (marks[0] - start) * 1e3, steps)


def step_times(runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Milliseconds of a steady step: the median over the windows of all runs; and of the first
    eight tokens, all included."""
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
    on_cuda, tokens = subject.device.type == "cuda", min(subject.tokens, LOOKED_AT)
    begin, end, requests = WINDOW, tokens - WINDOW, 0
    stop: Callable[[], int] = int
    for came, _ in enumerate(decode(subject.model, subject.prompt, tokens, ()), start=1):
        if came == begin:
            stop = _count_cuda_requests(subject.device) if on_cuda else _count_host_requests()
        elif came == end:
            requests = stop()
    return requests / (end - begin)


def _count_cuda_requests(device: torch.device) -> Callable[[], int]:
    """Counts requests to the device's allocator until it is called."""

    def total() -> int:
        return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])

    before = total()
    return lambda: total() - before


def _count_host_requests() -> Callable[[], int]:
    """Counts this thread's requests for memory of the host until it is called."""
    profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    profile.__enter__()

    def stop() -> int:
        profile.__exit__(None, None, None)
        results = profile.kineto_results
        if results is None:
            raise BenchmarkError("torch's profiler returned no records: torch lacks kineto")
        events: Iterable[Any] = results.events()  # torch declares no `nbytes`
        return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)

    return stop


def device_time(subject: Subject, decode: Decode, ms_per_step: float) -> dict[str, Any]:
    """How long the device worked for a steady step, by its own records, and the idle share.

    Records slow the host down, and with it the gaps of a loop that launches kernel by kernel. So
    idle time is what is left of `ms_per_step`, which was timed without them; the traced period is
    given beside it. A step ends with a marker kernel. Raises BenchmarkError without steady steps.
    """
    records = record(lambda: subject.run(decode, min(subject.tokens, LOOKED_AT)))
    names = [span.name for span in records.device]
    marker = next((mark for mark in MARKERS if any(mark in name for name in names)), MARKERS[0])
    found = idle(records, marker)
    if not found:
        raise BenchmarkError("the records hold no steady steps")
    kernel_ms = found["kernel_us"] / 1e3
    period_ms = (found["step_us"] + found["step_gap_us"]["median"]) / 1e3
    return {
        "kernel_ms": kernel_ms,
        "gap_share": max(0.0, 1 - kernel_ms / ms_per_step),
        "traced": {"steps": found["steps"], "ms_per_step": period_ms},
    }

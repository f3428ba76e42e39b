"""Peer: an engine that generates greedily, how its steps are timed, and the window in which they
are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import torch

from benchmarks.common.result import BenchmarkError

Prompts = list[list[int]]
Tokens = list[list[int]]
REPEATS = 3
LEAST_TOKENS = 32  # that even the slowest engine makes
MARK = "@measured "  # begins a line that a worker says to its parent

# How ms per step was found: the median of single steps in the window; (t(last) - t(first)) / (last
# - first) from medians of whole runs;
# or the time of all of the window's steps over their number, median of runs.
BY_STEP = "median step"
BY_DIFFERENCE = "long run - short run"
BY_LOOP = "loop over the window"


class Window(NamedTuple):
    """New tokens `first` to `last` of every row are what is timed; rows have a prompt of `prompt`
    tokens."""

    prompt: int
    first: int
    last: int

    @property
    def context(self) -> float:
        """Tokens that a step attends to, in the middle of the window."""
        return self.prompt + (self.first + self.last) / 2

    def within(self, seconds: float, ms_per_step: float) -> Window:
        """The window, or a shorter one in which a slow engine takes no more than so many seconds
        from the prompt to its end."""
        last = min(self.last, max(LEAST_TOKENS, int(seconds * 1e3 / ms_per_step)))
        return self if last == self.last else Window(self.prompt, max(1, last // 4), last)


class Setup(NamedTuple):
    """What every peer is given.

    Attributes:
        directory: a checkpoint as transformers writes it.
        dtype: its name.
        device: "cpu" or "cuda".
        window: what will be measured.
        seconds: that a batch may take, about; engines that need more for the window are measured in
            a shorter one.
        backend: for ours: which kernels decode; those made for Hopper where they fit.
    """

    directory: str
    dtype: str
    device: str
    window: Window
    seconds: float = 60.0
    backend: str = "portable"


class Measured(NamedTuple):
    """What a peer took for one batch.

    Attributes:
        ms_per_step: in the window.
        ms_spread: the least and the most that a sample gave.
        samples: steps or runs behind it.
        tokens: the new tokens of each row.
        window: that was measured.
    """

    ms_per_step: float
    ms_spread: tuple[float, float]
    samples: int
    tokens: Tokens
    window: Window


class Peer(Protocol):
    """An engine that has loaded its model.

    Attributes:
        version: of the package that does the work.
        mode: how it runs: processes, graphs, kernels, as far as it says.
        method: one of the BY_... above.
    """

    version: str
    mode: str
    method: str

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        """Generates `window.last` tokens for every prompt, at once, and times the window."""

    def close(self) -> None:
        """Gives back what it holds."""


def by_steps(step_ms: Sequence[float], tokens: Tokens, window: Window) -> Measured:
    """From the time of every step up to the one that gives each row its token `window.last`."""
    check_tokens(tokens, window.last)
    steps = window.last - window.first
    if len(step_ms) < steps:
        raise BenchmarkError(f"{len(step_ms)} steps were timed, the window has {steps}")
    inside = step_ms[-steps:]
    return Measured(median(inside), (min(inside), max(inside)), len(inside), tokens, window)


def by_difference(
    generate: Callable[[Prompts, int], Tokens], prompts: Prompts, window: Window, seconds: float
) -> Measured:
    """From whole runs of two lengths, after some for warm-up: what both have, start and prefill,
    cancels. All in about `seconds`.

    Where the difference is lost in what runs of one length differ by, there are more of them as
    long as that time lasts.
    """
    few = window.within(0.0, 1.0).last
    generate(prompts, few)
    ms_per_step = _timed(generate, prompts, few)[0] / few * 1e3
    window = window.within(seconds / (1 + REPEATS * (1 + window.first / window.last)), ms_per_step)
    generate(prompts, window.last)
    short: list[float] = []
    long: list[float] = []
    tokens: Tokens = []
    while len(long) < REPEATS or (
        median(long) <= median(short) and sum(short) + sum(long) < seconds
    ):
        short.append(_timed(generate, prompts, window.first)[0])
        duration, tokens = _timed(generate, prompts, window.last)
        long.append(duration)
    steps = window.last - window.first
    ms = (median(long) - median(short)) * 1e3 / steps
    pairs = [(b - a) * 1e3 / steps for a, b in zip(short, long, strict=True)]
    if ms <= 0:
        taken = f"{median(long):.3g} and {median(short):.3g} s, medians of {len(long)} runs"
        raise BenchmarkError(
            f"{window.last} tokens took no longer than {window.first}: {taken}; measure more tokens"
        )
    return Measured(ms, (min(pairs), max(pairs)), len(long), tokens, window)


def _timed(
    generate: Callable[[Prompts, int], Tokens], prompts: Prompts, count: int
) -> tuple[float, Tokens]:
    begin = time.perf_counter()
    tokens = generate(prompts, count)
    duration = time.perf_counter() - begin
    check_tokens(tokens, count)
    return duration, tokens


def check_tokens(tokens: Tokens, count: int) -> None:
    """Raises BenchmarkError unless every row has `count` tokens."""
    lengths = sorted({len(row) for row in tokens})
    if lengths != [count]:
        raise BenchmarkError(
            f"rows have {lengths} new tokens, expected {count} each: the engine stopped early"
        )


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()

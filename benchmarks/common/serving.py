"""Serving as users get it: the engine, its thread and its loop, on requests that end by a stop token; and a log of its steps."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import NamedTuple

import torch

from benchmarks.common.result import BenchmarkError
from photon_ext.engine import Engine
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime import Step, probe
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.step import StepKind
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling.options import MAX_STOP_IDS

PAGE_SIZE = 16
STEADY_ROWS = 0.75  # of the streams: decode steps with fewer belong to the begin or the end of a run
WARM_UP = 8  # steps left out of medians
LONGEST = 6  # a request is capped at this many mean lengths: e^-6 of them reach it


class StepRecord(NamedTuple):
    """One committed step.

    Attributes:
        ready_ns: when its results were on the host, nanoseconds. end_ns: when its commit returned.
        kind: decode or prefill.
        rows: its rows, zombies included. zombies: of them, those whose sequence had ended.
        device_us: how long it ran on the device; None without timing.
    """

    ready_ns: int
    end_ns: int
    kind: StepKind
    rows: int
    zombies: int
    device_us: float | None

    @property
    def dead(self) -> bool:
        return self.zombies == self.rows


@dataclass
class StepLog:
    """The steps of one run, when its first launch began, and how many steps were in flight."""

    begin_ns: int = 0
    depth: int = 0
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds from the first launch to the last commit that brought a token."""
        return (max(step.end_ns for step in self.steps if not step.dead) - self.begin_ns) / 1e9

    def intervals_ms(self) -> list[tuple[StepRecord, float]]:
        """Each step with its period, milliseconds.

        At depth 1 the host's part of a step follows the device's: its period ends with its commit. At depth 2 the device's parts follow
        each other; the host's, which may be a large step's beside a small one, is not to be counted: a period ends with the results.
        """
        stamps = [step.end_ns if self.depth == 1 else step.ready_ns for step in self.steps]
        return [(step, (after - before) / 1e6) for step, before, after in zip(self.steps, [self.begin_ns, *stamps], stamps, strict=False)]


class StepRecorder:
    """Implements `photon_ext.runtime.probe.Probe`: writes a StepLog of the one pipeline that works; two clock readings a step."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._open: list[Phase] = []
        self._ready_ns = 0
        self._committed: tuple[Step, int] | None = None

    def turn(self, phase: Phase | None) -> None:
        """See Probe.turn."""

    def begin(self, phase: Phase, step: int | None) -> None:
        """See Probe.begin."""
        self._open.append(phase)
        if phase is Phase.PLAN and not self._log.begin_ns:
            self._log.begin_ns = time.perf_counter_ns()

    def end(self) -> None:
        """See Probe.end."""
        phase = self._open.pop() if self._open else None
        if phase is Phase.WAIT:
            self._ready_ns = time.perf_counter_ns()
        elif phase is Phase.COMMIT and self._committed is not None:
            (step, zombies), self._committed = self._committed, None
            device_us = None if step.span is None else step.span.length_us()
            self._log.steps.append(
                StepRecord(self._ready_ns, time.perf_counter_ns(), step.key.kind, len(step.segments), zombies, device_us)
            )

    def launched(self, step: Step, words: int) -> None:
        """See Probe.launched."""

    def committed(self, step: Step, zombies: int) -> None:
        """See Probe.committed."""
        self._committed = step, zombies


@contextmanager
def logged_steps(depth: int) -> Iterator[StepLog]:
    """Logs the steps of the one pipeline, of that depth, that works in the block. Raises BenchmarkError while a timeline is recorded."""
    if probe.active is not None:
        raise BenchmarkError("a timeline is being recorded, and its records slow steps down; end it first")
    log = StepLog(depth=depth)
    probe.active = StepRecorder(log)
    try:
        yield log
    finally:
        probe.active = None


class Medians(NamedTuple):
    """Median periods of one run's steps, milliseconds; None where it had none of that kind.

    Attributes:
        decode: decode steps with at least STEADY_ROWS of the streams. prefill: prefill steps after the first ones.
        dead: steps of nothing but zombies.
        device: device time of the decode steps, with timing.
    """

    decode: float | None
    prefill: float | None
    dead: float | None
    device: float | None


def is_steady(step: StepRecord, streams: int) -> bool:
    """Whether a step is a decode step of a batch that is as full as it gets."""
    return step.kind is StepKind.DECODE and not step.dead and step.rows >= STEADY_ROWS * streams


def medians(log: StepLog, streams: int) -> Medians:
    """Steady medians of a run."""
    timed = log.intervals_ms()
    first = next((i for i, (step, _) in enumerate(timed) if is_steady(step, streams)), 0) + WARM_UP
    steady = [(step, ms) for step, ms in timed[first:] if is_steady(step, streams)]
    device = [step.device_us / 1e3 for step, _ in steady if step.device_us is not None]
    prefill = [ms for step, ms in timed[min(first, len(timed) // 2) :] if step.kind is StepKind.PREFILL and not step.dead]
    dead = [ms for step, ms in timed if step.kind is StepKind.DECODE and step.dead]
    return Medians(*(median(values) if values else None for values in ([ms for _, ms in steady], prefill, dead, device)))


@dataclass(frozen=True)
class Load:
    """What is asked of an engine.

    Attributes:
        streams: rows of the engine. requests: requests per row.
        prompt: tokens of each prompt, random ids.
        length: mean tokens of a request, from a stop set of 1/length of the vocabulary; None: no stop set, `new_tokens` each.
        new_tokens: cap of each request.
        temperature: of the sampling.
    """

    streams: int
    requests: int
    prompt: int
    length: int | None
    new_tokens: int
    temperature: float

    def stop_ids(self, vocab: int) -> tuple[int, ...]:
        """The stop set: the same for all requests and runs."""
        if self.length is None:
            return ()
        count = max(1, round(vocab / self.length))
        if count > MAX_STOP_IDS:
            raise BenchmarkError(f"1/{self.length} of a vocabulary of {vocab} are {count} stop ids; an engine takes {MAX_STOP_IDS}")
        return tuple(random.Random(0).sample(range(vocab), count))

    def asked(self, vocab: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and parameters; the same for the same seed."""
        choose, stops = random.Random(seed), self.stop_ids(vocab)
        count = self.streams * self.requests
        prompts = [[choose.randrange(vocab) for _ in range(self.prompt)] for _ in range(count)]
        params = [
            SamplingParams(
                max_new_tokens=self.new_tokens,
                temperature=self.temperature,
                seed=choose.getrandbits(32),
                stop_token_ids=stops,
                ignore_eos=True,
            )
            for _ in range(count)
        ]
        return prompts, params


class Served(NamedTuple):
    """One run: its steps, and what came out.

    Attributes:
        log: its steps. tokens: of all requests. lengths: of each. stopped: requests that a stop token ended.
        gap_s: sum of the run's step gaps, seconds; 0 without timing.
        digest: a number that equal tokens give.
    """

    log: StepLog
    tokens: int
    lengths: list[int]
    stopped: int
    gap_s: float
    digest: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.log.wall_s

    @property
    def mean_length(self) -> float:
        return self.tokens / len(self.lengths)


class Server:
    """An engine with random or loaded weights and no tokenizer. A context manager, so that its memory is freed.

    Args:
        config, weights: the model, on the device it runs on.
        load: the largest that it is to serve.
        depth: steps in flight. timing, meter, blocking, fast_kernels: see EngineOptions.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        load: Load,
        depth: int,
        *,
        timing: bool = False,
        meter: bool = True,
        blocking: bool = True,
        fast_kernels: bool = False,
    ) -> None:
        self._cuda = weights.device.type == "cuda"
        longest = load.prompt + load.new_tokens
        chunk = min(512, load.streams * load.prompt)
        self._engine: Engine | None = Engine.from_weights(
            config,
            weights,
            max_rows=load.streams,
            max_len=longest,
            depth=depth,
            page_size=PAGE_SIZE,
            num_pages=load.streams * -(-longest // PAGE_SIZE),
            chunk=chunk,
            prefill_buckets=tuple(_doubling(load.prompt, chunk)),
            max_stop_ids=max(1, len(load.stop_ids(config.vocab))),
            timing=timing,
            meter=meter,
            blocking=blocking,
            fast_kernels=fast_kernels,
        )

    @property
    def engine(self) -> Engine:
        """The engine, within the block."""
        assert self._engine is not None
        return self._engine

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.engine.close()
        self._engine = None
        if self._cuda:
            gc.collect()
            if error is None:
                torch.cuda.empty_cache()


def serve(engine: Engine, load: Load, seed: int) -> Served:
    """Serves a load, all of it queued at once. Raises BenchmarkError where a request ends with an error."""
    prompts, params = load.asked(engine.vocab_size, seed)
    gap_s = engine.stats().gap_s
    with logged_steps(engine.depth) as log:
        outputs = engine.generate(prompts, params)
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise BenchmarkError(f"a request failed: {failed}")
        _drain(engine)
    lengths = [len(output.token_ids) for output in outputs]
    return Served(
        log=log,
        tokens=sum(lengths),
        lengths=lengths,
        stopped=sum(output.finish_reason == "stop" for output in outputs),
        gap_s=engine.stats().gap_s - gap_s,
        digest=hash(tuple(output.token_ids for output in outputs)),
    )


def _drain(engine: Engine) -> None:
    """Waits for the zombies of the last requests."""
    deadline = time.monotonic() + 30
    while engine.stats().rows_held:
        if time.monotonic() > deadline:
            raise BenchmarkError("rows of requests that have ended are not given back")
        time.sleep(1e-3)


def _doubling(first: int, last: int) -> Sequence[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes

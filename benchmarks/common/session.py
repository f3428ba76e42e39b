"""A steady decode: B equally long rows in one pipeline, none of which ends while it is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from statistics import fmean, median

import torch

from benchmarks.common.result import BenchmarkError
from photon_ext.checks import Activations, Backend, KvDtype
from photon_ext.models.config import ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import plan_for
from photon_ext.models.weights import DecoderWeights
from photon_ext.observe.meter import percentile
from photon_ext.observe.trace_recorder import TraceRecorder
from photon_ext.runtime import Pipeline, RowParams, Runtime, StepTensors, probe
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.step import RowEvent

PAGE_SIZE = 16


class Session:
    """Runtime, Decoder and Pipeline around loaded weights. A context manager, which frees them.

    Args:
        config, weights: the model, on the device it runs on.
        prompts: one per row, equally long; all are prefilled in one step, so that rows stay so.
        new_tokens: cap of every row, which the caller must not reach while it measures.
        depth: steps in flight.
        timing: record events around each step, which adds their cost to it.
        chunk: tokens per prefill step; None: all prompts.
        captured: prefill steps of `chunk` tokens are graphs, too.
        blocking: the wait for a step yields the CPU; else it spins.
        backend: which kernels run; those made for Hopper where they fit.
        exact: prefill with our own linears, whose results do not depend on what else is in the
            step; torch's are faster for many tokens.
        kv_dtype: of keys and values; None: that of the weights.
        activations: what linears of many tokens read, as an engine has it; not with `exact`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        depth: int,
        timing: bool = False,
        chunk: int | None = None,
        captured: bool = False,
        blocking: bool = True,
        exact: bool = False,
        backend: Backend = "portable",
        kv_dtype: KvDtype | None = None,
        activations: Activations | None = None,
    ) -> None:
        self.batch = len(prompts)
        self.prompt_len = len(prompts[0])
        self.vocab_size = config.vocab
        chunk = chunk or self.batch * self.prompt_len
        pages = -(-(self.prompt_len + new_tokens) // PAGE_SIZE)
        self.runtime = Runtime(
            max_rows=self.batch,
            max_len=pages * PAGE_SIZE,
            depth=depth,
            device=weights.device,
            page_size=PAGE_SIZE,
            timing=timing,
            blocking=blocking,
            backend=backend,
        )
        self.decoder = Decoder(
            config,
            weights,
            max_step_tokens=max(chunk, self.batch),
            max_segments=self.batch,
            max_len=pages * PAGE_SIZE,
            page_size=PAGE_SIZE,
            num_pages=self.batch * pages,
            plan=plan_for(config, weights, backend, exact, activations),
            kv_dtype=kv_dtype,
        )
        self._logits: torch.Tensor | None = None  # of the step that was built last
        self.pipeline = Pipeline(
            self.runtime,
            self._forward,
            vocab_size=config.vocab,
            buckets=(self.batch,),
            prefill_buckets=(chunk,) if captured else (),
            chunk=chunk,
        )
        firsts = range(0, self.batch * pages, pages)
        self.rows = [
            self.pipeline.admit(prompt, RowParams(max_new_tokens=new_tokens), range(at, at + pages))
            for prompt, at in zip(prompts, firsts, strict=True)
        ]
        self.tokens: dict[int, list[int]] = {row.index: [] for row in self.rows}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.drain()
        on_cuda = self.runtime.device.type == "cuda"
        del self.pipeline, self.decoder, self.runtime, self._logits
        self.rows.clear()
        if on_cuda:
            gc.collect()
            if error is None:
                torch.cuda.empty_cache()

    @property
    def context(self) -> int:
        """Tokens that the step launched last attends to, per row."""
        return self.prompt_len + self.rows[0].launched - 1

    def _forward(self, step: StepTensors) -> None:
        self.decoder.forward(step)
        self._logits = step.logits

    def begin(self, warm_up: int = 0) -> list[float]:
        """Runs turns until every row has its first token and the pipeline is as full as it stays;
        then `warm_up` more, whose milliseconds it returns."""
        while any(not self.tokens[row.index] for row in self.rows):
            self.step()
        return self.run(warm_up) if warm_up else []

    def step(self) -> None:
        """One turn: launch, commit, keep the tokens."""
        self.keep(self.pipeline.tick())

    def keep(self, events: Sequence[RowEvent]) -> None:
        """Adds tokens to their rows. Raises BenchmarkError where a row has ended."""
        for event in events:
            if not event.tokens or event.finish is not None:
                why = f"{event.finish}, {event.error}"
                raise BenchmarkError(f"{event.row} ended while it was measured: {why}")
            self.tokens[event.row.index] += event.tokens

    def run(self, steps: int, seconds: float = float("inf")) -> list[float]:
        """Milliseconds of each of `steps` turns; fewer, but at least 8, after `seconds`."""
        times: list[float] = []
        begin = previous = time.perf_counter()
        while len(times) < steps and (len(times) < 8 or previous - begin < seconds):
            self.step()
            now = time.perf_counter()
            times.append((now - previous) * 1e3)
            previous = now
        return times

    def check(self) -> None:
        """Ends the rows; raises BenchmarkError unless the last logits are finite and all tokens are
        ids."""
        self.drain()
        logits = self._logits
        if logits is not None and not bool(torch.isfinite(logits[: self.batch]).all()):
            raise BenchmarkError("the logits of the last step are not all finite")
        for row in self.rows:
            if any(not 0 <= token < self.vocab_size for token in self.tokens[row.index]):
                raise BenchmarkError(f"{row} produced a token outside [0, {self.vocab_size})")

    def rows_equal(self) -> bool:
        """Whether rows with the same prompt have the same tokens."""
        first: dict[tuple[int, ...], list[int]] = {}
        pairs = ((row.prompt_ids, self.tokens[row.index]) for row in self.rows)
        return all(agree(first.setdefault(prompt, tokens), tokens) for prompt, tokens in pairs)

    def drain(self) -> None:
        """Ends every row and commits what is in flight; idempotent."""
        for row in self.rows:
            self.pipeline.abort(row)
        while self.pipeline.inflight:
            self.pipeline.commit()
        self.runtime.streams.synchronize()


def agree(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two streams of tokens are the same as far as both go."""
    return all(x == y for x, y in zip(a, b, strict=False))


def random_prompts(vocab_size: int, batch: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random ids; the first two prompts are the same: a check that rows do not touch each other."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (batch, length), generator=generator)
    prompts: list[list[int]] = ids.tolist()
    return [prompts[0] if i == 1 else prompt for i, prompt in enumerate(prompts)]


def summary(values: Sequence[float]) -> dict[str, float | int] | None:
    """Median, mean, 99th percentile and count; None without values."""
    if not values:
        return None
    p99 = percentile(values, 0.99)
    return {"median": median(values), "mean": fmean(values), "p99": p99, "count": len(values)}


def host_split(session: Session, steps: int) -> dict[str, float]:
    """Where the host's time of a steady step goes, median microseconds.

    `launch` is without `plan`; `commit` without `wait`, the blocking wait for the device;
    `deliver` keeps the tokens in lists. `busy` is everything but the wait.
    """
    parts: dict[str, list[float]] = {}
    clock = time.perf_counter
    recorder = probe.active = TraceRecorder(nvtx=False, capacity=64)  # phases of one turn
    try:
        for _ in range(steps):
            begin = clock()
            session.pipeline.launch()
            launched = clock()
            events = session.pipeline.commit()
            committed = clock()
            session.keep(events)
            delivered = clock()
            us = {span.phase: (span.end - span.start) / 1e3 for span in recorder.spans}
            plan, wait = us.get(Phase.PLAN, 0.0), us.get(Phase.WAIT, 0.0)
            recorder.spans.clear()
            values = {
                "plan": plan,
                "launch": (launched - begin) * 1e6 - plan,
                "wait": wait,
                "commit": (committed - launched) * 1e6 - wait,
                "deliver": (delivered - committed) * 1e6,
                "busy": (delivered - begin) * 1e6 - wait,
            }
            for name, value in values.items():
                parts.setdefault(name, []).append(value)
    finally:
        probe.active = None
    return {name: median(values) for name, values in parts.items()}

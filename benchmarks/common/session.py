"""A steady decode: B equally long rows in one pipeline, none of which ends while it is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from benchmarks.common.result import BenchmarkError
from photon_ext.models.config import ModelConfig
from photon_ext.models.decoder import GEMM_TOKENS, Decoder
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime import Pipeline, Runtime, StepTensors

PAGE_SIZE = 16


class Memory(NamedTuple):
    """Bytes that a runtime holds besides weights and KV.

    Attributes:
        activations: the forward's arena, what slots share, and what each slot owns.
        graphs: what the device gave for graphs, where it tells; else 0.
    """

    activations: int
    graphs: int


class _Forward:
    """The decoder's forward, which keeps the logits of the step that was built last."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.logits: torch.Tensor | None = None

    def __call__(self, step: StepTensors) -> None:
        self._decoder.forward(step)
        self.logits = step.logits


class Session:
    """Runtime, Decoder and Pipeline around loaded weights; used as a context manager, so that what
    it holds is freed.

    Args:
        config, weights: the model, on the device it runs on.
        prompts: one per row, equally long; they are prefilled in one step, so that all rows stay
            equally long.
        new_tokens: cap of every row, which the caller must not reach while it measures.
        depth: steps in flight.
        timing: record events around each step (adds their cost to it).
        chunk: tokens per prefill step; None: all prompts.
        blocking: the wait for a step yields the CPU; else it spins.
        fast: use the fast kernels, where they fit.
        exact: prefill with our own linears, whose results do not depend on what else is in the
            step; torch's are faster for many tokens.
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
        blocking: bool = True,
        exact: bool = False,
        fast: bool = False,
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
            backend="hopper" if fast else "portable",
        )
        self.decoder = Decoder(
            config,
            weights,
            max_step_tokens=max(chunk, self.batch),
            max_segments=self.batch,
            max_len=pages * PAGE_SIZE,
            page_size=PAGE_SIZE,
            num_pages=1 + self.batch * pages,
            gemm_tokens=None if exact else GEMM_TOKENS,
            hopper=fast,
        )
        self._forward = _Forward(self.decoder)
        self.pipeline = Pipeline(
            self.runtime,
            self._forward,
            vocab_size=config.vocab,
            buckets=(self.batch,),
            prefill_buckets=(),
            chunk=chunk,
        )
        self.rows = [
            self.pipeline.admit(
                prompt, max_new_tokens=new_tokens, pages=range(1 + i * pages, 1 + (i + 1) * pages)
            )
            for i, prompt in enumerate(prompts)
        ]
        self.tokens: dict[int, list[int]] = {row.index: [] for row in self.rows}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.drain()
        on_cuda = self.runtime.device.type == "cuda"
        del self.pipeline, self.decoder, self.runtime, self._forward
        self.rows.clear()
        if on_cuda:
            gc.collect()
            if error is None:
                torch.cuda.empty_cache()

    @property
    def context(self) -> int:
        """Tokens that the step launched last attends to, per row."""
        return self.prompt_len + self.rows[0].sampled - 1

    @property
    def memory(self) -> Memory:
        report = self.runtime.report
        assert report is not None
        slots = self.runtime.depth * report.slot_bytes
        return Memory(
            self.decoder.activation_bytes + report.shared_bytes + slots, report.graph_bytes
        )

    def prefill(self) -> None:
        """Runs ticks until every row has its first token, and the pipeline is as full as it
        stays.
        """
        while any(not self.tokens[row.index] for row in self.rows):
            self.step()

    def step(self) -> None:
        """One turn: launch, commit, keep the tokens."""
        for event in self.pipeline.tick():
            if event.token is None or event.finish is not None:
                raise BenchmarkError(
                    f"{event.row} ended while it was measured: {event.finish}, {event.error}"
                )
            self.tokens[event.row.index].append(event.token)

    def run(self, steps: int, seconds: float = float("inf")) -> list[float]:
        """Up to `steps` turns, at least 8, fewer if they take longer than `seconds`; the
        milliseconds of each.
        """
        times: list[float] = []
        begin = previous = time.perf_counter()
        while len(times) < steps and (len(times) < 8 or previous - begin < seconds):
            self.step()
            now = time.perf_counter()
            times.append((now - previous) * 1e3)
            previous = now
        return times

    def check(self) -> None:
        """Ends the rows; raises BenchmarkError unless the last logits are finite and all tokens
        are ids.
        """
        self.drain()
        logits = self._forward.logits
        if logits is not None and not bool(torch.isfinite(logits[: self.batch]).all()):
            raise BenchmarkError("the logits of the last step are not all finite")
        for row in self.rows:
            if any(not 0 <= token < self.vocab_size for token in self.tokens[row.index]):
                raise BenchmarkError(f"{row} produced a token outside [0, {self.vocab_size})")

    def rows_equal(self) -> bool:
        """Whether rows with the same prompt have the same tokens."""
        first: dict[tuple[int, ...], list[int]] = {}
        return all(
            agree(first.setdefault(row.prompt_ids, self.tokens[row.index]), self.tokens[row.index])
            for row in self.rows
        )

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
    """Prompts of random ids; the first two are the same, as a check that rows do not influence
    each other.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(
        vocab_size, (batch, length), generator=generator
    ).tolist()
    return [prompts[0] if i == 1 else prompt for i, prompt in enumerate(prompts)]

"""photon_ext: the pipeline step by step, and the whole engine as a caller sees it."""

from __future__ import annotations

import torch

import photon_ext
from benchmarks.common.session import Session
from benchmarks.engines.peer import (
    BY_DIFFERENCE,
    BY_STEP,
    Measured,
    Prompts,
    Setup,
    Tokens,
    Window,
    by_difference,
    by_steps,
)
from photon_ext import Engine, SamplingParams
from photon_ext.models.loader import load_model

SPARE = 8  # tokens beyond the window: no row may end while it is timed


class Ours:
    """Full steps of a pipeline with two slots, from carry-over to published token."""

    method = BY_STEP

    def __init__(self, setup: Setup) -> None:
        self.version = photon_ext.__version__
        self.mode = f"one process, depth 2, {_mode(setup)}"
        self._options = {"blocking": not setup.spin, "fast": setup.fast}
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        with Session(
            self._config, self._weights, prompts, window.last + SPARE, depth=2, **self._options
        ) as session:
            session.prefill()
            times = session.run(window.last - min(map(len, session.tokens.values())))
            session.check()
            tokens = [session.tokens[row.index][: window.last] for row in session.rows]
        return by_steps(times, tokens, window)

    def close(self) -> None:
        del self._weights


class OurEngine:
    """`Engine.generate`, with its scheduling, its thread and its queues."""

    method = BY_DIFFERENCE

    def __init__(self, setup: Setup) -> None:
        self.version = photon_ext.__version__
        self.mode = f"one process, engine thread, depth 2, {_mode(setup)}"
        self._setup = setup
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        rows = len(prompts)
        length = window.prompt + window.last + SPARE
        sizes = {"max_rows": rows, "max_len": length, "buckets": (rows,)}
        engine = Engine.from_weights(
            self._config,
            self._weights,
            None,
            **sizes,
            blocking=not self._setup.spin,
            backend="hopper" if self._setup.fast else "portable",
        )
        try:
            return by_difference(
                lambda given, count: _generate(engine, given, count),
                prompts,
                window,
                self._setup.seconds,
            )
        finally:
            engine.close()
            if self._setup.device == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        del self._weights


def _mode(setup: Setup) -> str:
    runs = setup.dtype == "bfloat16" and setup.device == "cuda" and photon_ext.hopper_runs()
    kernels = "fast" if setup.fast and runs else "portable"
    return f"{'spinning' if setup.spin else 'blocking'} waits, {kernels} kernels"


def _generate(engine: Engine, prompts: Prompts, count: int) -> Tokens:
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]

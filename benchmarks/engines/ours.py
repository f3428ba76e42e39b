"""photon_ext: the pipeline step by step, and the whole engine as a caller sees it."""

from __future__ import annotations

from functools import partial

import torch

import photon_ext
from benchmarks.common.session import Session
from benchmarks.engines import peer
from photon_ext import Engine, SamplingParams
from photon_ext.models.loading.loader import load_model

SPARE = 8  # tokens beyond the window: no row may end while it is timed


class Ours:
    """Full steps of a pipeline with two slots, from carry-over to published token."""

    method = peer.BY_STEP

    def __init__(self, setup: peer.Setup) -> None:
        self.version = photon_ext.__version__
        self.mode = f"one process, depth 2, {_mode(setup)}"
        self._backend = setup.backend
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        model, count = (self._config, self._weights), window.last + SPARE
        with Session(*model, prompts, count, depth=2, backend=self._backend) as session:
            session.begin()
            times = session.run(window.last - min(map(len, session.tokens.values())))
            session.check()
            tokens = [session.tokens[row.index][: window.last] for row in session.rows]
        return peer.by_steps(times, tokens, window)

    def close(self) -> None:
        del self._weights


class OurEngine:
    """`Engine.generate`, with its scheduling, its thread and its queues."""

    method = peer.BY_DIFFERENCE

    def __init__(self, setup: peer.Setup) -> None:
        self.version = photon_ext.__version__
        self.mode = f"one process, engine thread, depth 2, {_mode(setup)}"
        self._setup = setup
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        rows = len(prompts)
        length = window.prompt + window.last + SPARE
        sizes = {"max_rows": rows, "max_len": length, "buckets": (rows,)}
        options = {"blocking": True, "backend": self._setup.backend, "prefix_cache": False}
        engine = Engine.from_weights(self._config, self._weights, None, **sizes, **options)
        try:
            run = partial(_generate, engine)
            return peer.by_difference(run, prompts, window, self._setup.seconds)
        finally:
            engine.close()
            if self._setup.device == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        del self._weights


def _mode(setup: peer.Setup) -> str:
    runs = setup.dtype == "bfloat16" and setup.device == "cuda" and photon_ext.hopper_runs()
    kernels = setup.backend if runs else "portable"
    return f"blocking waits, {kernels} kernels"


def _generate(engine: Engine, prompts: peer.Prompts, count: int) -> peer.Tokens:
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]

"""SGLang, offline: `Engine.generate` of prompts given as ids, its scheduler in a process of its
own, as it does by default.
"""

from __future__ import annotations

import sglang

from benchmarks.engines.peer import (
    BY_DIFFERENCE,
    Measured,
    Prompts,
    Setup,
    Tokens,
    Window,
    by_difference,
)

SPARE = 8


class Sglang:
    """One Engine for all batches."""

    method = BY_DIFFERENCE
    mode = "Engine.generate, scheduler in its own process, defaults"

    def __init__(self, setup: Setup) -> None:
        self.version = str(sglang.__version__)
        self._seconds = setup.seconds
        length = setup.window.prompt + setup.window.last + SPARE
        self._engine = sglang.Engine(
            model_path=setup.directory,
            load_format=setup.load_format,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            context_length=length,
            log_level="error",
        )

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        return by_difference(self._generate, prompts, window, self._seconds)

    def _generate(self, prompts: Prompts, count: int) -> Tokens:
        params = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        return [
            list(output["output_ids"])
            for output in self._engine.generate(input_ids=prompts, sampling_params=params)
        ]

    def close(self) -> None:
        self._engine.shutdown()

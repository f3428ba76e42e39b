"""vLLM, offline: `LLM.generate` of prompts given as ids, its engine core in a process of its
own, as it does by default.
"""

from __future__ import annotations

import vllm

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


class Vllm:
    """One LLM for all batches."""

    method = BY_DIFFERENCE
    mode = "LLM.generate, engine core in its own process, defaults"

    def __init__(self, setup: Setup) -> None:
        self.version = str(vllm.__version__)
        self._seconds = setup.seconds
        length = setup.window.prompt + setup.window.last + SPARE
        self._llm = vllm.LLM(
            model=setup.directory,
            load_format=setup.load_format,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            max_model_len=length,
        )

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        return by_difference(self._generate, prompts, window, self._seconds)

    def _generate(self, prompts: Prompts, count: int) -> Tokens:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self._llm

"""vLLM and SGLang, offline: prompts given as ids, their engines in processes of their own."""

from __future__ import annotations

from benchmarks.engines import peer

SPARE = 8


class Vllm:
    """`LLM.generate` of one LLM for all batches."""

    method = peer.BY_DIFFERENCE
    mode = "LLM.generate, engine core in its own process, defaults"

    def __init__(self, setup: peer.Setup) -> None:
        import vllm

        self.version = str(vllm.__version__)
        self._params, self._seconds = vllm.SamplingParams, setup.seconds
        self._llm = vllm.LLM(
            model=setup.directory,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            max_model_len=setup.window.prompt + setup.window.last + SPARE,
        )

    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        return peer.by_difference(self._generate, prompts, window, self._seconds)

    def _generate(self, prompts: peer.Prompts, count: int) -> peer.Tokens:
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self._llm


class Sglang:
    """`Engine.generate` of one Engine for all batches."""

    method = peer.BY_DIFFERENCE
    mode = "Engine.generate, scheduler in its own process, defaults"

    def __init__(self, setup: peer.Setup) -> None:
        import sglang

        self.version, self._seconds = str(sglang.__version__), setup.seconds
        self._engine = sglang.Engine(
            model_path=setup.directory,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            context_length=setup.window.prompt + setup.window.last + SPARE,
            log_level="error",
        )

    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        return peer.by_difference(self._generate, prompts, window, self._seconds)

    def _generate(self, prompts: peer.Prompts, count: int) -> peer.Tokens:
        params = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return [list(output["output_ids"]) for output in outputs]

    def close(self) -> None:
        self._engine.shutdown()

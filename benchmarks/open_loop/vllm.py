"""vLLM's own asynchronous engine as a server of an open loop; it imports nothing of photon_ext."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.common.result import BenchmarkError
from benchmarks.open_loop.client import News

MEMORY_SHARE = 0.85  # of the GPU: other processes may hold a little


class VllmServer:
    """Implements `client.Server`. An event loop on a thread of its own has a task per request."""

    def __init__(self, task: dict[str, Any]) -> None:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version = str(vllm.__version__)
        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        self._params = partial(vllm.SamplingParams, **greedy, output_kind=RequestOutputKind.DELTA)
        self.start_up: dict[str, float] = {}
        self._loop, self._names = asyncio.new_event_loop(), count()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        args = AsyncEngineArgs(
            model=task["directory"],
            dtype=task["dtype"] or "bfloat16",
            max_model_len=task["options"]["max_len"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
            gpu_memory_utilization=MEMORY_SHARE,
        )

        async def open_engine() -> AsyncLLM:  # within the loop, to which its tasks then belong
            return AsyncLLM.from_engine_args(args)

        self._llm = asyncio.run_coroutine_threadsafe(open_engine(), self._loop).result()
        self.vocabulary = int(self._llm.model_config.get_vocab_size())
        self.begin()

    def begin(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._times: dict[int, list[float]] = {}
        self._errors: dict[int, str] = {}
        self._news: SimpleQueue[News] = SimpleQueue()

    def submit(self, index: int, prompt: list[int], count: int) -> None:
        self._tokens[index], self._times[index] = [], []
        asyncio.run_coroutine_threadsafe(self._generate(index, prompt, count), self._loop)

    async def _generate(self, index: int, prompt: list[int], count: int) -> None:
        tokens, times = self._tokens[index], self._times[index]
        given, name = {"prompt_token_ids": prompt}, str(next(self._names))
        try:
            async for output in self._llm.generate(given, self._params(max_tokens=count), name):
                now, fresh = time.perf_counter(), output.outputs[0].token_ids
                if fresh and not tokens:
                    self._news.put(News(now, index, False))
                tokens += fresh
                times += [now] * len(fresh)
        except Exception as error:
            self._errors[index] = f"{type(error).__name__}: {error}"
        self._news.put(News(time.perf_counter(), index, True))

    def news(self, timeout: float | None) -> Sequence[News]:
        try:
            return [self._news.get(timeout=timeout)]
        except Empty:
            return ()

    def answer(self, index: int) -> list[int]:
        if index in self._errors:
            raise BenchmarkError(f"request {index} failed: {self._errors[index]}")
        return self._tokens[index]

    def times(self) -> list[list[float]]:
        return [self._times[index] for index in range(len(self._times))]

    def counters(self, busy_s: float) -> dict[str, Any]:
        return {}

    def hits(self) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

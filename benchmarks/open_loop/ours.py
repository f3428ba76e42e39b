"""photon_ext as a server of an open loop: one listener on its thread keeps what each step gave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any

import photon_ext
from benchmarks.attribution.serving import drain
from benchmarks.common.models import open_model
from benchmarks.common.options import DTYPES, device_of
from benchmarks.common.result import BenchmarkError
from benchmarks.open_loop.client import News
from photon_ext import Engine, Request, SamplingParams, StepOutput
from photon_ext.observe.meter import percentile


class OurServer:
    """Implements `client.Server`. The listener puts the steps into a list, and those with a first
    token or an end into a queue; whose tokens they are is looked up after the run."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.version = photon_ext.__version__
        dtype = None if task["dtype"] is None else DTYPES[task["dtype"]]
        config, weights = open_model(
            task["model"], dtype, device_of(task["device"]), task["quantize"]
        )
        begin = time.perf_counter()
        self._engine = Engine.from_weights(config, weights, None, **task["options"])
        self.start_up = {"engine_s": time.perf_counter() - begin, **_captured(self._engine)}
        self.vocabulary = self._engine.vocab_size
        self.begin()
        self._engine.listen(self._hear)

    def begin(self) -> None:
        self._requests: dict[int, Request] = {}
        self._indices: dict[int, int] = {}  # by id
        self._started: set[int] = set()
        self._ids = b""
        self._steps: list[tuple[float, StepOutput]] = []
        self._news: SimpleQueue[tuple[float, StepOutput]] = SimpleQueue()
        self._before = self._engine.stats()

    def submit(self, index: int, prompt: list[int], count: int) -> None:
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        self._requests[index] = request = self._engine.submit(prompt, params)
        self._indices[request.id] = index

    def _hear(self, output: StepOutput) -> None:
        step = time.perf_counter(), output
        self._steps.append(step)
        if output.ids is not self._ids or output.ends:
            self._news.put(step)
        self._ids = output.ids

    def news(self, timeout: float | None) -> Sequence[News]:
        try:
            at, output = self._news.get(timeout=timeout)
        except Empty:
            return ()
        told = [request for request, tokens in output.rows() if tokens]
        fresh = [request for request in told if request not in self._started]
        self._started.update(fresh)
        started = [News(at, self._indices[request], False) for request in fresh]
        return started + [News(at, self._indices[request.id], True) for request in output.ends]

    def answer(self, index: int) -> list[int]:
        output = self._requests[index].result()
        if output.error is not None:
            raise BenchmarkError(f"request {index} failed: {output.error}")
        return list(output.token_ids)

    def times(self) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in self._requests]
        for at, output in self._steps:
            for request, tokens in output.rows():
                times[self._indices[request]] += [at] * len(tokens)
        return times

    def counters(self, busy_s: float) -> dict[str, Any]:
        drain(self._engine)
        snapshots = self._before, self._engine.stats()
        before, after = (asdict(snapshot) for snapshot in snapshots)
        numbers = (name for name, value in before.items() if isinstance(value, int))
        grown = {name: after[name] - before[name] for name in numbers}
        gaps = self._engine.meter.gaps_us(self._before.gap_count)
        idle_s = after["gap_s"] - before["gap_s"]
        works = [sum(each.host_s.values()) - each.host_wait_s for each in snapshots]
        return {
            "grown": grown,
            "zombie_share": grown["zombie_rows"] / max(grown["committed_rows"], 1),
            "active_share": 1 - idle_s / busy_s if gaps else None,
            "gap_us": {f"p{p}": percentile(gaps, p / 100) for p in (50, 99)} if gaps else None,
            "host_us": (works[1] - works[0]) / max(grown["steps"], 1) * 1e6,
        }

    def hits(self) -> list[tuple[int, int]]:
        outputs = (self._requests[index].result() for index in range(len(self._requests)))
        return [(output.prompt_tokens, output.cached_tokens) for output in outputs]

    def close(self) -> None:
        self._engine.close()


def _captured(engine: Engine) -> dict[str, float]:
    """How many graphs, and their time and memory."""
    runtime: Any = engine._pipeline._runtime
    report = runtime.report
    return {
        "capture_s": report.seconds,
        "graphs": report.graphs,
        "graph_mib": report.graph_bytes / 2**20,
    }

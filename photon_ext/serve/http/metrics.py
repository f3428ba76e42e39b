"""/metrics: the engine's counts, by vLLM's names, which dashboards know, and by our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import Response

from photon_ext.observe.prometheus import CONTENT_TYPE, exposition
from photon_ext.observe.request_meter import BOUNDS
from photon_ext.serve.http.model import ServedModel

if TYPE_CHECKING:
    from photon_ext.observe.meter import MeterSnapshot

_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "vllm:generation_tokens": ("tokens", "Tokens that were generated."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked for in cached pages."),
    "vllm:prefix_cache_hits": ("prefix_hit_tokens", "Prompt tokens found in cached pages."),
    "vllm:num_preemptions": ("preemptions", "Requests that left their rows for others' pages."),
}
# of a request, counted at its end: see observe.request_meter
_BETWEEN = "between_tokens_s", "Between tokens: each request's mean, once for each of its tokens."
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("first_token_s", "From a request to its first token."),
    "vllm:inter_token_latency_seconds": _BETWEEN,
    "vllm:time_per_output_token_seconds": _BETWEEN,  # as older dashboards know it
    "vllm:request_time_per_output_token_seconds": (
        "token_s",
        "Between two tokens of a request: the mean of each.",
    ),
    "vllm:e2e_request_latency_seconds": ("whole_s", "From a request to its end."),
    "vllm:request_queue_time_seconds": ("queue_s", "From a request to its row."),
    "vllm:request_prefill_time_seconds": ("prefill_s", "From its row to its first token."),
    "vllm:request_decode_time_seconds": ("decode_s", "From its first token to its end."),
    "vllm:request_inference_time_seconds": ("in_row_s", "From its row to its end."),
    "vllm:request_prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "vllm:request_generation_tokens": ("tokens", "Tokens of answers."),
}
# in vLLM's words
_REASONS = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "timeout": "timeout",
    "error": "error",
}


class MetricsEndpoint:
    """What the engine is doing; the same from every HTTP process."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, request: Request) -> Response:
        """Raises EngineStarting, EngineGone."""
        stats = await self._model.client.stats()
        registry = CollectorRegistry()
        registry.register(_Collector(stats, self._model.settings.served_names[0]))
        ours = exposition(cast("MeterSnapshot", SimpleNamespace(**stats)))
        text = generate_latest(registry).decode() + ours
        return Response(text, headers={"content-type": CONTENT_TYPE})


class _Collector:
    """What a registry asks for metrics."""

    def __init__(self, stats: Mapping[str, Any], name: str) -> None:
        self._stats = stats
        self._labels = {"model_name": name}

    def collect(self) -> Iterator[Metric]:
        for name, value, text in self._gauges():
            gauge = GaugeMetricFamily(name, text, labels=[*self._labels])
            gauge.add_metric([*self._labels.values()], value)
            yield gauge
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[*self._labels])
            counter.add_metric([*self._labels.values()], self._stats[field])
            yield counter
        yield from self._requests()

    def _requests(self) -> Iterator[Metric]:
        """Of those that have ended."""
        text = "Requests that have ended, by why; abort: their client left."
        name = "vllm:request_success"
        ended = CounterMetricFamily(name, text, labels=[*self._labels, "finished_reason"])
        for reason, told in _REASONS.items():
            count = self._stats["requests_ended"].get(reason, 0)
            ended.add_metric([*self._labels.values(), told], count)
        yield ended
        found = self._stats["request_histograms"]
        for name, (field, text) in _HISTOGRAMS.items():
            counts, total = found[field]
            bounds = [*map(str, BOUNDS[field]), "+Inf"]
            buckets = [*zip(bounds, accumulate(counts), strict=True)]
            family = HistogramMetricFamily(name, text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], buckets, total)
            yield family

    def _gauges(self) -> Iterator[tuple[str, float, str]]:
        now = self._stats
        pages = now["pages_held"] + now["pages_cached"] + now["pages_free"]
        yield "vllm:num_requests_running", now["live"] - now["waiting"], "Requests with a row."
        yield "vllm:num_requests_waiting", now["waiting"], "Requests that wait for a row."
        used = now["pages_held"] / pages
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield name, used, "Share of KV pages in use, 1 is all."

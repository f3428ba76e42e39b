"""The meter as Prometheus text, through prometheus_client (extra `engine`).

Counters only grow, so that `rate(photon_tokens_total[1m])` gives tokens/s. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from photon_ext.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from photon_ext.observe.meter import MeterSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS = {
    "quiet_steps": "Steps that sent no byte to the device.",
    "split_steps": "Steps that were sampled late, because a row waits for a mask of the host.",
    "zombie_steps": "Committed steps that held only rows whose sequence had ended.",
    "tokens": "Tokens committed.",
    "committed_rows": "Rows of committed steps, zombies included.",
    "zombie_rows": "Rows of committed steps whose sequence had already ended.",
    "host_waits": "Commits that had to wait for the device.",
    "timeouts": "Requests that their deadline ended.",
    "refusals": "Requests that a full queue refused.",
    "device_waits": "Launches that found the device out of work while there was some.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "prefix_hit_tokens": "Prompt tokens found in cached pages.",
    "device_constraints": "Requests that got a row with a constraint that the device keeps.",
    "host_constraints": "Requests that got a row with a constraint that the host keeps.",
    "preemptions": "Requests that left their rows for others' pages, to go on later.",
}
_GAUGES = {
    "rows_held": "Rows in use, zombies included.",
    "rows_max": "Rows there are.",
    "pages_held": "KV pages in use.",
    "pages_cached": "KV pages that nobody holds and a prompt may find its beginning in.",
    "pages_free": "KV pages that hold nothing.",
    "automata": "Constraints that lie on the device.",
    "automata_held": "Constraints on the device that rows hold.",
    "automata_held_bytes": "Bytes of constraints on the device that rows hold.",
}


def exposition(snapshot: MeterSnapshot) -> str:
    """All metrics of a snapshot, each with HELP and TYPE, to be served as CONTENT_TYPE.

    Names begin with `photon_`. Raises ConfigError where prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ConfigError(
            "prometheus() needs the package prometheus-client: pip install prometheus-client"
        ) from error

    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    return generate_latest(registry).decode()


class _Collector:
    """The collector that a registry asks for metrics: those of one snapshot."""

    def __init__(self, snapshot: MeterSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily as Gauge
        from prometheus_client.core import SummaryMetricFamily

        now = self._snapshot
        info = Gauge("photon_engine_info", "Always 1; says what runs.", labels=["device", "depth"])
        info.add_metric([now.device, str(now.depth)], 1)
        yield info
        yield Gauge("photon_uptime_seconds", "Seconds since the engine was made.", now.uptime_s)
        steps = {"decode": now.decode_steps, "prefill": now.steps - now.decode_steps}
        yield _counter("steps", "Steps launched.", "kind", steps)
        for name, text in _COUNTERS.items():
            yield _counter(name, text, None, {"": getattr(now, name)})
        text = "Host time by phase; commit includes its wait for the device."
        yield _counter("host_seconds", text, "phase", now.host_s)
        text = "Seconds that commits waited for the device."
        yield _counter("host_wait_seconds", text, None, {"": now.host_wait_s})
        text = "Idle time of the device before a step; none without timing."
        gaps = SummaryMetricFamily("photon_step_gap_seconds", text, now.gap_count, now.gap_s)
        for quantile, us in (("0.5", now.step_gap_us), ("0.99", now.step_gap_p99_us)):
            if us is not None:
                gaps.add_sample(gaps.name, {"quantile": quantile}, us / 1e6)
        yield gaps
        if now.step_us is not None:
            text = "What steps like the latest timed one take as a rule."
            yield Gauge("photon_step_seconds", text, now.step_us / 1e6)
        yield Gauge("photon_requests_live", "Requests without a final event.", now.live)
        yield Gauge("photon_requests_waiting", "Requests that wait for a row.", now.waiting)
        for name, text in _GAUGES.items():
            yield Gauge(f"photon_{name}", text, getattr(now, name))


def _counter(name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"photon_{name}", text, labels=[label] if label else None)
    for value_of, value in values.items():
        family.add_metric([value_of] if label else [], value)
    return family

"""The meter as Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/, text
format 0.0.4).

Counters only grow, so that `rate(photon_tokens_total[1m])` gives tokens/s. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from photon_ext.observe.meter import MeterSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Sample(NamedTuple):
    """One line: what follows the family's name, labels, value."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


class Family(NamedTuple):
    """One metric with its samples. `kind` is counter, gauge or summary."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


def exposition(snapshot: MeterSnapshot) -> str:
    """All metrics of a snapshot, each with HELP and TYPE; the last line ends with a line feed. To
    be served as CONTENT_TYPE.

    Names begin with `photon_`, such as photon_tokens_total; `families` has them all, with what they
    mean.
    """
    return "".join(_text(family) for family in families(snapshot))


def families(now: MeterSnapshot) -> Iterator[Family]:
    """The metrics of a snapshot: names, kinds, and what each means."""
    yield _one(
        "engine_info",
        "gauge",
        "Always 1; the labels say what runs.",
        1,
        device=now.device,
        depth=str(now.depth),
    )
    yield _one("uptime_seconds", "gauge", "Seconds since the engine was made.", now.uptime_s)
    steps = (("decode", now.decode_steps), ("prefill", now.steps - now.decode_steps))
    yield _split("steps_total", "counter", "Steps launched.", "kind", dict(steps))
    yield _one(
        "quiet_steps_total", "counter", "Steps that sent no byte to the device.", now.quiet_steps
    )
    yield _one(
        "zombie_steps_total",
        "counter",
        "Committed steps that held only rows whose sequence had ended.",
        now.zombie_steps,
    )
    yield _one("tokens_total", "counter", "Tokens committed.", now.tokens)
    yield _one(
        "committed_rows_total",
        "counter",
        "Rows of committed steps, zombies included.",
        now.committed_rows,
    )
    yield _one(
        "zombie_rows_total",
        "counter",
        "Rows of committed steps whose sequence had already ended.",
        now.zombie_rows,
    )
    yield _split(
        "host_seconds_total",
        "counter",
        "Host time by phase; commit includes its wait for the device.",
        "phase",
        now.host_s,
    )
    yield _one(
        "host_waits_total", "counter", "Commits that had to wait for the device.", now.host_waits
    )
    yield _one(
        "host_wait_seconds_total",
        "counter",
        "Seconds that commits waited for the device.",
        now.host_wait_s,
    )
    yield _one(
        "device_waits_total",
        "counter",
        "Launches that found the device out of work while there was some.",
        now.device_waits,
    )
    yield _gaps(now)
    yield _one("requests_live", "gauge", "Requests without a final event.", now.live)
    yield _one("requests_waiting", "gauge", "Requests that wait for a row and pages.", now.waiting)
    yield _one("rows_held", "gauge", "Rows in use, zombies included.", now.rows_held)
    yield _one("rows_max", "gauge", "Rows there are.", now.rows_max)
    yield _one("pages_held", "gauge", "KV pages in use.", now.pages_held)
    yield _one("pages_free", "gauge", "KV pages that are free.", now.pages_free)


def _gaps(now: MeterSnapshot) -> Family:
    quantiles = (("0.5", now.step_gap_us), ("0.99", now.step_gap_p99_us))
    recent = [
        Sample(us / 1e6, {"quantile": quantile}) for quantile, us in quantiles if us is not None
    ]
    total = [Sample(now.gap_s, suffix="_sum"), Sample(now.gap_count, suffix="_count")]
    return Family(
        "photon_step_gap_seconds",
        "summary",
        "Idle time of the device before a step; none without timing.",
        (*recent, *total),
    )


def _one(name: str, kind: str, text: str, value: float, **labels: str) -> Family:
    return Family(f"photon_{name}", kind, text, (Sample(value, labels),))


def _split(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    return Family(
        f"photon_{name}",
        kind,
        text,
        tuple(Sample(value, {label: key}) for key, value in values.items()),
    )


def _text(family: Family) -> str:
    lines = [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
    for sample in family.samples:
        labels = ",".join(
            f'{key}="{value.translate(_ESCAPES)}"' for key, value in sample.labels.items()
        )
        lines.append(
            f"{family.name}{sample.suffix}{'{' + labels + '}' if labels else ''} "
            f"{float(sample.value)!r}"
        )
    return "\n".join(lines) + "\n"

"""The text that Prometheus reads, through the reader of its own client library."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest

pytest.importorskip("prometheus_client", reason="pip install prometheus-client")

from prometheus_client.parser import text_string_to_metric_families

from photon_ext.errors import ConfigError
from photon_ext.observe.meter import MeterSnapshot
from photon_ext.observe.prometheus import exposition
from photon_ext.sampling import SamplingParams
from tests.observe.test_meter import bare_meter, scripted

NAMES = """engine_info uptime_seconds steps_total quiet_steps_total zombie_steps_total tokens_total
committed_rows_total zombie_rows_total host_seconds_total host_waits_total host_wait_seconds_total
device_waits_total step_gap_seconds requests_live requests_waiting rows_held rows_max pages_held
pages_cached pages_free prompt_tokens_total prefix_hit_tokens_total preemptions_total timeouts_total
refusals_total split_steps_total device_constraints_total host_constraints_total automata
automata_held automata_held_bytes step_seconds"""


def snapshot(**changes: object) -> MeterSnapshot:
    times = {"admit": 0.5, "commit": 1.25}
    made = replace(bare_meter()[0].snapshot(), step_us=2500.0, host_s=times)
    return replace(made, **changes)  # type: ignore[arg-type]


def values(text: str) -> dict[tuple[str, str], float]:
    """Values by name and label values."""
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples)
    return {(s.name, " ".join(sorted(s.labels.values()))): s.value for s in samples}


def test_every_metric_has_its_name_and_says_what_it_is() -> None:
    text = exposition(snapshot())
    typed = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert sorted(typed) == sorted(f"photon_{name}" for name in NAMES.split())
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation.endswith(".") for family in families)
    kinds = {family.name: family.type for family in families}
    assert (kinds["photon_tokens"], kinds["photon_rows_held"]) == ("counter", "gauge")
    assert kinds["photon_step_gap_seconds"] == "summary"


def test_values_are_those_of_the_snapshot() -> None:
    gaps = {"step_gap_us": 3.5, "step_gap_p99_us": 9.0, "gap_s": 0.25, "gap_count": 9}
    counts = {"steps": 10, "decode_steps": 7, "tokens": 123456789012, "zombie_rows": 3}
    now = snapshot(device="cuda:0", depth=2, waiting=4, pages_held=6, **gaps, **counts)
    found = values(exposition(now))
    assert found["photon_engine_info", "2 cuda:0"] == 1
    assert (found["photon_steps_total", "decode"], found["photon_steps_total", "prefill"]) == (7, 3)
    assert found["photon_tokens_total", ""] == 123456789012
    assert found["photon_zombie_rows_total", ""] == 3
    assert found["photon_host_seconds_total", "admit"] == 0.5
    assert found["photon_host_seconds_total", "commit"] == 1.25
    assert found["photon_step_gap_seconds", "0.5"] == pytest.approx(3.5e-6)
    assert found["photon_step_gap_seconds", "0.99"] == pytest.approx(9e-6)
    assert found["photon_step_gap_seconds_sum", ""] == 0.25
    assert found["photon_step_seconds", ""] == 0.0025
    assert found["photon_step_gap_seconds_count", ""] == 9
    assert (found["photon_requests_waiting", ""], found["photon_pages_held", ""]) == (4, 6)


def test_without_timing_there_are_no_quantiles() -> None:
    assert "quantile" not in exposition(snapshot())


def test_an_engine_gives_the_text_of_its_meter() -> None:
    with scripted() as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
        assert values(engine.meter.prometheus())["photon_tokens_total", ""] == 5


def test_without_the_library_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *arguments: object, **more: object) -> object:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return found(name, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install prometheus-client"):
        bare_meter()[0].prometheus()

"""The text that Prometheus reads, checked by a strict reader."""

from __future__ import annotations

from dataclasses import replace

import pytest

from photon_ext.observe.meter import MeterSnapshot
from photon_ext.observe.prometheus import exposition
from photon_ext.sampling import SamplingParams
from tests.observe.prometheus_parser import parse
from tests.observe.test_meter import bare_meter, scripted


def snapshot(**changes: object) -> MeterSnapshot:
    return replace(bare_meter()[0].snapshot(), **changes)  # type: ignore[arg-type]


def test_every_metric_is_ours_and_says_what_it_is() -> None:
    families = parse(exposition(snapshot()))
    assert len(families) >= 18
    assert all(name.startswith("photon_") for name in families)
    assert all(family.help.endswith(".") for family in families.values())


def test_values_are_those_of_the_snapshot() -> None:
    now = snapshot(
        device="cuda:0",
        depth=2,
        steps=10,
        decode_steps=7,
        tokens=123456789012,
        zombie_rows=3,
        step_gap_us=3.5,
        step_gap_p99_us=9.0,
        gap_s=0.25,
        gap_count=9,
        host_s={"plan": 0.5, "commit": 1.25},
        waiting=4,
        pages_held=6,
    )
    families = parse(exposition(now))

    def value(name: str, suffix: str = "", **labels: str) -> float:
        return families[name].values[name + suffix, tuple(sorted(labels.items()))]

    assert value("photon_engine_info", device="cuda:0", depth="2") == 1
    assert (
        value("photon_steps_total", kind="decode"),
        value("photon_steps_total", kind="prefill"),
    ) == (7, 3)
    assert value("photon_tokens_total") == 123456789012
    assert value("photon_zombie_rows_total") == 3
    assert value("photon_host_seconds_total", phase="commit") == 1.25
    assert value("photon_step_gap_seconds", quantile="0.5") == pytest.approx(3.5e-6)
    assert value("photon_step_gap_seconds", quantile="0.99") == pytest.approx(9e-6)
    assert (
        value("photon_step_gap_seconds", "_sum"),
        value("photon_step_gap_seconds", "_count"),
    ) == (0.25, 9)
    assert (value("photon_requests_waiting"), value("photon_pages_held")) == (4, 6)


def test_without_timing_there_are_no_quantiles() -> None:
    gaps = parse(exposition(snapshot()))["photon_step_gap_seconds"]
    assert set(gaps.values) == {
        ("photon_step_gap_seconds_sum", ()),
        ("photon_step_gap_seconds_count", ()),
    }


def test_labels_are_escaped() -> None:
    text = exposition(snapshot(device='a "b" \\ c\nd'))
    info = parse(text)["photon_engine_info"]
    assert dict(next(iter(info.values))[1])["device"] == 'a "b" \\ c\nd'


def test_an_engine_gives_the_text_of_its_meter() -> None:
    with scripted() as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
        families = parse(engine.meter.prometheus())
    assert families["photon_tokens_total"].values["photon_tokens_total", ()] == 5


@pytest.mark.parametrize(
    "text",
    [
        "# HELP a_total words\n# TYPE a_total counter\na_total 1",  # no line feed
        "# HELP a words\n# TYPE a counter\na 1\n",  # a counter without _total
        "# TYPE a gauge\na 1\n",  # no HELP
        "# HELP a words\n# TYPE a gauge\nb 1\n",
        "# HELP a words\n# TYPE a gauge\na 1\na 2\n",
        '# HELP a words\n# TYPE a gauge\na{x="1" y="2"} 2\n',
        '# HELP a words\n# TYPE a gauge\na{x="1\\t"} 2\n',
    ],
)
def test_the_reader_refuses_what_is_wrong(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse(text)

"""The tables of `benchmarks.bubble`, from the entries of its result file, older ones too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.tables import Table

GAINS = (
    *("model", "streams", "requests", "blocking ms", "pipelined ms", "gap us", "L", "formula"),
    *("predicted", "observed", "met"),
)
LONG = ("what", "depth", "total s", "active share", "ms/step", "tokens/s", "gap us")
METER = ("model", "streams", "ms/step off", "ms/step on", "ratio")

Entry = dict[str, Any]


def bubble_tables(data: Entry) -> list[Table]:
    """All tables of one result, model by model."""
    entries = [entry for entry in data["entries"] if entry["status"] == "ok"]
    models = dict.fromkeys(entry["model"] for entry in entries)
    return [table for model in models for table in model_tables(data, model)]


def model_tables(data: Entry, model: str) -> list[Table]:
    """The tables of one model."""
    found: dict[str, list[Entry]] = {"gain": [], "meter": [], "long": []}
    for entry in data["entries"]:
        if entry["status"] == "ok" and entry["model"] == model and entry["what"] in found:
            found[entry["what"]].append(entry)
    gains, meters, long = found.values()
    size = (long[0]["tokens"], long[0]["sequences"]) if long else (0, 0)
    return [
        Table(
            f"{model}: depth 2 over depth 1",
            GAINS,
            [_gain_row(entry) for entry in gains],
            [line for entry in gains for line in _remarks(entry)],
        ),
        Table(
            f"{model}: the meter's cost at depth 2",
            METER,
            [[*_label(e), e["off_ms"], e["on_ms"], round(e["ratio"], 4)] for e in meters],
        ),
        Table(
            f"{model}: {size[0]} tokens in each of {size[1]} sequences",
            LONG,
            _long_rows(long, data.get("published", ())),
        ),
    ]


def _label(entry: Entry) -> list[object]:
    return [entry["model"], entry["streams"]]


def _gain_row(entry: Entry) -> list[object]:
    shares = [f"{entry[name]:+.1%}" for name in ("formula", "predicted", "observed")]
    return [
        *_label(entry),
        f"{entry['requests'] // (entry['streams'] * entry['rounds'])} each",
        *(entry["block_ms"], entry["pipe_ms"], entry["parts"]["gap_us"], round(entry["length"], 1)),
        *shares,
        "yes" if entry["met"] else "no",
    ]


def _remarks(entry: Entry) -> Iterator[str]:
    """What has to be said about an entry, besides its figures."""
    label = f"{entry['model']}, {entry['streams']} stream{'s' * (entry['streams'] > 1)}"
    if not entry["met"]:
        yield f"{label}: {entry['cause']}"
    if not entry["tokens_equal"]:
        yield f"{label}: depth 1 and 2 generated different tokens; gains compare tokens/s"
    stopped, requests = entry["stopped"], entry["requests"]
    if stopped < 0.9 * requests:
        yield (
            f"{label}: only {stopped} of {requests} requests met a stop token; "
            "zombies are rarer than meant"
        )
    yield f"{label}: {entry['verdict']}"


def _long_rows(entries: Sequence[Entry], published: Sequence[Entry]) -> list[list[object]]:
    """Both depths, and beside them what others have published."""
    rows: list[list[object]] = []
    for entry in sorted(entries, key=lambda entry: int(entry["depth"])):
        figures = (entry[name] for name in ("ms_per_step", "tokens_per_s", "gap_us"))
        share = f"{entry['active_share']:.1%}"
        rows.append([entry["model"], entry["depth"], entry["wall_s"], share, *figures])
    for entry in published if rows else ():
        share = f"{entry['active_share']:.1%}"
        rows.append([entry["what"], None, entry["wall_s"], share, None, None, None])
    return rows

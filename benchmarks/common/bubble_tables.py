"""The tables of `benchmarks.bubble`, from the entries of its result file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.compared import Compared
from benchmarks.common.long_gaps import long_gaps_text
from benchmarks.common.section import Section

PARTS = ("model", "streams", "forward ms", "sampling ms", "period ms", "left over us", "gap us")
GAINS = (
    "model",
    "streams",
    "requests",
    "blocking ms",
    "pipelined ms",
    "L",
    "formula",
    "predicted",
    "observed",
    "while full",
    "met",
)
EFFECTS = (
    "model",
    "streams",
    "requests",
    "points",
    "steps, depth 1",
    "ms",
    "steps, depth 2",
    "ms",
    "by",
)
LONG = ("what", "depth", "total s", "active share", "ms/step", "tokens/s", "gap us")
METER = ("model", "streams", "ms/step off", "ms/step on", "ratio")
LEAST_POINTS = 0.0005  # gain that is worth a line

Entry = dict[str, Any]


def bubble_sections(data: Entry) -> list[Section]:
    """All tables of one result, model by model."""
    entries = [entry for entry in data["entries"] if entry["status"] == "ok"]
    models = dict.fromkeys(entry["model"] for entry in entries)
    return [section for model in models for section in model_sections(data, model)]


def model_sections(data: Entry, model: str) -> list[Section]:
    """The tables of one model."""
    found: dict[str, list[Entry]] = {"gain": [], "meter": [], "long": []}
    for entry in data["entries"]:
        if entry["status"] == "ok" and entry["model"] == model and entry["what"] in found:
            found[entry["what"]].append(entry)
    gains, long = found["gain"], found["long"]
    pairs = [(entry, run) for entry in gains for run in (entry, entry["short"]) if run is not None]
    of_each = (
        f"{long[0]['tokens']} tokens in each of {long[0]['sequences']} sequences" if long else ""
    )
    return [
        Section(f"{model}: a pipelined step, medians", PARTS, [part_row(entry) for entry in gains]),
        Section(
            f"{model}: depth 2 over depth 1",
            GAINS,
            [gain_row(*pair) for pair in pairs],
            [line for e in gains for line in remarks(e)],
        ),
        Section(
            f"{model}: what the medians do not predict, in points of the observed gain",
            EFFECTS,
            [row for pair in pairs for row in effect_rows(*pair)],
        ),
        Section(
            f"{model}: the meter's cost at depth 2",
            METER,
            [meter_row(entry) for entry in found["meter"]],
        ),
        Section(
            f"{model}: {of_each}",
            LONG,
            long_rows(long, data.get("published", ())),
            list(long_remarks(long)),
        ),
    ]


def part_row(entry: Entry) -> list[object]:
    """One line of the first table."""
    parts = entry["parts"]
    columns = (
        parts[name] for name in ("forward_ms", "sampling_ms", "period_ms", "left_over_us", "gap_us")
    )
    return [entry["model"], entry["streams"], *columns]


def gain_row(entry: Entry, found: Entry) -> list[object]:
    """One line of the second table; `found` is the entry itself, or its short run."""
    named = (found[name] for name in ("formula", "predicted", "observed", "observed_full"))
    shares = [None if value is None else f"{value:+.1%}" for value in named]
    return [
        entry["model"],
        entry["streams"],
        _each(entry, found),
        found["block_ms"],
        found["pipe_ms"],
        round(found["length"], 1),
        *shares,
        "yes" if found["met"] else "no",
    ]


def effect_rows(entry: Entry, found: Entry) -> Iterator[list[object]]:
    """What moved the observed gain away from the prediction, the largest first."""
    # older results have the points alone
    effects = [effect for effect in found["effects"].values() if isinstance(effect, dict)]
    for effect in sorted(effects, key=lambda each: -abs(each["points"])):
        if abs(effect["points"]) < LEAST_POINTS:
            return
        shown = (
            round(value, 1)
            for side in ("block", "pipe")
            for value in (effect[side]["steps"], effect[side]["ms"])
        )
        yield [
            entry["model"],
            entry["streams"],
            _each(entry, found),
            f"{effect['points'] * 100:+.1f}",
            *shown,
            f"{effect['cause']}{_medians_text(effect)}",
        ]


def remarks(entry: Entry) -> Iterator[str]:
    """What has to be said about an entry, besides its figures."""
    label = f"{entry['model']}, {entry['streams']} stream{'s' * (entry['streams'] > 1)}"
    for name, found in (("", entry), (" (short run)", entry["short"])):
        if found is None:
            continue
        if not found["met"]:
            yield f"{label}{name}: {found['cause']}"
        if not found["tokens_equal"]:
            yield (
                f"{label}{name}: depth 1 and depth 2 generated different tokens; gains compare "
                "tokens/s"
            )
        if found["stopped"] < 0.9 * found["requests"]:
            yield (
                f"{label}{name}: only {found['stopped']} of {found['requests']} requests met a "
                "stop token; zombies are rarer than meant"
            )
    yield f"{label}: {entry['verdict']}"


def meter_row(entry: Entry) -> list[object]:
    """Steps with the meter on and off."""
    return [
        entry["model"],
        entry["streams"],
        entry["off_ms"],
        entry["on_ms"],
        round(entry["ratio"], 4),
    ]


def long_rows(entries: Sequence[Entry], published: Sequence[Entry]) -> list[list[object]]:
    """Both depths, and beside them what others have published."""
    own: list[list[object]] = [
        [
            e["model"],
            e["depth"],
            e["wall_s"],
            f"{e['active_share']:.1%}",
            e["ms_per_step"],
            e["tokens_per_s"],
            e["gap_us"],
        ]
        for e in sorted(entries, key=lambda entry: entry["depth"])
    ]
    theirs: list[list[object]] = [
        [e["what"], None, e["wall_s"], f"{e['active_share']:.1%}", None, None, None]
        for e in published
    ]
    return own + theirs if own else []


def long_remarks(entries: Sequence[Entry]) -> Iterator[str]:
    """Where the long gaps are, the depth that is asked about first; older results do not say."""
    for entry in sorted(entries, key=lambda entry: -entry["depth"]):
        if text := long_gaps_text(entry.get("long_gaps", {"count": 0})):
            yield f"{entry['model']}, depth {entry['depth']}: {text}"


def _medians_text(effect: Entry) -> str:
    """The medians that show an effect, where there are some; older results have none."""
    medians = effect.get("medians", {})
    sides = [
        (depth, medians[side]) for depth, side in ((1, "block"), (2, "pipe")) if side in medians
    ]
    shown = "; ".join(f"at depth {depth} {Compared(**found).text()}" for depth, found in sides)
    return f" ({medians['of']} {shown})" if shown else ""


def _each(entry: Entry, found: Entry) -> str:
    return f"{found['requests'] // (entry['streams'] * found['rounds'])} each"

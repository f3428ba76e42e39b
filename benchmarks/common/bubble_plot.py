"""Bars of blocking and pipelined steps, with what was predicted and observed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.pyplot import BLUE, GREEN, VERMILION, open_pyplot

BLOCKING, PIPELINED, PREDICTED, OBSERVED = VERMILION, BLUE, "#999999", GREEN
WIDTH = 0.38


def plot_results(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """`plot_gains` of results of `benchmarks.bubble`, from one machine; False, and no file,
    where they have no gains.
    """
    gains = [
        entry
        for data in results
        for entry in data["entries"]
        if entry["status"] == "ok" and entry["what"] == "gain"
    ]
    if gains:
        environment = results[0]["environment"]
        plot_gains(
            gains, path, f"Depth 1 and depth 2 on {environment['gpu'] or environment['cpu']}"
        )
    return bool(gains)


def plot_gains(entries: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Writes a PNG: above, ms per step of both depths; below, the gain predicted and observed.

    `entries` as `Gain.as_dict` has them.
    """
    pyplot = open_pyplot()
    labels = [
        f"{entry['model']}\n{entry['streams']} stream{'s' if entry['streams'] > 1 else ''}"
        for entry in entries
    ]
    figure, (steps, gains) = pyplot.subplots(
        2, 1, figsize=(max(6.4, 1.1 * len(entries) + 2), 7.6), dpi=120, layout="constrained"
    )
    figure.suptitle(title + "\n", fontsize=11)  # the empty line is the legend's
    figure.get_layout_engine().set(hspace=0.08)
    block, pipe = ([entry[name] for entry in entries] for name in ("block_ms", "pipe_ms"))
    _pairs(
        steps,
        block,
        pipe,
        ("depth 1, blocking", "depth 2, pipelined"),
        (BLOCKING, PIPELINED),
        "{:.3g}",
    )
    steps.set_ylabel("ms per decode step (median)")
    predicted, observed = (
        [100 * entry[name] for entry in entries] for name in ("predicted", "observed")
    )
    _pairs(
        gains,
        predicted,
        observed,
        ("predicted from medians", "observed from wall time"),
        (PREDICTED, OBSERVED),
        "{:+.1f}",
    )
    beside = [i - 1.05 * WIDTH for i in range(len(entries))]
    allowed = [100 * entry["tolerance"] for entry in entries]
    gains.errorbar(
        beside,
        predicted,
        yerr=allowed,
        fmt="none",
        ecolor="black",
        capsize=3,
        label="allowed difference",
    )
    gains.axhline(0, color="black", linewidth=0.8)
    gains.set_ylabel("gain in tokens/s, %")
    for axes in (steps, gains):
        axes.set_xticks(range(len(entries)), labels)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        legend = axes.legend(
            frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8
        )
        legend.set_in_layout(False)  # wider than a few bars: it may not squeeze them
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _pairs(
    axes: Any,
    left: list[float],
    right: list[float],
    names: tuple[str, str],
    colors: tuple[str, str],
    form: str,
) -> None:
    for side, values, name, color in zip((-1, 1), (left, right), names, colors, strict=True):
        bars = axes.bar(
            [i + side * WIDTH / 2 for i in range(len(values))],
            values,
            WIDTH,
            label=name,
            color=color,
        )
        axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)

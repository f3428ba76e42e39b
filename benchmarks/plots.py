"""A plot of the share of the read floor by model and batch, from results of decode and peers.

    python -m benchmarks.plots benchmarks/results/decode-h200.jsonl --output floor.png
    python -m benchmarks.plots --gains benchmarks/results/bubble-h200.jsonl --output gains.png
    python -m benchmarks.plots --traffic benchmarks/results/traffic-h200.jsonl --output traffic.png

A panel per model (its weights' format and its context, where these are not the usual ones) and
machine, a group of bars per batch, a bar per engine; its height is floor / time of a step, and the
time is written on it. `--gains` draws steps of depth 1 and 2, and the gain as predicted and
observed; `--traffic` latencies over the rate of arrivals. Needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.options import plain_parser, png_file
from benchmarks.common.result import read_runs

BLUE, ORANGE, GREY, GREEN = "#0072B2", "#D55E00", "#999999", "#009E73"  # Okabe and Ito's
COLOURS = 10  # of the palette "tableau-colorblind10"
HATCHES = ("", "//", "..", "\\\\", "xx", "++", "oo")  # for those who see no colours
PANEL_WIDTH, PANEL_HEIGHT, DPI = 8.0, 4.4, 110
COLUMNS = 2
PAIR = 0.38  # width of a bar of a pair
GROUP = 0.84  # of the distance between two batches
CONTEXT = 512  # of decode, where it is not asked for another


class Point(NamedTuple):
    """One bar: what ran where, its share of the floor, and the milliseconds of a step."""

    model: str
    machine: str
    engine: str
    batch: int
    share: float
    ms: float


def points_of(data: dict[str, Any]) -> list[Point]:
    """The bars of one run; none where it is of another benchmark."""
    arguments, environment = data.get("arguments", {}), data["environment"]
    machine = None if arguments.get("device") == "cpu" else environment.get("gpu")
    where = machine or environment.get("cpu") or "unknown machine"
    points = []
    for entry in data["entries"]:
        what = data["benchmark"], entry.get("what"), entry.get("status")
        if what == ("peers", "peer", "ok"):
            engine = f"{entry['title']} {entry['version']}"
        elif what == ("decode", "decode", "ok"):
            kernels = f", {entry['kernels']} kernels" if "kernels" in entry else ""
            spinning = ", spinning" if arguments.get("spin") else ""
            engine = f"photon_ext, depth {entry['depth']}{kernels}{spinning}"
        else:
            continue
        ms = entry["ms_per_step"]
        ms = ms["median"] if isinstance(ms, dict) else ms
        label = _model(entry["model"], arguments), where, engine, entry["batch"]
        points.append(Point(*label, entry["floor_share"], ms))
    return points


def _model(name: str, arguments: dict[str, Any]) -> str:
    """A model as a run had it: steps of fewer bits, or over other contexts, are another's."""
    stored, kv_dtype = arguments.get("quantize"), arguments.get("kv_dtype")
    activations, context = arguments.get("activations"), arguments.get("context", CONTEXT)
    parts = [
        name,
        f"weights in {stored}" if stored not in (None, "none") else "",
        f"keys and values in {kv_dtype}" if kv_dtype else "",
        f"tokens in {activations}" if activations else "",
        f"context {context:,}" if context != CONTEXT else "",
    ]
    return ", ".join(filter(None, parts))


def draw(points: Sequence[Point], output: Path) -> None:
    """Writes the PNG. Raises ImportError, with what to do, without matplotlib, and ValueError
    without points."""
    pyplot = open_pyplot()
    panels: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        panels.setdefault((point.model, point.machine), []).append(point)
    if not panels:
        raise ValueError("no decode steps in these files; give results of decode or peers")
    engines = list(dict.fromkeys(point.engine for group in panels.values() for point in group))
    columns = min(COLUMNS, len(panels))
    rows, beside = -(-len(panels) // columns), 3 if columns > 1 else 1  # names are long
    legend = 0.35 * -(-len(engines) // beside) + 0.3
    layout = {"figsize": (PANEL_WIDTH * columns, PANEL_HEIGHT * rows + legend), "dpi": DPI}
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **layout)
    top = 112 * max(1.0, *(point.share for point in points))
    handles: dict[str, Any] = {}
    for axis, ((model, machine), group) in zip(axes.flat, panels.items(), strict=False):
        handles |= _panel(axis, f"{model} on {machine}", group, engines)
        axis.set_ylim(0, top)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    place = {"loc": "outside lower center", "ncols": beside, "fontsize": 10, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)
    _save(pyplot, figure, output)


def _panel(axis: Any, title: str, points: list[Point], engines: list[str]) -> dict[str, Any]:
    """Bars of one model, groups by batch, engines in the order of the legend; one bar of each."""
    batches, bars = sorted({point.batch for point in points}), {}
    present = [engine for engine in engines if any(point.engine == engine for point in points)]
    width = GROUP / len(present)
    for place, engine in enumerate(present):
        style, offset = engines.index(engine), (place - (len(present) - 1) / 2) * width
        own = {point.batch: point for point in points if point.engine == engine}
        xs = [batches.index(batch) + offset for batch in own]
        look = {"color": f"C{style % COLOURS}", "hatch": HATCHES[style % len(HATCHES)]}
        heights = [100 * point.share for point in own.values()]
        bars[engine] = axis.bar(xs, heights, 0.92 * width, edgecolor="white", **look)
        times, turned = [f"{point.ms:.3g}" for point in own.values()], 90 if width < 0.16 else 0
        axis.bar_label(bars[engine], times, padding=2, fontsize=9, rotation=turned)
    axis.axhline(100, color="black", linewidth=1, linestyle="--")
    axis.text(len(batches) - 0.5, 101, "read floor", ha="right", va="bottom", fontsize=9)
    axis.set_title(title, fontsize=12)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_xlabel("batch (rows decoded at once)", fontsize=11)
    axis.set_ylabel("share of the read floor (%)\nnumbers: ms per step", fontsize=11)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    return bars


def draw_gains(results: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes the PNG of results of benchmarks.bubble. Raises as `draw`.

    Above: ms per step of both depths; below: the gain predicted and observed.
    """
    found = (entry for data in results for entry in data["entries"])
    entries = [e for e in found if (e["status"], e["what"]) == ("ok", "gain")]
    if not entries:
        raise ValueError("no gains in these files; give results of benchmarks.bubble")
    pyplot = open_pyplot()
    size = max(6.4, 1.1 * len(entries) + 2), 7.6
    figure, both = pyplot.subplots(2, 1, figsize=size, dpi=120, layout="constrained")
    machine = results[0]["environment"]["gpu"] or results[0]["environment"]["cpu"]
    figure.suptitle(f"Depth 1 and depth 2 on {machine}\n", fontsize=11)
    figure.get_layout_engine().set(hspace=0.08)
    steps = {"depth 1, blocking": "block_ms", "depth 2, pipelined": "pipe_ms"}
    gains = {"predicted from medians": "predicted", "observed from wall time": "observed"}
    _pairs(both[0], entries, steps, (ORANGE, BLUE), "{:.3g}", 1)
    both[0].set_ylabel("ms per decode step (median)")
    _pairs(both[1], entries, gains, (GREY, GREEN), "{:+.1f}", 100)
    allowed = {"yerr": [100 * entry["tolerance"] for entry in entries], "capsize": 3}
    beside = [i - PAIR / 2 for i in range(len(entries))]
    predicted = [100 * entry["predicted"] for entry in entries]
    both[1].errorbar(
        beside, predicted, fmt="none", ecolor="black", label="allowed difference", **allowed
    )
    both[1].axhline(0, color="black", linewidth=0.8)
    both[1].set_ylabel("gain in tokens/s, %")
    for axes in both:
        legend = axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        legend.set_in_layout(False)  # wider than a few bars: it may not squeeze them
    _save(pyplot, figure, output)


def _pairs(
    axes: Any,
    entries: Sequence[dict[str, Any]],
    names: dict[str, str],
    colors: Sequence[str],
    form: str,
    scale: float,
) -> None:
    """Two bars per entry: `names` has their labels and the fields with their heights."""
    for side, (label, field), color in zip((-1, 1), names.items(), colors, strict=True):
        values = [scale * entry[field] for entry in entries]
        xs = [i + side * PAIR / 2 for i in range(len(entries))]
        bars = axes.bar(xs, values, PAIR, label=label, color=color)
        axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
    plural = ("stream" if entry["streams"] == 1 else "streams" for entry in entries)
    ticks = [
        f"{e['model']}\n{e['streams']} {word}" for e, word in zip(entries, plural, strict=True)
    ]
    axes.set_xticks(range(len(entries)), ticks)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def draw_traffic(results: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes the PNG of results of benchmarks.traffic: TTFT and inter-token latency over the rate,
    medians and 99th percentiles, a colour per model, load and engine. Raises as `draw`."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in (entry for data in results for entry in data["entries"]):
        measured = (entry["status"], entry["what"]) == ("ok", "cell")
        if measured and isinstance(entry["rate"], (int, float)):
            name = f"{entry['title']}, {entry['model']}, {entry['load']}"
            lines.setdefault(name, []).append(entry)
    if not lines:
        raise ValueError("no rates in these files; give results of benchmarks.traffic")
    pyplot = open_pyplot()
    figure, both = pyplot.subplots(1, 2, figsize=(12, 5), dpi=DPI, layout="constrained")
    names = {"ttft_ms": "time to first token, ms", "inter_token_ms": "inter-token latency, ms"}
    for axes, (field, label) in zip(both, names.items(), strict=True):
        for place, (name, entries) in enumerate(lines.items()):
            cells = sorted(entries, key=lambda entry: float(entry["rate"]))
            rates = [cell["rate"] for cell in cells]
            for share, style in (("p50", "o-"), ("p99", "s--")):
                values = [cell[field][share] for cell in cells]
                look = {"color": f"C{place % COLOURS}", "label": f"{name}, {share}"}
                axes.plot(rates, values, style, **look)
        axes.set(xlabel="arrivals per second", ylabel=label, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    _save(pyplot, figure, output)


def open_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files. Raises ImportError, with what to do, without it."""
    try:
        import matplotlib
    except ImportError as error:
        told = "plots need matplotlib: pip install matplotlib"
        raise ImportError(told) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use("tableau-colorblind10")

    return pyplot


def _save(pyplot: Any, figure: Any, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def main(given: list[str] | None = None) -> int:
    options = plain_parser(__doc__.splitlines()[0])
    add, told = options.add_argument, "results of benchmarks.decode, peers, bubble or traffic"
    add("files", nargs="+", type=Path, help=told)
    add("--gains", action="store_true", help="depth 1 and depth 2, not shares of the floor")
    add("--traffic", action="store_true", help="latencies over the rate of arrivals")
    add("--output", type=png_file, default=Path("floor.png"), metavar="FILE", help="floor.png")
    args = options.parse_args(given)
    try:
        results = [run for path in args.files for run in read_runs(path)]
        if args.gains:
            draw_gains([each for each in results if each["benchmark"] == "bubble"], args.output)
        elif args.traffic:
            draw_traffic([each for each in results if each["benchmark"] == "traffic"], args.output)
        else:
            draw([point for run in results for point in points_of(run)], args.output)
    except (ImportError, OSError, ValueError) as error:
        print(f"plots: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

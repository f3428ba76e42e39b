"""A plot of the share of the read floor by model and batch, from result files of benchmarks.decode
and benchmarks.peers.

    python -m benchmarks.plots benchmarks/results/decode-*.json benchmarks/results/peers-*.json
    --output floor.png python -m benchmarks.plots --gains benchmarks/results/bubble-*.json --output
    gains.png

A panel per model and machine, a group of bars per batch, a bar per engine; its height is floor /
time of a step, and the time is written on it. `--gains` draws steps of depth 1 and 2, and the gain
as predicted and observed. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.bubble_plot import plot_results
from benchmarks.common.command import command
from benchmarks.common.options import png_file
from benchmarks.common.pyplot import COLOURS, open_pyplot
from benchmarks.common.result import read_result

# With hatches for those who see no colours.
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")
PANEL_WIDTH, PANEL_HEIGHT, DPI = 8.0, 4.4, 110
COLUMNS = 2
GROUP = 0.84  # of the distance between two batches


class Point(NamedTuple):
    """One bar: what ran where, its share of the floor, and the milliseconds of a step."""

    model: str
    machine: str
    engine: str
    batch: int
    share: float
    ms: float


def read_points(path: Path) -> list[Point]:
    """The bars of one result file; none where it is of another benchmark.

    Raises ValueError for a file that is no result.
    """
    data = read_result(path)
    entries, environment, benchmark = data["entries"], data["environment"], data["benchmark"]
    machine = None if data.get("arguments", {}).get("device") == "cpu" else environment.get("gpu")
    where = machine or environment.get("cpu") or "unknown machine"
    points = []
    for entry in entries:
        engine = _engine(benchmark, entry, data.get("arguments", {}))
        if engine is not None:
            ms = entry["ms_per_step"]
            ms = ms["median"] if isinstance(ms, dict) else ms
            points.append(
                Point(entry["model"], where, engine, entry["batch"], entry["floor_share"], ms)
            )
    return points


def _engine(benchmark: str, entry: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """The name of what an entry measured; None for entries without a bar."""
    if entry.get("status") != "ok":
        return None
    if benchmark == "peers" and entry.get("what") == "peer":
        return f"{entry['title']} {entry['version']}"
    if benchmark == "decode" and entry.get("what") == "decode":
        kernels = f", {entry['kernels']} kernels" if "kernels" in entry else ""
        return f"photon_ext, depth {entry['depth']}{kernels}" + (
            ", spinning" if arguments.get("spin") else ""
        )
    return None


def draw(points: Sequence[Point], output: Path) -> None:
    """Writes the PNG.

    Raises ImportError, with the command that helps, where matplotlib is missing, and ValueError
    without points.
    """
    pyplot = open_pyplot()
    panels: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        panels.setdefault((point.model, point.machine), []).append(point)
    if not panels:
        raise ValueError(
            "no decode steps in these files; give results of benchmarks.decode or benchmarks.peers"
        )
    engines = list(dict.fromkeys(point.engine for group in panels.values() for point in group))
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    beside = 3 if columns > 1 else 1  # names are long
    legend = 0.35 * -(-len(engines) // beside) + 0.3
    size = PANEL_WIDTH * columns, PANEL_HEIGHT * rows + legend
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    highest = max(point.share for group in panels.values() for point in group)
    for axis, (title, group) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, f"{title[0]} on {title[1]}", group, engines, 100 * max(1.0, highest))
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    handles = {
        label: bar
        for axis in axes.flat
        for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=beside,
        fontsize=10,
        frameon=False,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI)
    pyplot.close(figure)


def _panel(axis: Any, title: str, points: list[Point], engines: list[str], top: float) -> None:
    """Bars of one model: groups by batch, engines in the order of the legend."""
    batches = sorted({point.batch for point in points})
    present = [engine for engine in engines if any(point.engine == engine for point in points)]
    width = GROUP / len(present)
    for place, engine in enumerate(present):
        style = engines.index(engine)
        own = {point.batch: point for point in points if point.engine == engine}
        xs = [batches.index(batch) + (place - (len(present) - 1) / 2) * width for batch in own]
        heights = [100 * point.share for point in own.values()]
        colour, hatch = (
            COLOURS[style % len(COLOURS)],
            HATCHES[(style + style // len(COLOURS)) % len(HATCHES)],
        )
        axis.bar(
            xs,
            heights,
            0.92 * width,
            label=engine,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
        )
        for x, height, point in zip(xs, heights, own.values(), strict=True):
            axis.text(
                x,
                height + 1,
                f"{point.ms:.3g}",
                ha="center",
                va="bottom",
                fontsize=9,
                rotation=90 if width < 0.16 else 0,
            )
    axis.axhline(100, color="black", linewidth=1, linestyle="--")
    axis.text(len(batches) - 0.5, 101, "read floor", ha="right", va="bottom", fontsize=9)
    axis.set_title(title, fontsize=12)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_xlabel("batch (rows decoded at once)", fontsize=11)
    axis.set_ylabel("share of the read floor (%)\nnumbers: ms per step", fontsize=11)
    axis.set_ylim(0, top * 1.12)
    axis.tick_params(labelsize=10)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def draw_gains(files: Sequence[Path], output: Path) -> None:
    """Writes the PNG of results of benchmarks.bubble. Raises as `draw`."""
    results = [data for path in files if (data := read_result(path))["benchmark"] == "bubble"]
    if not plot_results(results, output):
        raise ValueError("no gains in these files; give results of benchmarks.bubble")


def main(given: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog=command(), description=__doc__.splitlines()[0])
    options.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="JSON of benchmarks.decode and benchmarks.peers; for --gains of bubble",
    )
    options.add_argument(
        "--gains", action="store_true", help="depth 1 and depth 2 instead of shares of the floor"
    )
    options.add_argument(
        "--output",
        type=png_file,
        default=Path("floor.png"),
        metavar="FILE",
        help="the PNG (floor.png)",
    )
    args = options.parse_args(given)
    try:
        if args.gains:
            draw_gains(args.files, args.output)
        else:
            draw([point for path in args.files for point in read_points(path)], args.output)
    except (ImportError, OSError, ValueError) as error:
        print(f"plots: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

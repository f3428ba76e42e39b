"""A picture of the figures of some runs: needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from photon_ext.bench.figures import Figures
from photon_ext.errors import ConfigError

_BLUE, _ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito's
_SIZE, _DPI = (13.0, 4.0), 110


def draw(found: Mapping[str, Figures], path: str) -> None:
    """Throughput, first tokens and the time of a token, by run. ConfigError: it cannot be written
    there.
    """
    figure, axes = pyplot.subplots(1, 3, figsize=_SIZE, dpi=_DPI, layout="constrained")
    names = [*found]
    axes[0].bar(names, [one.tokens_per_s for one in found.values()], color=_BLUE)
    axes[0].set_title("tokens/s")
    _times(axes[1], names, [one.ttft_ms for one in found.values()], "first token, ms")
    _times(axes[2], names, [one.tpot_ms for one in found.values()], "a token behind the first, ms")
    axes[1].legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}; name a file to write") from error
    finally:
        pyplot.close(figure)


def _times(axis: Any, names: list[str], spreads: list[dict[str, float] | None], title: str) -> None:
    for percentile, colour in (("p50", _BLUE), ("p99", _ORANGE)):
        values = [float("nan") if one is None else one[percentile] for one in spreads]
        axis.plot(names, values, marker="o", color=colour, label=percentile)
    axis.set_ylim(bottom=0)
    axis.set_title(title)

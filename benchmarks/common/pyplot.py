"""matplotlib for plots that go to files, and their colours."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette, which people who see colours differently can tell apart ("Color Universal
# Design", 2008).
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, BLACK = COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#D55E00", "#F0E442", "#000000"),
)


def open_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files.

    Raises ImportError, with the command that helps, where it is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot

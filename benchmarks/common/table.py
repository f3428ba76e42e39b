"""Plain aligned tables: results are read in logs as often as in terminals."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table; numbers to the right, text to the left, None as a dash."""
    cells = [[cell_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    for line in [list(header), ["-" * width for width in widths], *cells]:
        parts = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        )
        print("  ".join(parts).rstrip(), flush=True)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table in Markdown, with a newline at its end; numbers as :func:`print_table`
    writes them.
    """
    lines = [header, ["---"] * len(header), *([cell_text(cell) for cell in row] for row in rows)]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def cell_text(cell: object) -> str:
    """A cell: three digits of a number or more, a dash for None."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return (
            f"{cell:.0f}"
            if abs(cell) >= 1000
            else f"{cell:.3g}"
            if abs(cell) < 100
            else f"{cell:.1f}"
        )
    return str(cell)

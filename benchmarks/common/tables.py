"""Tables of results: by `rich` in a terminal, plain text in a log, or Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple


class Table(NamedTuple):
    """A table; `remarks` stand under it, and without rows there is nothing to show."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    remarks: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        title: str,
        entries: Sequence[dict[str, Any]],
        columns: Mapping[str, str],
        remarks: Sequence[str] = (),
    ) -> Table:
        """A row per entry of a result. `columns` has for each name a field ("gap[median]"), or a
        text with fields ("{share:.0%}"); what an entry does not have is left empty."""
        rows = [[_field(entry, form) for form in columns.values()] for entry in entries]
        return cls(title, tuple(columns), rows, remarks)

    def show(self) -> None:
        """Prints it, unless it is empty."""
        if not self.rows:
            return
        if self.title:
            print(f"\n{self.title}")
        cells = [[cell_text(cell) for cell in row] for row in self.rows]
        right = [
            all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.header))
        ]
        if not (sys.stdout.isatty() and _show_rich(self.header, cells, right)):
            _show_plain(self.header, cells, right)
        print("".join(f"{remark}\n" for remark in self.remarks), end="", flush=True)

    def markdown(self) -> str:
        """The same in Markdown; "" for an empty one."""
        if not self.rows:
            return ""
        remarks = "".join(f"- {remark}\n" for remark in self.remarks) + "\n" * bool(self.remarks)
        title = f"## {self.title}\n\n" if self.title else ""
        return f"{title}{markdown_table(self.header, self.rows)}\n{remarks}"


def _field(entry: dict[str, Any], form: str) -> object:
    try:
        if "{" in form:
            return form.format_map(entry)
        return Formatter().get_field(form, (), entry)[0]
    except (KeyError, TypeError):  # not measured
        return None


def cell_text(cell: object) -> str:
    """A cell: three digits of a number or more, a dash for None."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        size = abs(cell)
        return f"{cell:.0f}" if size >= 1000 else f"{cell:.3g}" if size < 100 else f"{cell:.1f}"
    return str(cell)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, with a newline at its end."""
    lines = [header, ["---"] * len(header), *([cell_text(cell) for cell in row] for row in rows)]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def _show_plain(header: Sequence[str], cells: list[list[str]], right: list[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for line in [list(header), ["-" * width for width in widths], *cells]:
        parts = zip(line, widths, right, strict=True)
        text = "  ".join(c.rjust(width) if r else c.ljust(width) for c, width, r in parts)
        print(text.rstrip(), flush=True)


def _show_rich(header: Sequence[str], cells: list[list[str]], right: list[bool]) -> bool:
    """False where rich is not installed."""
    try:
        from rich import box, console, table
    except ImportError:
        return False
    made = table.Table(box=box.SIMPLE_HEAD)
    for name, flush in zip(header, right, strict=True):
        made.add_column(name, justify="right" if flush else "left")
    for row in cells:
        made.add_row(*row)
    console.Console(highlight=False, markup=False).print(made)
    return True

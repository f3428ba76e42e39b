"""A table with its title and what has to be said about it: printed, or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common.table import markdown_table, print_table


class Section(NamedTuple):
    """`lines` are remarks under the table; without rows there is nothing to show."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    lines: Sequence[str] = ()

    def show(self) -> None:
        """Prints it, unless it is empty."""
        if not self.rows:
            return
        print(f"\n{self.title}", flush=True)
        print_table(self.header, self.rows)
        print("".join(f"{line}\n" for line in self.lines), end="", flush=True)

    def markdown(self) -> str:
        """The same in Markdown; "" for an empty one."""
        if not self.rows:
            return ""
        remarks = "".join(f"- {line}\n" for line in self.lines) + "\n" * bool(self.lines)
        return f"## {self.title}\n\n{markdown_table(self.header, self.rows)}\n{remarks}"

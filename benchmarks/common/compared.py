"""A median of what was observed, beside that of the run of the medians."""

from __future__ import annotations

from typing import NamedTuple


class Compared(NamedTuple):
    """Milliseconds: in the observed runs, and in those of the medians."""

    here: float
    there: float

    def text(self) -> str:
        """In words; microseconds show."""
        return f"{self.here:.3f} ms here, {self.there:.3f} in the run of the medians"

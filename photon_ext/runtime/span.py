"""The device time of one step, from a pair of timing events."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_ext._C import Event
    from photon_ext.runtime.ports import Span


class EventSpan:
    """Begin and end of a step on the compute stream."""

    __slots__ = ("begin", "end")

    def __init__(self, begin: Event, end: Event) -> None:
        self.begin = begin
        self.end = end

    def gap_us(self, previous: Span) -> float:
        """Microseconds the compute stream was idle between ``previous`` and this step."""
        assert isinstance(previous, EventSpan)
        return self.begin.elapsed_ms(previous.end) * 1e3

    def length_us(self) -> float:
        """Microseconds from the begin to the end."""
        return self.end.elapsed_ms(self.begin) * 1e3

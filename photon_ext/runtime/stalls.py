"""Who waits for whom: commits for the device, the device for a launch."""

from __future__ import annotations

import time

from photon_ext.runtime.ports import SlotPort
from photon_ext.runtime.stats import PipelineStats
from photon_ext.runtime.step import Span, Step


class Stalls:
    """Counts into the pipeline's stats: waits of either side, and the gaps between steps."""

    def __init__(self, stats: PipelineStats, counts_waits: bool) -> None:
        """``counts_waits``: False leaves out the event queries and clock readings of each step, but
        not the gaps.
        """
        self._stats = stats
        self._counts_waits = counts_waits
        self._fed = False  # there has been work since the last launch: an idle device waits for us
        self._last_span: Span | None = None

    def launching(self, latest: SlotPort | None) -> None:
        """A step is about to be launched; ``latest``: the slot of the last one in flight."""
        if self._counts_waits and self._fed:
            self._stats.device_waits += latest is None or latest.done()
        self._fed = True

    def rest(self) -> None:
        """No step is in flight and none can be launched: that is neither a gap nor a wait."""
        self._last_span, self._fed = None, False

    def wait(self, slot: SlotPort, segments: int) -> memoryview:
        """The records of a slot's step, once they are there."""
        if not self._counts_waits:
            return slot.wait(segments)
        self._stats.host_waits += not slot.done()
        begin = time.perf_counter_ns()
        records = slot.wait(segments)
        self._stats.host_wait_ns += time.perf_counter_ns() - begin
        return records

    def committed(self, step: Step) -> None:
        """A step is on the host; where both it and the one before are timed, it learns its gap."""
        if self._last_span is not None and step.span is not None:
            step.gap_us = step.span.gap_us(self._last_span)
            self._stats.gap(step.gap_us)
        self._last_span = step.span

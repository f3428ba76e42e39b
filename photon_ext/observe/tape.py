"""The probe of a timeline: it writes down phases, launches and commits as they come, and marks them as NVTX ranges where asked to."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import NamedTuple

import torch

from photon_ext.observe.records import Commit, HostSpan, Launch
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.step import Step


class _Open(NamedTuple):
    """A phase that has begun."""

    phase: Phase
    start: int
    step: int | None


class Tape:
    """Implements `photon_ext.runtime.probe.Probe`. Lists grow by one small tuple per phase: some ten per step.

    Args:
        nvtx: also push and pop NVTX ranges, for Nsight; needs a torch with CUDA.
        capacity: phases to keep; what comes later is counted and dropped.
    """

    def __init__(self, nvtx: bool, capacity: int) -> None:
        self.spans: list[HostSpan] = []
        self.launches: list[Launch] = []
        self.commits: list[Commit] = []
        self.threads: dict[int, str] = {}
        self.idents: dict[int, int] = {}  # pthread id, as CUPTI knows it: its low 32 bits -> native id
        self.dropped = 0
        self._nvtx = nvtx
        self._capacity = capacity
        self._open: defaultdict[int, list[_Open]] = defaultdict(list)

    def turn(self, phase: Phase | None) -> None:
        """See Probe.turn."""
        thread, now = self._here(), time.perf_counter_ns()
        stack = self._open[thread]
        while stack:
            self._close(stack, thread, now)
        if phase is not None:
            self._push(stack, phase, now, None)

    def begin(self, phase: Phase, step: int | None) -> None:
        """See Probe.begin."""
        self._push(self._open[self._here()], phase, time.perf_counter_ns(), step)

    def end(self) -> None:
        """See Probe.end. An end whose begin came before the timeline is none of ours."""
        thread, now = self._here(), time.perf_counter_ns()
        if stack := self._open[thread]:
            self._close(stack, thread, now)

    def launched(self, step: Step, words: int) -> None:
        """See Probe.launched."""
        thread, now = self._here(), time.perf_counter_ns()
        stack = self._open[thread]
        start = stack[-1].start if stack else now
        key = step.key
        self.launches.append(
            Launch(step.index, step.slot, key.kind.value, key.lines, len(step.segments), key.split, words, start, now, thread)
        )

    def committed(self, step: Step, zombies: int) -> None:
        """See Probe.committed."""
        self.commits.append(Commit(step.index, len(step.segments), zombies, time.perf_counter_ns()))

    def _here(self) -> int:
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
            self.idents[threading.get_ident() & 0xFFFFFFFF] = thread
        return thread

    def _push(self, stack: list[_Open], phase: Phase, now: int, step: int | None) -> None:
        stack.append(_Open(phase, now, step))
        if self._nvtx:
            torch.cuda.nvtx.range_push(f"photon_ext {phase.value}")

    def _close(self, stack: list[_Open], thread: int, now: int) -> None:
        opened = stack.pop()
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        if len(self.spans) < self._capacity:
            self.spans.append(HostSpan(opened.phase, opened.start, now, thread, opened.step, len(stack)))
        else:
            self.dropped += 1

"""The probe of a timeline: it writes down phases, launches and commits as they come, and marks
them as NVTX ranges where asked to.
"""

from __future__ import annotations

import threading
import time
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


class _Thread(threading.local):
    """This thread's native id, and its open phases; 0 before it is known to a tape."""

    number = 0

    def __init__(self) -> None:
        self.open: list[_Open] = []


class Tape:
    """Implements `photon_ext.runtime.probe.Probe`. Lists grow by one small tuple per phase: some
    ten per step.

    Args:
        nvtx: also push and pop NVTX ranges, for Nsight; needs a torch with CUDA.
        capacity: phases to keep; what comes later is counted and dropped.
    """

    def __init__(self, nvtx: bool, capacity: int) -> None:
        self.spans: list[HostSpan] = []
        self.launches: list[Launch] = []
        self.commits: list[Commit] = []
        self.threads: dict[int, str] = {}
        # pthread id, as CUPTI knows it: its low 32 bits -> native id
        self.idents: dict[int, int] = {}
        self.dropped = 0
        self._nvtx = nvtx
        self._capacity = capacity
        self._here = _Thread()

    def turn(self, phase: Phase | None) -> None:
        """See Probe.turn."""
        now = time.perf_counter_ns()
        stack = self._here.open
        while stack:
            self._close(stack, now)
        if phase is not None:
            self._push(stack, phase, now, None)

    def begin(self, phase: Phase, step: int | None) -> None:
        """See Probe.begin."""
        self._push(self._here.open, phase, time.perf_counter_ns(), step)

    def end(self) -> None:
        """See Probe.end. An end whose begin came before the timeline is none of ours."""
        now = time.perf_counter_ns()
        if stack := self._here.open:
            self._close(stack, now)

    def launched(self, step: Step, words: int) -> None:
        """See Probe.launched."""
        now, key, stack = time.perf_counter_ns(), step.key, self._here.open
        start = stack[-1].start if stack else now
        rows, thread = len(step.segments), self._thread()
        self.launches.append(
            Launch(
                step.index,
                step.slot,
                key.kind.value,
                key.num_tokens,
                rows,
                key.split,
                words,
                start,
                now,
                thread,
            )
        )

    def committed(self, step: Step, zombies: int) -> None:
        """See Probe.committed."""
        self.commits.append(Commit(step.index, len(step.segments), zombies, time.perf_counter_ns()))

    def _thread(self) -> int:
        if not self._here.number:
            self._here.number = threading.get_native_id()
            self.threads[self._here.number] = threading.current_thread().name
            self.idents[threading.get_ident() & 0xFFFFFFFF] = self._here.number
        return self._here.number

    def _push(self, stack: list[_Open], phase: Phase, now: int, step: int | None) -> None:
        stack.append(_Open(phase, now, step))
        if self._nvtx:
            torch.cuda.nvtx.range_push(f"photon_ext {phase.value}")

    def _close(self, stack: list[_Open], now: int) -> None:
        opened = stack.pop()
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        if len(self.spans) < self._capacity:
            self.spans.append(
                HostSpan(opened.phase, opened.start, now, self._thread(), opened.step, len(stack))
            )
        else:
            self.dropped += 1

"""The probe of a timeline: it writes down phases, launches and commits as they come."""

from __future__ import annotations

import threading
import time

import torch

from photon_ext.observe.records import Commit, HostSpan, Launch
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.step import Step


class _Thread(threading.local):
    """This thread's native id (0: not asked for yet), and its open phases: phase, start, step."""

    number = 0

    def __init__(self) -> None:
        self.open: list[tuple[Phase, int, int | None]] = []


class TraceRecorder:
    """Implements `photon_ext.runtime.probe.Probe`. Keeps one small tuple per phase.

    Args:
        nvtx: also push and pop NVTX ranges, for Nsight; needs a torch with CUDA.
        capacity: phases to keep; what comes later is counted and dropped.
    """

    def __init__(self, nvtx: bool, capacity: int) -> None:
        self.spans: list[HostSpan] = []
        self.launches: list[Launch] = []
        self.commits: list[Commit] = []
        self.threads: dict[int, str] = {}
        self.idents: dict[int, int] = {}  # pthread id as CUPTI has it, its low 32 bits -> native id
        self.dropped = 0
        self._nvtx = nvtx
        self._capacity = capacity
        self._here = _Thread()

    def turn(self, phase: Phase | None) -> None:
        """See Probe.turn."""
        now = time.perf_counter_ns()
        while self._here.open:
            self._close(now)
        if phase is not None:
            self._push(phase, now, None)

    def begin(self, phase: Phase, step: int | None) -> None:
        """See Probe.begin."""
        self._push(phase, time.perf_counter_ns(), step)

    def end(self) -> None:
        """See Probe.end. An end whose begin came before the timeline is none of ours."""
        now = time.perf_counter_ns()
        if self._here.open:
            self._close(now)

    def launched(self, step: Step, words: int) -> None:
        """See Probe.launched."""
        now, key, stack = time.perf_counter_ns(), step.key, self._here.open
        start = stack[-1][1] if stack else now
        what = (key.kind.value, key.num_tokens, step.num_rows, key.split, words)
        self.launches.append(Launch(step.index, step.slot, *what, start, now, self._thread()))

    def committed(self, step: Step, zombies: int) -> None:
        """See Probe.committed."""
        now = time.perf_counter_ns()
        self.commits.append(Commit(step.index, step.num_rows, zombies, now))

    def _thread(self) -> int:
        if not self._here.number:
            self._here.number = threading.get_native_id()
            self.threads[self._here.number] = threading.current_thread().name
            self.idents[threading.get_ident() & 0xFFFFFFFF] = self._here.number
        return self._here.number

    def _push(self, phase: Phase, now: int, step: int | None) -> None:
        self._here.open.append((phase, now, step))
        if self._nvtx:
            torch.cuda.nvtx.range_push(f"photon_ext {phase.value}")

    def _close(self, now: int) -> None:
        phase, start, step = self._here.open.pop()
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        if len(self.spans) < self._capacity:
            depth = len(self._here.open)
            self.spans.append(HostSpan(phase, start, now, self._thread(), step, depth))
        else:
            self.dropped += 1

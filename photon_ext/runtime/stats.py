"""Counters of a pipeline."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_ext.runtime.step import Step

GAP_WINDOW = 4096


@dataclass(slots=True)
class PipelineStats:
    """Counters of a pipeline. Waits are 0 without ``stalls``, gaps unless the runtime keeps timing.

    Attributes:
        decode_steps, prefill_steps: steps launched, by kind; mixed ones are the latter. No number
            falls, nor the sum, for a thread that reads each once.
        quiet_steps: steps without a host-to-device copy, neither of input nor of masks.
        split_steps: steps that were sampled late, because a row waits for a mask of the host.
        committed_rows: segments of committed steps, zombies included.
        zombie_rows: of them, those whose sequence had already ended.
        zombie_steps: committed steps that held nothing but zombies.
        tokens: tokens committed.
        host_waits, host_wait_ns: commits that had to wait for the device, and how long all of them
            waited, nanoseconds.
        device_waits: launches that found the device done with everything before, though there had
            been work all along; at depth 1 that is every step.
        gap_count, gap_sum_us: step gaps measured so far, and their sum in microseconds.
        gaps_us: step gaps of the latest 4096 steps, microseconds. Another thread than the
            pipeline's takes ``gaps_us.copy()``: a loop over it fails when the pipeline appends.
    """

    decode_steps: int = 0
    prefill_steps: int = 0
    quiet_steps: int = 0
    split_steps: int = 0
    committed_rows: int = 0
    zombie_rows: int = 0
    zombie_steps: int = 0
    tokens: int = 0
    host_waits: int = 0
    host_wait_ns: int = 0
    device_waits: int = 0
    gap_count: int = 0
    gap_sum_us: float = 0.0
    gaps_us: deque[float] = field(default_factory=lambda: deque(maxlen=GAP_WINDOW))

    @property
    def steps(self) -> int:
        """Steps launched."""
        return self.decode_steps + self.prefill_steps

    def launched(self, step: Step, sent: int) -> None:
        """A step was launched, and `sent` words were sent for it."""
        if step.chunks:
            self.prefill_steps += 1
        else:
            self.decode_steps += 1
        self.split_steps += step.key.split
        self.quiet_steps += sent == 0 and not step.key.split

    def committed(self, step: Step, tokens: int, zombies: int) -> None:
        """A step was committed."""
        self.committed_rows += step.num_rows
        self.zombie_rows += zombies
        self.zombie_steps += zombies == step.num_rows
        self.tokens += tokens

    def gap(self, us: float) -> None:
        """A step gap was measured."""
        self.gaps_us.append(us)
        self.gap_sum_us += us
        self.gap_count += 1

"""The scripted device in virtual time: one compute stream whose steps take what they are said to
take, and a host whose calls do.

Patch `time.perf_counter_ns` with `now`: then logs and meters run on this clock, and what a run
takes can be computed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from photon_ext.layout import RowColumn
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.step import StepKey, StepKind
from tests.engine.scripted_device import NOTHING, ScriptedDevice, ScriptedSlot, folded

MS = 1_000_000


@dataclass(frozen=True)
class Costs:
    """Milliseconds: of the device's steps by kind, and of the host's part in a launch and after
    a wait.
    """

    decode: float = 2.0
    prefill: float = 2.2
    # of a prefill step, each time that its requests double: as graphs of 1, 2, 4, 8 prompts take
    prefill_doubled: float = 0.0
    dead: float = 0.1
    launch: float = 0.3
    commit: float = 0.2
    per_row: float = 0.0  # of a decode step, per live row
    commit_per_row: float = 0.0
    per_token: float = 0.0  # of a decode step, per token that a row attends to, on average
    per_longest: float = 0.0  # per token that its longest row does
    after_prefill: float = 0.0  # of a decode step that follows a prefill step
    jitter: tuple[float, ...] = (0.0,)  # added to decode steps, in turns;
    launch_jitter: tuple[float, ...] = (0.0,)  # to the host's part in a launch;
    commit_jitter: tuple[float, ...] = (0.0,)  # to that after a wait;
    # and between the end of a step that was waited for and the end of the wait
    wake_up: tuple[float, ...] = (0.0,)


class VirtualSpan(NamedTuple):
    """Implements Span."""

    begin_ns: int
    end_ns: int

    def gap_us(self, previous: Any) -> float:
        return (self.begin_ns - previous.end_ns) / 1e3

    def length_us(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e3


class VirtualDevice(ScriptedDevice):
    """Its host clock moves at launches and waits alone.

    `timing`: its slots tell when their steps ran.
    """

    def __init__(
        self, costs: Costs, max_rows: int, depth: int, max_len: int, timing: bool = False
    ) -> None:
        super().__init__(
            max_rows=max_rows, max_len=max_len, depth=depth, page_size=16, max_stop_ids=64
        )
        self.costs = costs
        self.host_ns = MS
        self.free_ns = 0
        self.waits = 0
        self.timing = timing
        self.last_kind = StepKind.PREFILL
        # row -> generation, length, and what so many tokens are folded to
        self._folded: dict[int, tuple[int, int, int]] = {}

    def now(self) -> int:
        return self.host_ns

    def folded(self, row: int, length: int) -> int:
        """Goes on from the step before: runs are long here."""
        generation = self.row(row)[RowColumn.GENERATION]
        known, done, value = self._folded.get(row, (generation, 0, NOTHING))
        if known != generation or done > length:
            done, value = 0, NOTHING
        value = folded(
            (self.kv[self.cell(row, position)] for position in range(done, length)), value
        )
        self._folded[row] = generation, length, value
        return value

    def sleep(self, ms: float) -> None:
        """The host does nothing for a while."""
        self.host_ns += round(ms * MS)

    def open_slots(self, spec: StepSpec) -> Sequence[ScriptedSlot]:
        self.vocab = spec.vocab_size
        return [VirtualSlot(self) for _ in range(self.depth)]


class VirtualSlot(ScriptedSlot):
    """SlotPort in virtual time."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self.device = device
        self._begin_ns = self._end_ns = 0

    @property
    def span(self) -> VirtualSpan | None:  # type: ignore[override]
        return VirtualSpan(self._begin_ns, self._end_ns) if self.device.timing else None

    def launch(
        self,
        key: StepKey,
        segments: Sequence[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        finish: bool,
    ) -> int:
        device, costs = self.device, self.device.costs
        device.apply(deltas)
        alive = sum(bool(device.row(row)[RowColumn.ALIVE]) for row in segments[::4])
        device.host_ns += round((costs.launch + in_turn(costs.launch_jitter, device.launches)) * MS)
        contexts = [device.row(row)[RowColumn.POSITION] for row in segments[::4]]
        grown = fmean(contexts) * costs.per_token + max(contexts) * costs.per_longest
        decode = (
            costs.decode + alive * costs.per_row + grown + in_turn(costs.jitter, device.launches)
        )
        decode += costs.after_prefill * (device.last_kind is StepKind.PREFILL)
        device.last_kind = key.kind
        prefill = costs.prefill + costs.prefill_doubled * (len(contexts) - 1).bit_length()
        length = costs.dead if not alive else prefill if key.kind is StepKind.PREFILL else decode
        self._begin_ns = max(device.host_ns, device.free_ns)
        self._end_ns = self._begin_ns + round(length * MS)
        device.free_ns = self._end_ns
        return super().launch(key, segments, staged, deltas, finish)

    def done(self) -> bool:
        return self._end_ns <= self.device.host_ns

    def wait(self, segments: int) -> Sequence[int]:
        device = self.device
        costs, device.waits = device.costs, device.waits + 1
        if self._end_ns > device.host_ns:
            device.host_ns = self._end_ns + round(in_turn(costs.wake_up, device.waits) * MS)
        commit = (
            costs.commit
            + segments * costs.commit_per_row
            + in_turn(costs.commit_jitter, device.waits)
        )
        return _Records(super().wait(segments), device, round(commit * MS))


def in_turn(values: Sequence[float], count: int) -> float:
    """One of `values` after the other, again and again."""
    return values[count % len(values)]


class _Records(list[int]):
    """Records whose reading takes the host its time, once."""

    def __init__(self, words: Iterable[int], device: VirtualDevice, read_ns: int) -> None:
        super().__init__(words)
        self._device, self._read_ns = device, read_ns

    def __getitem__(self, index: Any) -> Any:
        self._device.host_ns, self._read_ns = self._device.host_ns + self._read_ns, 0
        return super().__getitem__(index)

"""The scripted device in virtual time: one compute stream whose steps take what they are said to take, and a host whose calls do.

Patch `time.perf_counter_ns` with `now`: then logs and meters run on this clock, and what a run takes can be computed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from photon_ext.layout import RowColumn
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.step import StepKey, StepKind
from tests.engine.scripted_device import ScriptedDevice, ScriptedSlot

MS = 1_000_000


@dataclass(frozen=True)
class Costs:
    """Milliseconds: of the device's steps by kind, and of the host's part in a launch and after a wait."""

    decode: float = 2.0
    prefill: float = 2.2
    dead: float = 0.1
    launch: float = 0.3
    commit: float = 0.2
    per_row: float = 0.0  # of a decode step, per live row
    commit_per_row: float = 0.0
    jitter: tuple[float, ...] = (0.0,)  # added to decode steps, in turns


class VirtualDevice(ScriptedDevice):
    """Its host clock moves at launches and waits alone."""

    def __init__(self, costs: Costs, max_rows: int, depth: int, max_len: int) -> None:
        super().__init__(max_rows=max_rows, max_len=max_len, depth=depth, page_size=16, max_stop_ids=64)
        self.costs = costs
        self.host_ns = MS
        self.free_ns = 0

    def now(self) -> int:
        return self.host_ns

    def open_slots(self, spec: StepSpec) -> Sequence[ScriptedSlot]:
        self.vocab = spec.vocab_size
        return [VirtualSlot(self) for _ in range(self.depth)]


class VirtualSlot(ScriptedSlot):
    """SlotPort in virtual time."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._virtual = device
        self._end_ns = 0

    def launch(self, key: StepKey, segments: Sequence[int], staged: Sequence[int], deltas: Sequence[int], finish: bool) -> int:
        device, costs = self._virtual, self._virtual.costs
        device.apply(deltas)
        alive = sum(bool(device.row(row)[RowColumn.ALIVE]) for row in segments[::4])
        device.host_ns += round(costs.launch * MS)
        jitter = costs.jitter[device.launches % len(costs.jitter)]
        decode = costs.decode + alive * costs.per_row + jitter
        length = costs.dead if not alive else costs.prefill if key.kind is StepKind.PREFILL else decode
        self._end_ns = max(device.host_ns, device.free_ns) + round(length * MS)
        device.free_ns = self._end_ns
        return super().launch(key, segments, staged, deltas, finish)

    def done(self) -> bool:
        return self._end_ns <= self._virtual.host_ns

    def wait(self, segments: int) -> Sequence[int]:
        device = self._virtual
        device.host_ns = max(device.host_ns, self._end_ns)
        return _Records(super().wait(segments), device, round((device.costs.commit + segments * device.costs.commit_per_row) * MS))


class _Records(list[int]):
    """Records whose reading takes the host its time, once."""

    def __init__(self, words: Iterable[int], device: VirtualDevice, read_ns: int) -> None:
        super().__init__(words)
        self._device, self._read_ns = device, read_ns

    def __getitem__(self, index: Any) -> Any:
        self._device.host_ns, self._read_ns = self._device.host_ns + self._read_ns, 0
        return super().__getitem__(index)

"""The simulated counterpart of the native DecodeSlot: the same calls, enqueued as closures on
the simulated streams.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from photon_ext.runtime.step import StepKey, StepKind
from photon_ext.testing.device import SimDevice, SimEvent
from photon_ext.testing.errors import Fault
from photon_ext.testing.memory import Access
from photon_ext.testing.state import SlotState
from photon_ext.testing.stats import SimStats
from photon_ext.testing.step import SimStep


class SimGraph(NamedTuple):
    """What a replay runs: the forward part of a step, its sampling part, or both."""

    key: StepKey
    forward: bool
    sampling: bool


class PinnedWords:
    """Pinned int32 memory whose every access by the host is declared.

    Args:
        hands_out: whether a slice that is read out of it is meant to be written (masks) or read
            (records).
    """

    def __init__(
        self, device: SimDevice, name: str, slot: int, words: int, hands_out: str = "read"
    ) -> None:
        self.view = memoryview(array("i", bytes(4 * words)))
        self._device = device
        self._range = (name, slot)
        self._writable = hands_out == "write"

    def __getitem__(self, at: slice) -> memoryview:
        declare = self._device.host_write if self._writable else self._device.host_read
        declare("the host", *self._range)
        return self.view[at]

    def __setitem__(self, at: slice, words: array[int]) -> None:
        self._device.host_write("the host", *self._range)
        self.view[at] = words

    def poison(self, start: int, fill: array[int]) -> None:
        """Overwrites the words from ``start`` on, undeclared: nobody may read them any more."""
        self.view[start:] = fill


class SimDecodeSlot:
    """Copies in, replay, copies out, with the events between them; see
    csrc/device/decode_slot.h.
    """

    def __init__(
        self,
        index: int,
        device: SimDevice,
        state: SlotState,
        step: SimStep,
        pinned: tuple[PinnedWords, PinnedWords, PinnedWords],
        stats: SimStats,
        fault: Fault | None,
    ) -> None:
        self._index = index
        self._device = device
        self._state = state
        self._step = step
        self._input, self._output, self._mask = pinned
        self._stats = stats
        self._fault = fault
        self._launch = -1
        self._late_words = 0
        self._unread = False
        self._input_ready, self._mask_ready = SimEvent(), SimEvent()
        self._outputs_written, self._copied_out = SimEvent(), SimEvent()

    # --- the native calls -------------------------------------------------------------------------

    def launch(self, graph: SimGraph, input_words: int, finish: bool, output_words: int) -> None:
        self.begin(input_words)
        self.run(graph)
        self.end(output_words, finish)

    def begin(self, input_words: int) -> None:
        self._launch = self._stats.launches
        self._stats.launches += 1
        self._unread = True
        if not input_words:
            return
        self._copy_in(input_words, self._input, self._state.input, "input", self._input_ready)
        if self._fault is not Fault.DROP_INPUT_WAIT:
            self._device.compute.wait(self._input_ready)
        if self._fault is Fault.EXTRA_WAIT:
            self._device.host_wait(self._input_ready)
            self._stats.extra_wait(f"launch {self._launch} waits for its input copy")

    def end(self, output_words: int, finish: bool) -> None:
        if not finish:
            return
        if self._fault is Fault.LATE_OUT_COPY:
            self._late_words = output_words
        else:
            self._copy_out(output_words)

    def finalize(self, graph: SimGraph, mask_words: int, output_words: int) -> None:
        self.begin_finalize(mask_words)
        self.run(graph)
        self.end(output_words, True)

    def begin_finalize(self, mask_words: int) -> None:
        self._copy_in(mask_words, self._mask, self._state.mask, "mask", self._mask_ready)
        if self._fault is not Fault.DROP_MASK_WAIT:
            self._device.compute.wait(self._mask_ready)

    def done(self) -> bool:
        return self._copied_out.done

    def wait(self) -> None:
        if self._late_words:
            self._copy_out(self._late_words)
            self._late_words = 0
        self._stats.blocking_waits += 1
        if not self._unread:
            self._stats.extra_wait(
                f"slot {self._index} is waited for again, and nothing was launched on it since"
            )
        self._unread = False
        if self._fault is Fault.COMMIT_WITHOUT_WAIT:
            self._device.host_point()
        else:
            self._device.host_wait(self._copied_out)

    def run(self, graph: SimGraph) -> None:
        """Enqueues a graph, or what an eager step enqueues in its place."""
        launch, key = self._launch, graph.key
        parts = (
            "step"
            if graph.forward and graph.sampling
            else "forward"
            if graph.forward
            else "sampling"
        )

        def replay(access: Access) -> None:
            if graph.forward:
                self._step.forward(key, launch, access)
            if graph.sampling:
                self._step.sampling(key, launch, access)
            if graph.forward and graph.sampling and key.kind is StepKind.DECODE:
                self._step.go_on(key, launch, access)

        self._device.compute.enqueue(f"{parts} {launch}", replay)

    # --- copies -----------------------------------------------------------------------------------

    def _copy_in(
        self, words: int, source: PinnedWords, target: memoryview, name: str, ready: SimEvent
    ) -> None:
        index = self._index

        def copy(access: Access) -> None:
            access.read(f"pinned {name}", index)
            access.write(name, index)
            target[:words] = source.view[:words]
            if self._fault is Fault.DELTAS_OFF_STREAM and name == "input":
                self._step.apply_deltas(access)

        self._stats.copied_in(words)
        self._device.in_copy.enqueue(f"copy {name} {self._launch}", copy)
        self._device.in_copy.record(ready)

    def _copy_out(self, words: int) -> None:
        launch, index = self._launch, self._index

        def copy(access: Access) -> None:
            access.read("records", index)
            access.write("pinned output", index)
            self._stats.check_out_copy(access, index, launch)
            self._output.view[:words] = self._state.records[:words]

        self._stats.copied_out(words)
        self._device.compute.record(self._outputs_written)
        if self._fault is not Fault.DROP_OUTPUT_WAIT:
            self._device.out_copy.wait(self._outputs_written)
        self._device.out_copy.enqueue(f"copy output {launch}", copy)
        self._device.out_copy.record(self._copied_out)


class SimGraphs:
    """The fixed set of graphs that a Pipeline's spec asks for; see runtime/step_graph.py."""

    def __init__(self, keys: frozenset[StepKey], slots: list[SimDecodeSlot]) -> None:
        self._keys = keys
        self._slots = slots
        self._pending: dict[int, StepKey] = {}

    def forward_graph(self, slot: int, key: StepKey) -> SimGraph | None:
        return SimGraph(key, True, not key.split) if key in self._keys else None

    def sampling_graph(self, slot: int, key: StepKey) -> SimGraph | None:
        return SimGraph(key, False, True) if key in self._keys else None

    def run_eagerly(self, slot: int, key: StepKey) -> None:
        if key.split:
            self._pending[slot] = key
        self._slots[slot].run(SimGraph(key, True, not key.split))

    def sample_eagerly(self, slot: int) -> None:
        self._slots[slot].run(SimGraph(self._pending.pop(slot), False, True))

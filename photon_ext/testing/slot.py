"""The runtime's own Slot over a simulated DecodeSlot: its calls become moments at which the
device may run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from photon_ext.layout import RECORD_WIDTH, InputLayout, MaskLayout
from photon_ext.runtime.slot import Slot
from photon_ext.runtime.step import StepKey
from photon_ext.testing.decode_slot import PinnedWords, SimDecodeSlot, SimGraphs
from photon_ext.testing.device import SimDevice
from photon_ext.testing.errors import Fault
from photon_ext.testing.poison import POISON, clean
from photon_ext.testing.stats import SimStats

if TYPE_CHECKING:
    from photon_ext._C import DecodeSlot
    from photon_ext.runtime.step_graph import StepGraph


class SimSlot(Slot):
    """Stages and reads exactly as the real Slot does; poisons pinned memory once its step is
    committed.
    """

    def __init__(
        self,
        index: int,
        device: SimDevice,
        native: SimDecodeSlot,
        graphs: SimGraphs,
        pinned: tuple[PinnedWords, PinnedWords, PinnedWords],
        inputs: InputLayout,
        masks: MaskLayout,
        stats: SimStats,
        fault: Fault | None,
    ) -> None:
        # PinnedWords offers the slices that a Slot uses
        views = [cast(memoryview, words) for words in pinned]
        calls = cast("DecodeSlot", native), cast("StepGraph", graphs)  # and these two the calls
        super().__init__(index, *calls, views, inputs, masks, False)
        self._device = device
        self._pinned_input, self._pinned_output, _ = pinned
        self._stats = stats
        self._fault = fault
        self._launch = -1
        self._latest: array[int] | None = None
        self._poison_input = array("i", [POISON] * (inputs.words - inputs.staged_offset))
        self._poison_output = array("i", [POISON] * len(self._pinned_output.view))
        self._poison_pinned()

    def launch(
        self,
        key: StepKey,
        segments: array[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        finish: bool,
        logprobs: bool = False,
        targets: Sequence[int] = (),
    ) -> int:
        """See SlotPort.launch."""
        self._device.host_point()
        self._launch = self._stats.launches
        self._device.trace.append(f"host launches {self._launch}")
        quiet = segments is self._latest and not staged and not deltas
        if self._fault is Fault.RESEND:
            self._segments = None
        if self._fault is Fault.STAGED_REUSED and segments == self._segments:
            staged = ()
        self._latest = segments
        sent = super().launch(key, segments, staged, deltas, finish, logprobs, targets)
        if quiet:
            self._stats.check_quiet(sent, self._index)
        return sent

    def finalize(self, key: StepKey) -> None:
        """See SlotPort.finalize."""
        self._device.host_point()
        self._device.trace.append(f"host finalizes {self._launch}")
        super().finalize(key)

    def wait(self, segments: int) -> memoryview:
        """See SlotPort.wait."""
        records = array("i", super().wait(segments))
        self._device.trace.append(f"host commits {self._launch}")
        for word in records[: segments * RECORD_WIDTH]:  # the device leaves gaps in what follows
            clean(word, f"pinned output of slot {self._index}")
        self._poison_pinned()
        return memoryview(records)

    def _poison_pinned(self) -> None:
        self._pinned_input.poison(self._layout.staged_offset, self._poison_input)
        self._pinned_output.poison(0, self._poison_output)

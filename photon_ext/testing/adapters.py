"""Slots of adapters on the simulated device: an adapter is a number, which the toy model adds to
every token that a row with it keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from photon_ext.layout import Meta, RowColumn
from photon_ext.testing.device import SimDevice, SimEvent
from photon_ext.testing.errors import SimPoison
from photon_ext.testing.memory import Access
from photon_ext.testing.poison import POISON

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors


class SimAdapters:
    """An AdapterStore. Each slot is a range of its own, ("adapter", slot): what a step reads of it
    and a copy writes has to be ordered.

    Attributes:
        count: slots, besides slot 0, which is none.
    """

    def __init__(self, device: SimDevice, count: int) -> None:
        self.count = count
        self._device = device
        self._values = [POISON] * count

    def read(self, path: Any) -> int:
        """The adapter, which is its own path."""
        return int(str(path))

    def load(self, slot: int, weights: int) -> SimCopy:
        """Enqueues the copy on the stream of adapters."""

        def copy(access: Access) -> None:
            access.write("adapter", slot)
            self._values[slot - 1] = weights

        event, stream = SimEvent(), self._device.adapters
        stream.enqueue(f"adapter into slot {slot}", copy)
        stream.record(event)
        return SimCopy(self._device, event)

    def marks(self, step: StepTensors) -> torch.Tensor:
        """What is added to each token of a step, int32 [T]. Raises SimPoison where nothing was ever
        loaded into a slot.
        """
        slots = step.row_state[step.decode_meta[:, Meta.ROW], RowColumn.LORA_SLOT].tolist()
        live = (step.decode_meta[:, Meta.LENGTH] > 0).tolist()
        values = [self._values[slot - 1] if slot else 0 for slot in slots]
        marks = [value if alive else 0 for value, alive in zip(values, live, strict=True)]
        if POISON in marks:
            raise SimPoison(f"slot {slots[marks.index(POISON)]} was read, and holds no adapter")
        return torch.tensor(marks, dtype=torch.int32)


class SimCopy:
    """An adapter on its way into a slot."""

    def __init__(self, device: SimDevice, event: SimEvent) -> None:
        self._device = device
        self._event = event

    def done(self) -> bool:
        """Whether it has come; the device may go on meanwhile."""
        self._device.host_point()
        if self._event.done:
            self._device.host_wait(self._event)  # the host knows it now, and what came before
        return self._event.done

    def wait(self) -> None:
        """Lets the device go on until it has come."""
        self._device.host_wait(self._event)

"""Adapters and the slots of device memory that they take turns in."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

_count = itertools.count(1)


class Copy(Protocol):
    """An adapter on its way into a slot."""

    def done(self) -> bool:
        """Whether `wait` would return at once; never blocks."""

    def wait(self) -> None:
        """Blocks until the slot may be used."""


class AdapterStore(Protocol):
    """The memory of slots 1 to `count`; see models.lora."""

    count: int

    def read(self, path: Any) -> Any:
        """An adapter's weights on the host; from any thread. Raises ModelError."""

    def load(self, slot: int, weights: Any) -> Copy:
        """Enqueues the copy of weights into a slot that no step in flight uses."""


@dataclass(eq=False, slots=True)
class Adapter:
    """An adapter that requests may name. The engine thread owns all but name, weights and key.

    Attributes:
        weights: its copy on the host.
        key: its own among all adapters that ever were; a name may come again.
        slot: where it is on the device; 0: it has no slot.
        rows: rows that have it, those of ended requests with steps in flight included.
    """

    name: str
    weights: Any = field(repr=False)
    key: int = field(default_factory=_count.__next__)
    slot: int = 0
    rows: int = 0


class AdapterSlots:
    """Which adapter is in which slot. A row holds its adapter's slot from admission until it is
    released, which is when no step in flight uses it (I14). Where none is free, the idle adapter
    that was used least recently leaves its slot; its copy on the host stays.

    Who finds no slot waits. Behind it in the order, nobody begins with any adapter meanwhile: else
    requests for the adapters that are in slots could keep them there for ever.
    """

    def __init__(self, store: AdapterStore | None = None) -> None:
        """None: there are no slots, and no adapters."""
        self._store = store
        self._free = list(range(1, store.count + 1)) if store is not None else []
        # what is in a slot, the least recently used first, with its copy while that is under way
        self._resident: OrderedDict[Adapter, Copy | None] = OrderedDict()
        self._claim: Any = None  # the rank of the first who waits for a slot
        self._news = False

    def ready(self, adapter: Adapter, rank: Any, wait: bool) -> bool:
        """Whether a row of this rank may begin with the adapter now. Where it is in no slot, its
        copy into one begins, if there is one. `wait`: no row is held, so that it waits for copies.
        """
        if self._claim is not None and rank > self._claim:
            return False
        if not adapter.slot and not self._place(adapter, wait):
            self._claim = rank
            return False
        return self._arrived(adapter, wait)

    def news(self, wait: bool) -> bool:
        """Whether there is a reason to ask again since the last call: a copy is done, a slot's last
        row is released, or who waited first has gone.
        """
        for adapter in self._resident:
            self._arrived(adapter, wait)
        news, self._news = self._news, False
        if news:
            self._claim = None
        return news

    def left(self) -> None:
        """Somebody who waited for a slot has gone."""
        self._news = True

    def hold(self, adapter: Adapter) -> None:
        """A row begins with it."""
        adapter.rows += 1
        self._resident.move_to_end(adapter)

    def drop(self, adapter: Adapter) -> None:
        """A row that had it is released. ValueError: none has it."""
        if adapter.rows < 1:
            raise ValueError(f"drop: no row has the adapter {adapter.name}")
        adapter.rows -= 1
        self._news |= not adapter.rows

    def _place(self, adapter: Adapter, wait: bool) -> bool:
        """Begins the copy into a slot that nobody uses; False: there is none."""
        slot = self._free.pop(0) if self._free else self._evict(wait)
        if not slot:
            return False
        assert self._store is not None
        adapter.slot = slot
        self._resident[adapter] = self._store.load(slot, adapter.weights)
        return True

    def _evict(self, wait: bool) -> int:
        """The slot of an adapter that leaves it; 0: all are used, or on their way."""
        for adapter in self._resident:
            if not adapter.rows and self._arrived(adapter, wait):
                del self._resident[adapter]
                slot, adapter.slot = adapter.slot, 0
                return slot
        return 0

    def _arrived(self, adapter: Adapter, wait: bool) -> bool:
        copy = self._resident[adapter]
        if copy is None:
            return True
        if wait:
            copy.wait()
        elif not copy.done():
            return False
        self._resident[adapter] = None
        self._news = True  # whoever finds it out: others may wait for the same copy
        return True

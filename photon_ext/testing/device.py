"""Streams as queues of closures, events with clocks, and the host as an actor among them.

An action is one kernel, copy or graph replay. Waits and records cost nothing and are settled as
soon as they can be: a schedule where they come later is one where what follows them comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from photon_ext.testing.chooser import Chooser
from photon_ext.testing.clock import ZERO, Actor, Clock, join, tick
from photon_ext.testing.memory import Access, Memory

Action = Callable[[Access], None]


class _Ticket:
    """One recording of an event."""

    __slots__ = ("clock", "done")

    def __init__(self) -> None:
        self.done = False
        self.clock = ZERO


class SimEvent:
    """An event: a wait means its latest recording at the time of the call; one that was never
    recorded holds nobody up.
    """

    __slots__ = ("ticket",)

    def __init__(self) -> None:
        self.ticket: _Ticket | None = None

    @property
    def done(self) -> bool:
        return self.ticket is None or self.ticket.done


class _Launch(NamedTuple):
    label: str
    action: Action
    issued: Clock


class _Record(NamedTuple):
    ticket: _Ticket
    issued: Clock


class _Wait(NamedTuple):
    ticket: _Ticket


class SimStream:
    """A queue that runs in order, each action when the chooser says so."""

    def __init__(self, device: SimDevice, actor: Actor) -> None:
        self.actor = actor
        self.items: deque[_Launch | _Record | _Wait] = deque()
        self._device = device
        self._clock = ZERO

    def enqueue(self, label: str, action: Action) -> None:
        """Enqueues an action; its accesses are declared by the action itself when it runs."""
        self.items.append(_Launch(label, action, self._device.issue()))

    def record(self, event: SimEvent) -> None:
        event.ticket = _Ticket()
        self.items.append(_Record(event.ticket, self._device.issue()))
        self._device.settle()

    def wait(self, event: SimEvent) -> None:
        if event.ticket is not None:
            self.items.append(_Wait(event.ticket))
            self._device.settle()

    @property
    def enabled(self) -> bool:
        """Whether an action can run now."""
        return bool(self.items) and isinstance(self.items[0], _Launch)

    def run_one(self) -> None:
        """Runs the first action. Call only when ``enabled``."""
        item = self.items.popleft()
        assert isinstance(item, _Launch)
        self._clock = tick(join(self._clock, item.issued), self.actor)
        self._device.trace.append(item.label)
        item.action(Access(self._device.memory, self.actor, self._clock, item.label))
        self._device.settle()

    def settle(self) -> bool:
        """Passes records, and waits whose event is done; returns whether an event became done."""
        recorded = False
        while self.items and not isinstance(item := self.items[0], _Launch):
            if isinstance(item, _Record):
                self._clock = join(self._clock, item.issued)
                item.ticket.clock, item.ticket.done = self._clock, True
                recorded = True
            elif item.ticket.done:
                self._clock = join(self._clock, item.ticket.clock)
            else:
                break
            self.items.popleft()
        return recorded


class SimDevice:
    """The streams of a runtime and that of adapters, one memory, and the host's clock. The device
    runs only when the chooser lets it.

    Attributes:
        trace: labels of the latest actions, in the order they ran; the host adds its own.
        host_waits: waits that the host has made, whether or not they had to wait.
    """

    def __init__(self, chooser: Chooser, check_races: bool = True, trace_length: int = 256) -> None:
        self.memory = Memory(check_races)
        self.compute = SimStream(self, Actor.COMPUTE)
        self.in_copy = SimStream(self, Actor.IN_COPY)
        self.out_copy = SimStream(self, Actor.OUT_COPY)
        self.adapters = SimStream(self, Actor.ADAPTERS)
        self.trace: deque[str] = deque(maxlen=trace_length)
        self.host_waits = 0
        self._streams = (self.compute, self.in_copy, self.out_copy, self.adapters)
        self._chooser = chooser
        self._host: Clock = ZERO

    # --- the host ---------------------------------------------------------------------------------

    def issue(self) -> Clock:
        """The host's clock, for something it enqueues now: what it touches afterwards is not
        ordered before that.
        """
        issued = self._host
        self._host = tick(issued, Actor.HOST)
        return issued

    def host_read(self, label: str, *name: Hashable) -> None:
        self._host = tick(self._host, Actor.HOST)
        self.memory.read(name, Actor.HOST, self._host, label)

    def host_write(self, label: str, *name: Hashable) -> None:
        self._host = tick(self._host, Actor.HOST)
        self.memory.write(name, Actor.HOST, self._host, label)

    def host_point(self) -> None:
        """A moment of the host's at which the device may have done any part of its work."""
        while enabled := [stream for stream in self._streams if stream.enabled]:
            choice = self._chooser.choose(1 + len(enabled))
            if choice == 0:
                return
            enabled[choice - 1].run_one()

    def host_wait(self, event: SimEvent) -> None:
        """Blocks the host until ``event`` is done.

        That always comes: a wait means a recording that was enqueued before it, so no circle of
        waits can form.
        """
        self.host_waits += 1
        while not event.done:
            enabled = [stream for stream in self._streams if stream.enabled]
            enabled[self._chooser.choose(len(enabled)) if len(enabled) > 1 else 0].run_one()
        if event.ticket is not None:
            self._host = join(self._host, event.ticket.clock)

    def synchronize(self) -> None:
        """Waits for everything on every stream."""
        for stream in self._streams:
            event = SimEvent()
            stream.record(event)
            self.host_wait(event)

    # --- the streams ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Passes records and waits on every stream until nothing moves."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                if stream.items and stream.settle():
                    moved = True

    @property
    def idle(self) -> bool:
        return not any(stream.items for stream in self._streams)

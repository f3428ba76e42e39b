"""The engine's end of the channel to one client: what it sends waits in a bounded buffer."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from photon_ext.serve.messages import UP, FrameReader, frame

if TYPE_CHECKING:
    from photon_ext.engine import Request

MOST_UNREAD_BYTES = 8 * 2**20
MOST_UNREAD_BEATS = 8  # of the hub, four a second: where it is late, so may others be
_RECEIVED = 2**18


class EngineLink:
    """A send never blocks: who leaves MOST_UNREAD_BYTES, or MOST_UNREAD_BEATS, is cut off.

    The engine thread sends what a step gave, the hub's thread the rest. The hub's thread alone
    receives, and closes.

    Attributes:
        sock: not blocking.
        reader: makes messages of what is received.
        cut: why nothing is sent any more; None: it is.
        requests: those that have not ended, by the client's numbers.
        shown_ids: the ids of the last Tokens: what the client takes them for where they are left
            out.
    """

    def __init__(self, sock: socket.socket, wake: Callable[[], None]) -> None:
        """`wake`: called where the hub has to look: the buffer waits for room, or it was cut."""
        sock.setblocking(False)
        self.sock = sock
        self.reader = FrameReader(UP)
        self.cut: str | None = None
        self.requests: dict[int, Request] = {}
        self.shown_ids: bytes | None = None
        self._wake = wake
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._early: set[int] = set()  # cancelled while their form was compiled
        self._parked: set[int] = set()
        self._beats: deque[int] = deque()  # that the client has not answered

    @property
    def waits(self) -> bool:
        """Whether something waits for room in the socket."""
        return self._unsent_bytes > 0

    def send(self, message: msgspec.Struct) -> None:
        """Sends as much as there is room for, and keeps the rest."""
        data = frame(message)
        with self._lock:
            if self.cut is not None:
                return
            done = 0 if self._unsent else self._sent(data)
            if done == len(data):
                return
            self._unsent.append(memoryview(data)[done:])
            self._unsent_bytes += len(data) - done
            if self._unsent_bytes > MOST_UNREAD_BYTES:
                self._cut(f"it has left {self._unsent_bytes} bytes unread")
        self._wake()

    def flush(self) -> None:
        """Sends what waits, as far as there is room."""
        with self._lock:
            while self._unsent and self.cut is None:
                data = self._unsent[0]
                done = self._sent(data)
                if self.cut is not None:
                    return
                self._unsent_bytes -= done
                if done < len(data):
                    self._unsent[0] = data[done:]
                    return
                self._unsent.popleft()

    def beat(self, number: int, message: msgspec.Struct) -> None:
        """Sends a Beat, which the client answers once it has read all before it; cuts the link
        where too many have gone unanswered. A client that asks for nothing may sleep.
        """
        if not (self.requests or self.waits):
            self._beats.clear()
        elif len(self._beats) > MOST_UNREAD_BEATS:
            self.end(f"it has read nothing since {len(self._beats)} signs of life")
        self._beats.append(number)
        self.send(message)

    def seen(self, number: int) -> None:
        """The client has answered a Beat."""
        while self._beats and self._beats[0] <= number:
            self._beats.popleft()

    def receive(self) -> bytes:
        """What has come; empty: the client has left."""
        try:
            return self.sock.recv(_RECEIVED)
        except BlockingIOError as error:
            raise error
        except OSError:
            return b""

    def end(self, why: str) -> None:
        """Nothing is sent from here on."""
        with self._lock:
            self._cut(why)

    # --- requests ---------------------------------------------------------------------------------

    def park(self, ids: Iterable[int]) -> None:
        """These wait for their form."""
        with self._lock:
            self._parked.update(ids)

    def add(self, ids: Iterable[int], requests: Iterable[Request]) -> None:
        """These are about to be queued; those that the client has cancelled meanwhile end at once.

        Raises LinkCut: nobody would hear of them.
        """
        with self._lock:
            if self.cut is not None:
                raise LinkCut(self.cut)
            made = dict(zip(ids, requests, strict=True))
            self.requests.update(made)
            self._parked.difference_update(made)
            early = self._early & made.keys()
            self._early -= early
        for number in early:
            made[number].cancel()

    def wants(self, ids: Iterable[int]) -> bool:
        """Whether somebody waits for any of these, which are parked."""
        with self._lock:
            return self.cut is None and not self._early.issuperset(ids)

    def forget(self, ids: Iterable[int]) -> None:
        """These were refused."""
        with self._lock:
            for number in ids:
                self.requests.pop(number, None)
                self._parked.discard(number)
                self._early.discard(number)

    def cancel(self, ids: Iterable[int], over: bool) -> None:
        """The client wants these no more; of those that have ended there is nothing to do.
        `over`: see Cancel.
        """
        for number in ids:
            with self._lock:
                request = self.requests.get(number)
                if request is None and number in self._parked:
                    self._early.add(number)
            if request is not None:
                request.cancel(over)

    def cancel_all(self) -> None:
        """The client is gone."""
        with self._lock:
            requests = list(self.requests.values())
        for request in requests:
            request.cancel()

    # --- with the lock ----------------------------------------------------------------------------

    def _sent(self, data: bytes | memoryview) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._cut(f"it has left ({error.strerror})")
            return len(data)

    def _cut(self, why: str) -> None:
        if self.cut is None:
            self.cut = why
            self._unsent.clear()
            self._unsent_bytes = 0
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class LinkCut(Exception):
    """The client was cut off, or has left."""

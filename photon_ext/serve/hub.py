"""The engine process's side of all channels: one thread, beside the engine's own."""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from photon_ext.errors import (
    ConfigError,
    PhotonError,
    QueueFull,
    describe,
)
from photon_ext.sampling import SamplingParams
from photon_ext.serve.contract import ModelCard
from photon_ext.serve.engine_link import EngineLink, LinkCut
from photon_ext.serve.messages import (
    Accepted,
    Beat,
    Call,
    Cancel,
    Card,
    PackedScores,
    PromptPiece,
    Refused,
    Reply,
    Seen,
    Submit,
)
from photon_ext.serve.token_router import Route, TokenRouter
from photon_ext.serve.wake_pipe import WakePipe

if TYPE_CHECKING:
    from photon_ext.engine import Engine, Request, StepOutput
    from photon_ext.serve.form_desk import FormDesk

BEAT_S = 0.25
MOST_RETRY_S = 60
PIECE_BYTES = 2**20  # of prompt scores
# the text of an answer is its client's
OF_THE_CLIENT = ("stop", "include_stop", "constraint")
_PARAMS = {
    "n",
    "priority",
    "timeout_s",
    "cache_salt",
    *(field.name for field in fields(SamplingParams)),
    *OF_THE_CLIENT,
}
_LOG = logging.getLogger("photon_ext")


class Hub:
    """Takes what clients ask, and sends what is no step's. It owns the links.

    Attributes:
        beats: called with each Beat; the process tells its parent.
        crashed: called where the engine has, with why; clients have been told.
    """

    def __init__(self, engine: Engine, card: ModelCard, forms: FormDesk | None) -> None:
        """`forms`: where the forms of answers are compiled; None: here, on threads."""
        self.beats: Callable[[Beat], None] = lambda beat: None
        self.crashed: Callable[[str], None] = lambda why: None
        self._engine = engine
        self._card = card
        self._forms = forms
        self._router = TokenRouter(self._scores_ready)
        self._links: list[EngineLink] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._pipe = WakePipe()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="photon-hub", daemon=True)
        self._closed = False
        self._beat = 0
        self._next_beat = 0.0
        self._steps, self._step_at = 0, time.monotonic()
        engine.listen(self._hear)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """All clients lose what they have asked."""
        self._closed = True
        self._pipe.wake()
        self._thread.join()
        self._selector.close()
        self._pipe.close()

    def connect(self, sock: socket.socket) -> None:
        """A client at the other end of this socket; from any thread."""
        self.later(partial(self._connect, sock))

    def later(self, job: Callable[[], None]) -> None:
        """Has the hub's thread do it; from any thread."""
        self._jobs.append(job)
        self._pipe.wake()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # nobody would hear of the engine any more
            _LOG.exception("the engine's channels")
            self.crashed(f"the engine's channels have failed: {describe(error)}")

    def _serve(self) -> None:
        while not self._closed:
            ready = self._selector.select(max(self._next_beat - time.monotonic(), 0.0))
            for key, events in ready:
                if key.data is None:
                    self._pipe.drain()
                    continue
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
            while self._jobs:
                self._jobs.popleft()()
            if time.monotonic() >= self._next_beat:
                self._tell_beat()
            for link in [*self._links]:
                self._look_after(link)
        for link in [*self._links]:
            link.end("the engine is closed")
            self._look_after(link)

    def _hear(self, output: StepOutput) -> None:
        """On the engine thread, which would go on without a listener that raises."""
        try:
            self._router(output)
        except BaseException as error:
            _LOG.exception("the tokens of a step")
            self.crashed(f"the tokens of a step could not be handed on: {describe(error)}")

    def _connect(self, sock: socket.socket) -> None:
        link = EngineLink(sock, self._pipe.wake)
        self._links.append(link)
        self._selector.register(sock, selectors.EVENT_READ, link)
        link.send(Card(asdict(self._card)))

    def _look_after(self, link: EngineLink) -> None:
        """Waits for room where something is to be sent; lets go of who is gone."""
        if link.cut is not None:
            self._selector.unregister(link.sock)
            self._links.remove(link)
            link.sock.close()
            if link.requests:
                text = "a client of the engine is gone: %s; its %d requests end"
                _LOG.warning(text, link.cut, len(link.requests))
            link.cancel_all()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waits else 0)
        if self._selector.get_key(link.sock).events != events:
            self._selector.modify(link.sock, events, link)

    def _receive(self, link: EngineLink) -> None:
        try:
            data = link.receive()
        except BlockingIOError:
            return
        if not data:
            link.end("it has left")
            return
        try:
            for message in link.reader.feed(data):
                self._take(link, message)
        except ValueError as error:
            link.end(f"it sent {error}")

    def _take(self, link: EngineLink, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(link, message)
        elif isinstance(message, Cancel):
            link.cancel(message.ids, message.over)
        elif isinstance(message, Seen):
            link.seen(message.beat)
        elif isinstance(message, Call):
            self._call(link, message)

    # --- requests ---------------------------------------------------------------------------------

    def _submit(self, link: EngineLink, asked: Submit) -> None:
        try:
            params = _checked(asked)
        except Exception as error:
            link.send(_refused(asked.id, _told(error)))
            return
        form, queue = params.answer_grammar, partial(self.queue, link, asked, params)
        if form is None:
            queue()
        else:
            link.park(range(asked.id, asked.id + asked.n))
            forms = self._forms
            if forms is None:
                threading.Thread(target=queue, name="photon-form", daemon=True).start()
            else:
                wanted = partial(link.wants, range(asked.id, asked.id + asked.n))
                forms.ask(form, wanted, queue, partial(self.refuse, link, asked))

    def queue(self, link: EngineLink, asked: Submit, params: SamplingParams) -> None:
        """Hands the request to the engine; from any thread."""
        numbers = range(asked.id, asked.id + asked.n)
        made: list[Request] = []

        def announce(requests: Any) -> None:
            link.add(numbers, requests)
            made.extend(requests)
            for number, request in zip(numbers, requests, strict=True):
                scored = params.prompt_logprobs is not None and number == asked.id
                self._router.add(Route(link, number, request, scored))

        try:
            self._engine.submit(
                [*array("i", asked.ids)],
                params,
                raw=True,
                n=asked.n,
                announce=announce,
                priority=asked.priority,
                timeout_s=asked.timeout_s,
                cache_salt=asked.cache_salt,
                lora=asked.adapter,
            )
        except LinkCut:
            link.forget(numbers)
        except Exception as error:
            for request in made:
                self._router.remove(request)
            self.refuse(link, asked, _told(error))
        else:
            link.send(Accepted(asked.id))

    def refuse(self, link: EngineLink, asked: Submit, error: PhotonError) -> None:
        """From any thread."""
        link.forget(range(asked.id, asked.id + asked.n))
        link.send(_refused(asked.id, error, self._retry_s()))

    def _retry_s(self) -> int:
        """Whole seconds in which those that wait now may have got their rows."""
        waiting = self._engine.waiting
        running = sum(len(link.requests) for link in [*self._links]) - waiting
        each_s = self._engine.meter.requests.recent_row_s
        return min(max(math.ceil(waiting * each_s / max(running, 1)), 1), MOST_RETRY_S)

    def _scores_ready(self, route: Route) -> None:
        self.later(partial(self._send_scores, route))

    def _send_scores(self, route: Route) -> None:
        """In pieces, so that nobody's tokens wait behind a long prompt's scores for long."""
        scored = route.request.prompt_logprobs
        each = 5 + 8 * max((len(one.top) for one in scored[:1]), default=0)
        size = max(PIECE_BYTES // each, 1)
        for begin in range(0, max(len(scored), 1), size):
            piece = PackedScores.of(scored[begin : begin + size])
            route.link.send(PromptPiece(route.number, piece, begin + size >= len(scored)))

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, link: EngineLink, call: Call) -> None:
        if call.name == "stats":
            link.send(Reply(call.id, asdict(self._engine.stats())))
            return
        work: Callable[..., None] = self._engine.load_lora
        if call.name == "unload_adapter":
            work = self._engine.unload_lora
        # it reads files
        threading.Thread(
            target=self._adapters, args=(link, call, work), name="photon-adapter", daemon=True
        ).start()

    def _adapters(self, link: EngineLink, call: Call, work: Callable[..., None]) -> None:
        try:
            work(*call.arguments)
        except PhotonError as error:
            link.send(_refused(call.id, error))
            return
        except Exception as error:  # of a file that somebody else wrote
            link.send(Refused(call.id, "bad", f"the adapter cannot be read: {describe(error)}"))
            return
        self.later(partial(self._adapters_changed, link, call.id))

    def _adapters_changed(self, link: EngineLink, call: int) -> None:
        self._card = card_with(self._card, self._engine.adapters)
        for each in self._links:
            each.send(Card(asdict(self._card)))
        link.send(Reply(call, None))

    # --- beats ------------------------------------------------------------------------------------

    def _tell_beat(self) -> None:
        now = time.monotonic()
        self._next_beat = now + BEAT_S
        self._beat += 1
        steps = self._router.steps
        live = sum(len(link.requests) for link in self._links)
        if steps != self._steps or not live:
            self._steps, self._step_at = steps, now
        waiting = self._engine.waiting
        beat = Beat(self._beat, live, waiting, now - self._step_at)
        for link in self._links:
            link.beat(self._beat, beat)
        self.beats(beat)
        if (fault := self._engine.fault) is not None:
            self.crashed(f"the engine has crashed: {fault}")


def card_with(card: ModelCard, adapters: tuple[str, ...]) -> ModelCard:
    """The card of an engine that has these adapters now."""
    return ModelCard(**{**asdict(card), "adapters": adapters})


def _checked(asked: Submit) -> SamplingParams:
    """Raises ConfigError."""
    for name in OF_THE_CLIENT:
        if name in asked.params:
            raise ConfigError(f"{name} is the client's: the engine makes no text; leave it out")
    return SamplingParams(**asked.params)


def _told(error: Exception) -> PhotonError:
    """What the client is told: a fault at one request ends that one, and not the process."""
    if isinstance(error, PhotonError):
        return error
    _LOG.error("a request failed by a fault of the engine", exc_info=error)
    return PhotonError(f"the engine failed at this request: {describe(error)}; try again")


def _refused(number: int, error: PhotonError, retry_after_s: int = 1) -> Refused:
    message = str(error)
    if isinstance(error, QueueFull):
        return Refused(number, "busy", message, retry_after_s=retry_after_s)
    if isinstance(error, ValueError):
        return Refused(number, "bad", message, _param_of(message))
    return Refused(number, "gone", message)  # nothing that the client could mend


def _param_of(message: str) -> str | None:
    """The part of an Ask that an error names: most begin with it."""
    first, second = (*message.split(" ", 2), "", "")[:2]
    if first == "lora":
        return "adapter"
    if second == "prompt":
        return "ids"
    return first if first in _PARAMS else None

"""An engine in another process, asked from an event loop."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from photon_ext.errors import shown
from photon_ext.serve.contract import (
    Ask,
    BadAsk,
    Busy,
    End,
    EngineGone,
    EngineStarting,
    Health,
    ModelCard,
)
from photon_ext.serve.generation import Answer, Inbox, LiveGeneration
from photon_ext.serve.messages import (
    DOWN,
    Accepted,
    Beat,
    Call,
    Cancel,
    Card,
    FrameReader,
    PromptPiece,
    Refused,
    Reply,
    Seen,
    Submit,
    Tokens,
    frame,
)

if TYPE_CHECKING:
    from photon_ext.serve.contract import Generation
    from photon_ext.serve.home import Home

MOST_ANSWERS = 2**14  # as the engine's
FROZEN_S = 30.0
_CLOSED = "this client is closed"


class EngineClient:
    """See contract.Client. One event loop uses it: the first that waits for it."""

    def __init__(self, sock: socket.socket, home: Home | None = None) -> None:
        """Made by `start`, `in_process`, or by a process that was given the socket.

        Args:
            home: where the engine lives, if this client is to end it.
        """
        self.on_lost: Callable[[], None] = lambda: None
        self.frozen_s = FROZEN_S
        self._sock = sock
        self._home = home
        self._channel: _Channel | None = None
        self._card: ModelCard | None = None
        self._card_came = asyncio.Event()
        self._gone: EngineGone | None = None
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}  # by their first number, until they are accepted
        self._answers: dict[int, Answer] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._targets: list[Answer | None] = []
        self._beat_at = time.monotonic()
        self._stuck_s = 0.0

    @classmethod
    def start(cls, model: str = "smollm2", **options: Any) -> EngineClient:
        """An engine in a process of its own, with its compiler of forms in another. Returns at
        once; `async with` waits until the model is loaded, and ends the processes.

        Args:
            model, options: see Engine.from_pretrained; plain data alone.
        """
        from photon_ext.serve.home import ProcessHome

        home = ProcessHome(model, options)
        return cls(home.client_socket(), home)

    @classmethod
    def in_process(cls, model: str = "smollm2", **options: Any) -> EngineClient:
        """The engine in this process, for debugging: forms are compiled here, and a step is late
        where other Python code runs. Loads the model. Raises as Engine.from_pretrained.
        """
        from photon_ext.serve.home import LocalHome

        home = LocalHome(model, options)
        return cls(home.client_socket(), home)

    async def __aenter__(self) -> EngineClient:
        try:
            await self.ready()
        except BaseException:  # nobody else ends the processes
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- what is asked ----------------------------------------------------------------------------

    @property
    def model(self) -> ModelCard:
        if self._gone is not None:
            raise self._gone
        if self._card is None:
            raise EngineStarting("the engine is loading its model; try again soon")
        return self._card

    async def ready(self) -> ModelCard:
        await self.connect()
        await self._card_came.wait()
        return self.model

    async def connect(self) -> None:
        """From here on it hears of the engine; `ready` does so, too."""
        if self._channel is None and self._gone is None:
            loop = asyncio.get_running_loop()
            self._channel = _Channel(self._take, self._lost)
            await loop.create_unix_connection(
                lambda: cast(_Channel, self._channel), sock=self._sock
            )

    async def generate(self, ask: Ask) -> Generation:
        if self._channel is None:
            await self.connect()
        card = self.model
        ids = _packed(ask, card)
        scores_prompt = ask.params.get("prompt_logprobs") is not None and len(ask.ids) > 0
        params = _plain(ask.params)
        first = next(self._numbers)
        for _ in range(1, ask.n):
            next(self._numbers)
        inbox = Inbox(first, ask.n, scores_prompt)
        self._inboxes[first] = inbox
        self._answers.update(enumerate(inbox.answers, first))
        message = Submit(
            first,
            ids,
            params,
            ask.n,
            ask.priority,
            ask.timeout_s,
            ask.cache_salt,
            ask.adapter,
        )
        try:
            self._send(message)
            await inbox.accepted
        except BaseException as error:
            numbers = inbox.cancel(None)
            if isinstance(error, (BadAsk, Busy, EngineGone)):
                self._forget(numbers)
            else:  # nobody waits any more
                self._cancel(numbers)
            raise
        finally:
            self._inboxes.pop(first, None)
        return LiveGeneration(inbox, self._cancel)

    def health(self) -> Health:
        if self._gone is not None:
            return Health("gone", str(self._gone))
        if self._card is None:
            return Health("starting")
        silent_s = time.monotonic() - self._beat_at
        if silent_s > self.frozen_s:
            return Health("frozen", f"no word from the engine for {silent_s:.0f} s")
        if self._stuck_s > self.frozen_s:
            return Health("frozen", f"the engine has made no step for {self._stuck_s:.0f} s")
        return Health("ready")

    async def stats(self) -> dict[str, Any]:
        return cast("dict[str, Any]", await self._call("stats"))

    async def load_adapter(self, name: str, path: str) -> None:
        await self._call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def close(self) -> None:
        self._fail(EngineGone(_CLOSED))
        if self._channel is not None:
            self._channel.close()
        else:
            self._sock.close()
        if self._home is not None:
            home, self._home = self._home, None
            await asyncio.to_thread(home.close)

    # --- what is sent -----------------------------------------------------------------------------

    def _send(self, message: msgspec.Struct) -> None:
        assert self._channel is not None
        self._channel.send(frame(message))

    async def _call(self, name: str, *arguments: str) -> Any:
        if self._channel is None:
            await self.connect()
        assert self.model is not None  # raises while there is no engine
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(number, name, [*arguments]))
            return await answer
        finally:
            self._calls.pop(number, None)

    def _cancel(self, numbers: list[int], over: bool = False) -> None:
        self._forget(numbers)
        if numbers and self._gone is None:
            self._send(Cancel(numbers, over))

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._answers.pop(number, None)

    # --- what comes -------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        if isinstance(message, Tokens):
            self._take_tokens(message)
        elif isinstance(message, Beat):
            self._beat_at, self._stuck_s = time.monotonic(), message.stuck_s
            self._send(Seen(message.number))
        elif isinstance(message, Accepted):
            inbox = self._inboxes.get(message.id)
            if inbox is not None and not inbox.accepted.done():
                inbox.accepted.set_result(None)
        elif isinstance(message, Refused):
            self._take_refusal(message)
        elif isinstance(message, PromptPiece):
            if (answer := self._answers.get(message.id)) is not None:
                answer.score_prompt(message.scores.unpack(), message.last)
                self._forget_closed(message.id, answer)
        elif isinstance(message, Reply):
            if (waiter := self._calls.get(message.id)) is not None and not waiter.done():
                waiter.set_result(message.value)
        elif isinstance(message, Card):
            self._card = msgspec.convert(message.card, ModelCard)
            self._beat_at = time.monotonic()
            self._card_came.set()

    def _take_tokens(self, message: Tokens) -> None:
        tokens = array("i", message.tokens)
        if message.ids is not None:
            ids = array("q", message.ids)
            self._targets = [self._answers.get(number) for number in ids]
        if message.counts is None:
            for target, token in zip(self._targets, tokens, strict=True):
                if target is not None and not target.closed:
                    target.push(token)
            return
        for number, cached in message.cached.items():
            if (answer := self._answers.get(number)) is not None:
                answer.begin(cached)
        begin = 0
        numbers = array("q", message.ids or b"")
        for target, number, count in zip(self._targets, numbers, message.counts, strict=True):
            if target is not None and count and not target.closed:
                found = message.scores.get(number)
                scores = None if found is None else found.unpack()
                target.extend(tokens[begin : begin + count], scores)
            begin += count
        for end in message.ends:
            if (answer := self._answers.get(end.id)) is not None:
                answer.finish(End(end.finish_reason, end.stop_reason, end.error))
                self._forget_closed(end.id, answer)

    def _take_refusal(self, message: Refused) -> None:
        error: Exception = BadAsk(message.message, message.param)
        if message.kind == "busy":
            error = Busy(message.message, message.retry_after_s)
        elif message.kind == "gone":
            error = EngineGone(message.message)
        if (inbox := self._inboxes.get(message.id)) is not None:
            inbox.refuse(error)
        elif (waiter := self._calls.get(message.id)) is not None and not waiter.done():
            waiter.set_exception(error)

    def _forget_closed(self, number: int, answer: Answer) -> None:
        if answer.closed:
            self._answers.pop(number, None)

    def _lost(self, why: str) -> None:
        if self._home is None:
            self._fail(EngineGone(why))
            self.on_lost()
        else:  # which may have to wait until it knows
            asked = asyncio.get_running_loop().run_in_executor(None, self._home.why)
            asked.add_done_callback(lambda told: self._lost_by(told.result() or why))

    def _lost_by(self, why: str) -> None:
        self._fail(EngineGone(why))
        self.on_lost()

    def _fail(self, error: EngineGone) -> None:
        if self._gone is None:
            self._gone = error
        self._card_came.set()
        for answer in self._answers.values():
            answer.inbox.fail(error)
        self._answers.clear()
        self._targets.clear()
        for waiter in self._calls.values():
            if not waiter.done():
                waiter.set_exception(error)


class _Channel(asyncio.Protocol):
    """The socket, in the event loop."""

    def __init__(self, take: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        self._take, self._on_lost = take, lost
        self._reader = FrameReader(DOWN)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost("the engine's process has ended, or has cut this client off")

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _packed(ask: Ask, card: ModelCard) -> bytes:
    """The prompt as the engine takes it. Raises BadAsk."""
    if not isinstance(ask.n, int) or not 1 <= ask.n <= MOST_ANSWERS:
        raise BadAsk(f"n is {ask.n!r}; give an integer from 1 to {MOST_ANSWERS}", "n")
    try:
        packed = array("i", ask.ids)
    except (TypeError, OverflowError, ValueError) as error:
        wanted = f"give integers from 0 to {card.vocab_size - 1}"
        raise BadAsk(f"the prompt holds what is no token id ({error}); {wanted}", "ids") from error
    return packed.tobytes()


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Raises BadAsk: it cannot be sent."""
    for name, value in params.items():
        try:
            msgspec.msgpack.encode(value)
        except (
            TypeError,
            OverflowError,
            RecursionError,
            ValueError,
            msgspec.MsgspecError,
        ) as error:
            told = f"{name} is {shown(value)}, which cannot be sent to the engine ({error})"
            raise BadAsk(
                f"{told}; give numbers below 2**64, texts, lists or dicts", name
            ) from error
    return dict(params)

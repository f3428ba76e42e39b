"""What goes between the processes, as msgpack: each kind of message is a struct, and a frame is
its length and then its bytes.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from photon_ext.serve.contract import Scores

MOST_BYTES = 256 * 2**20  # of a frame: a prompt, a schema and everything else is far below
_LENGTH = struct.Struct("<I")
Message = TypeVar("Message", bound=msgspec.Struct)


class Scored(Protocol):
    """See runtime.TokenLogprobs."""

    @property
    def sampled(self) -> float: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class _Struct(msgspec.Struct, array_like=True, tag=True):
    """A message; its tag is its class's name."""


class PackedScores(msgspec.Struct, array_like=True):
    """Scores as bytes."""

    sampled: bytes
    counts: bytes
    ids: bytes
    values: bytes

    @classmethod
    def of(cls, scored: Iterable[Scored]) -> PackedScores:
        sampled, counts, ids, values = array("f"), bytearray(), array("i"), array("f")
        for one in scored:
            sampled.append(one.sampled)
            counts.append(len(one.top))
            for token, logprob in one.top:
                ids.append(token)
                values.append(logprob)
        return cls(sampled.tobytes(), bytes(counts), ids.tobytes(), values.tobytes())

    def unpack(self) -> Scores:
        sampled, ids, values = array("f", self.sampled), array("i", self.ids), array("f")
        values.frombytes(self.values)
        return Scores(sampled, self.counts, ids, values)


# --- from a client to the engine ------------------------------------------------------------------


class Submit(_Struct):
    """An Ask. `id` is the client's own, of answer 0; the others have the numbers that follow.
    `ids`: int32.
    """

    id: int
    ids: bytes
    params: dict[str, Any]
    n: int
    priority: int
    timeout_s: float | None
    cache_salt: str | None
    adapter: str | None


class Cancel(_Struct):
    """Answers that nobody wants any more; those that have ended already may be among them.

    `over`: they are complete, as their client has found a stop in their text.
    """

    ids: list[int]
    over: bool = False


class Seen(_Struct):
    """The client has read all up to this Beat."""

    beat: int


class Call(_Struct):
    """`name`: "stats", "load_adapter" (with a name and a path) or "unload_adapter" (with a name). A
    Reply or Refused follows.
    """

    id: int
    name: str
    arguments: list[str]


# --- from the engine to a client ------------------------------------------------------------------


class Card(_Struct):
    """ModelCard, first and whenever it has changed: now requests are taken."""

    card: dict[str, Any]


class Accepted(_Struct):
    id: int


class Refused(_Struct):
    """Of a Submit or a Call. `kind`: "bad", "busy" or "gone"; see the errors of the contract."""

    id: int
    kind: str
    message: str
    param: str | None = None
    retry_after_s: int = 1


class Reply(_Struct):
    id: int
    value: Any


class EndOf(msgspec.Struct, array_like=True):
    """End of one answer."""

    id: int
    finish_reason: str
    stop_reason: int | str | None
    error: str | None


class Tokens(_Struct):
    """What a step gave to this client's answers, as StepOutput has it.

    Attributes:
        ids: int64, of answers; None: those of the Tokens before.
        counts: how many tokens each has; None: one.
        cached: of answers that come for the first time, their cached tokens.
    """

    tokens: bytes
    ids: bytes | None = None
    counts: bytes | None = None
    scores: dict[int, PackedScores] = {}
    ends: list[EndOf] = []
    cached: dict[int, int] = {}


class PromptPiece(_Struct):
    """Scores of the next tokens of a prompt."""

    id: int
    scores: PackedScores
    last: bool


class Beat(_Struct):
    """The engine's process lives; comes a few times a second.

    Attributes:
        live, waiting: requests of all clients.
        stuck_s: seconds for which the loop has made no step, though there is work.
    """

    number: int
    live: int
    waiting: int
    stuck_s: float


# --- between the parent and its children ----------------------------------------------------------


class Start(_Struct):
    """What a child is told first; as its kind of process reads it."""

    settings: dict[str, Any]


class Link(_Struct):
    """With a descriptor beside it: a new client of the engine."""


class Compiler(_Struct):
    """With a descriptor beside it: the compiler of forms, or the one after it."""


class Ready(_Struct):
    """The child has what it needs; of the engine, with its card."""

    card: dict[str, Any] | None = None


class Failed(_Struct):
    """The child cannot do its work: why, in one line."""

    message: str


class CompilerHangs(_Struct):
    """The engine has waited long enough: this compiler is to be ended."""


# --- between the engine and the compiler of forms -------------------------------------------------


class Compile(_Struct):
    """See sampling.grammar.Grammar."""

    id: int
    kind: str
    text: str
    whitespace: bool


class Compiled(_Struct):
    """One of: an automaton's bytes; why the host has to keep the form; why it is refused.

    Attributes:
        passing: the refusal is of now, and no fact about the form.
    """

    id: int
    automaton: bytes | None = None
    host: str | None = None
    refused: str | None = None
    passing: bool = False


UP = Submit | Cancel | Seen | Call
DOWN = Card | Accepted | Refused | Reply | Tokens | PromptPiece | Beat
TO_CHILD = Start | Link | Compiler
FROM_CHILD = Ready | Failed | Beat | CompilerHangs
TO_COMPILER = Start | Compile
FROM_COMPILER = Ready | Failed | Compiled
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Makes messages of the bytes that arrive, in pieces of any size."""

    def __init__(self, kinds: Any) -> None:
        """`kinds`: one of the unions above."""
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete. Raises ValueError: these are no such frames."""
        buffer = self._bytes
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, begin)
                if length > MOST_BYTES:
                    raise ValueError(f"a frame of {length} bytes; {MOST_BYTES} are the most")
                end = begin + _LENGTH.size + length
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[begin + _LENGTH.size : end])
                begin = end
                yield self._decoded(body)
        finally:
            del buffer[:begin]

    def _decoded(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ValueError(f"a frame that is no message: {error}") from error


class BlockingFrames:
    """Frames over a socket, for a thread that has nothing else to do. Usable by one thread."""

    def __init__(self, sock: socket.socket, kinds: Any) -> None:
        self._sock, self._reader = sock, FrameReader(kinds)
        self._waiting: list[Any] = []

    def send(self, message: msgspec.Struct, seconds: float | None = None) -> None:
        """Raises OSError: the other side has left; TimeoutError: it does not read."""
        self._sock.settimeout(seconds)
        self._sock.sendall(frame(message))

    @property
    def ended(self) -> bool:
        """Whether the other side has left, and nothing of it is left to be read."""
        self._sock.settimeout(0)
        try:
            return not (self._waiting or self._sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self, seconds: float | None = None) -> Any:
        """Waits for the next message. Raises EOFError: the other side has left; TimeoutError."""
        while not self._waiting:
            self._sock.settimeout(seconds)
            try:
                data = self._sock.recv(2**18)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._waiting = list(self._reader.feed(data))
        return self._waiting.pop(0)

"""What a server says to an engine, and hears of it: plain data, without torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from photon_ext.errors import PhotonError


class BadAsk(PhotonError, ValueError):
    """This request can never be served: a 400.

    Attributes:
        param: the name in `Ask`, or in its `params`, that was wrong; None: none alone.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Busy(PhotonError):
    """As many requests run and wait as the engine takes: a 429.

    Attributes:
        retry_after_s: whole seconds, 1 or more, after which another attempt may do better.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineGone(PhotonError, RuntimeError):
    """The engine's process has ended, or does not answer, or this client is closed: a 503."""


class EngineStarting(PhotonError, RuntimeError):
    """The engine loads its model: a 503 that will pass."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, and what is asked of its answers.

    Attributes:
        ids: the prompt's token ids.
        params: keywords of SamplingParams, as JSON has them: max_new_tokens, seed, stop_token_ids,
            logit_bias, logprobs, prompt_logprobs, json_schema, regex, choice,
            grammar, ignore_eos, bad_words, ... Not `stop`, `include_stop` and `constraint`, as text
            is the client's side.
        n: answers; those after the first have the seeds that follow.
        priority, timeout_s, cache_salt: see RequestOptions.of; the time runs from the arrival at
            the engine on.
        adapter: the name of a loaded adapter; None: none.
    """

    ids: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None
    adapter: str | None = None


class TokenScore(NamedTuple):
    """The natural log-probability of a token, and the likeliest ids in order, each with its own."""

    logprob: float
    top: list[tuple[int, float]]


class Scores(NamedTuple):
    """Log-probabilities of tokens that follow each other, packed.

    Attributes:
        sampled: float32, of each token.
        counts: how many likeliest ids each token has.
        ids, values: int32 and float32, of these, token after token.
    """

    sampled: array[float]
    counts: bytes
    ids: array[int]
    values: array[float]

    def __iter__(self) -> Iterator[TokenScore]:  # type: ignore[override]  # one of each token
        begin = 0
        for logprob, count in zip(self.sampled, self.counts, strict=True):
            end = begin + count
            pairs = zip(self.ids[begin:end], self.values[begin:end], strict=True)
            yield TokenScore(logprob, list(pairs))
            begin = end


class End(NamedTuple):
    """Why an answer has ended: "stop", "length", "cancelled", "timeout" or "error"; see Output."""

    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class Delta:
    """What has come of one answer since the last look.

    Attributes:
        index: which of the n answers.
        tokens: its next ids, a final stop token included; may be empty.
        scores: of these tokens, where `logprobs` asks for them.
        end: it has ended; no delta of this answer follows.
        cached_tokens: of its prompt, those found in cached pages: in its first delta with a token
            or an end, else None.
        prompt_scores: of the next tokens of the prompt, from its second on, where `prompt_logprobs`
            asks for them: of answer 0, in pieces, all of them before or with its end.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    scores: Scores | None = None
    end: End | None = None
    cached_tokens: int | None = None
    prompt_scores: Scores | None = None


class Generation(Protocol):
    """The answers to an `Ask` that was accepted. `async with generation:` cancels what has not
    ended where the block is left; so does losing it.
    """

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> list[Delta]:
        """What has come since the last call, one delta for each answer of which something has, and
        some hundred tokens at most: more is left for the next calls. Waits where that is nothing.
        Stops when all answers have ended. Raises EngineGone.
        """

    async def __aenter__(self) -> Generation: ...

    async def __aexit__(self, *error: object) -> None: ...

    def cancel(self, index: int | None = None, over: bool = False) -> None:
        """Ends one answer, or all; returns at once. Nothing more comes of it: no token, no end.

        Args:
            over: a stop was found in its text: the engine counts it as "stop", not as "cancelled".
        """


@dataclass(frozen=True)
class ModelCard:
    """What an engine serves.

    Attributes:
        model: as it was named where the engine was started.
        path: the directory or the .gguf file from which it was loaded; its tokenizer is there.
        max_len: tokens of prompt and answer, but for the answer's last.
        vocab_size: width of the logits; ids lie below it.
        eos_ids: what ends an answer unless `ignore_eos`.
        device: "cpu" or "cuda:N".
        max_rows: requests that run at once. max_waiting: requests that may wait besides; None: any
            number.
        adapters: names of those that are loaded; they change as they are loaded and unloaded.
        version: of photon_ext.
    """

    model: str
    path: str
    max_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    device: str
    max_rows: int
    max_waiting: int | None
    adapters: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Health:
    """How the engine is, as far as this process knows; asking costs nothing and waits for nobody.

    Attributes:
        state: "starting", "ready", "frozen" (no step for long, though there is work), "gone".
        why: of "frozen" and "gone", in words; else "".
    """

    state: str
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "ready"


class Client(Protocol):
    """An engine, asked from an event loop. `EngineClient.start` makes one, and so does
    the process that serves HTTP.
    """

    @property
    def model(self) -> ModelCard:
        """Raises EngineStarting, before `ready`."""

    async def ready(self) -> ModelCard:
        """Waits until the model is loaded. Raises EngineGone."""

    async def generate(self, ask: Ask) -> Generation:
        """Waits until the engine has accepted it, with the form of its answer compiled; from then
        on only the answer itself may go wrong, with an `End`. A task cancelled here cancels it.

        Raises: BadAsk, Busy, EngineStarting, EngineGone.
        """

    def health(self) -> Health: ...

    async def stats(self) -> dict[str, Any]:
        """A MeterSnapshot of the engine, as a dict. Raises EngineStarting, EngineGone."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Raises BadAsk: the name is taken, or it is no adapter for this model; EngineGone."""

    async def unload_adapter(self, name: str) -> None:
        """Raises BadAsk: there is none, or requests use it; EngineGone."""

    async def close(self) -> None:
        """Cancels all that this client has asked. Again, it does nothing."""

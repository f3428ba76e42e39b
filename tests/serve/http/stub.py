"""An engine that answers by a script, with the contract of `photon_ext.serve.contract`."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from photon_ext.observe.meter import MeterSnapshot
from photon_ext.observe.request_meter import RequestMeter
from photon_ext.serve.contract import (
    Ask,
    Busy,
    Delta,
    End,
    EngineGone,
    EngineStarting,
    Health,
    ModelCard,
    Scores,
)

STATS: dict[str, Any] = {
    **{field.name: 0 for field in fields(MeterSnapshot)},
    "device": "cpu",
    "host_s": {"launch": 0.5},
    "requests_ended": {"stop": 3, "cancelled": 1},
    "request_histograms": RequestMeter().histograms(),
    "step_gap_us": None,
    "step_gap_p99_us": 7.0,
    "tokens": 5,
    "pages_held": 3,
    "pages_free": 9,
}
CARD = ModelCard(
    model="stub",
    path="stub",
    max_len=512,
    vocab_size=300,
    eos_ids=(257,),
    device="cpu",
    max_rows=4,
    max_waiting=None,
    adapters=("poet",),
    version="0",
)


@dataclass
class Script:
    """What the engine does with a request.

    Attributes:
        tokens: of its answers; a function has the ask and the answer's number.
        end: behind the last token; None: "stop" behind an end token, else "length".
        cuts: how many tokens each delta has, in turn; the last goes on.
        fails_after: the engine is gone behind so many tokens.
        waits_after: nothing comes behind so many tokens until `StubClient.go` is set.
        cached: tokens of the prompt in cached pages.
        logprob: of each token.
        scores_from: those of the prompt come with the token behind so many.
    """

    tokens: Callable[[Ask, int], Sequence[int]]
    end: End | None = None
    cuts: Sequence[int] = (1,)
    fails_after: int | None = None
    waits_after: int | None = None
    cached: int = 0
    logprob: float = -0.5
    scores_from: int = 0


def scores_of(tokens: Sequence[int], count: int, logprob: float) -> Scores:
    """The token itself is the likeliest, then come ids from 32 on."""
    ids, values = array("i"), array("f")
    for token in tokens:
        ids.extend([token, *range(32, 32 + count)][:count])
        values.extend([logprob, *(logprob - 1.0 - i for i in range(count))][:count])
    sampled = array("f", [logprob] * len(tokens))
    return Scores(sampled, bytes([count] * len(tokens)), ids, values)


@dataclass
class StubClient:
    """
    Attributes:
        asks: all that were accepted.
        running: generations that have not ended. most_running: at a time.
        given: tokens that were handed out.
        cancelled: answers that were cancelled, as (number of the ask, index).
        refusal: what `generate` raises; None: nothing.
        room: how many asks are accepted.
        go: lets scripts with `waits_after` go on.
    """

    script: Script
    card: ModelCard = CARD
    asks: list[Ask] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    given: int = 0
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    refusal: Exception | None = None
    room: int = 10**9
    state: str = "ready"
    go: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> ModelCard:
        if self.state == "starting":
            raise EngineStarting("the engine loads its model")
        return self.card

    async def ready(self) -> ModelCard:
        return self.card

    async def generate(self, ask: Ask) -> StubGeneration:
        await asyncio.sleep(0)
        if self.state == "gone":
            raise EngineGone("the engine's process has ended")
        if self.refusal is not None:
            raise self.refusal
        if len(self.asks) >= self.room:
            raise busy()
        self.asks.append(ask)
        return StubGeneration(self, ask, len(self.asks) - 1)

    def health(self) -> Health:
        return Health(self.state)

    async def stats(self) -> dict[str, Any]:
        if self.state == "gone":
            raise EngineGone("the engine's process has ended")
        return {**STATS, "live": self.running}

    async def load_adapter(self, name: str, path: str) -> None:
        self.card = replace(self.card, adapters=(*self.card.adapters, name))

    async def unload_adapter(self, name: str) -> None:
        left = tuple(each for each in self.card.adapters if each != name)
        self.card = replace(self.card, adapters=left)

    async def close(self) -> None:
        return None


def busy() -> Busy:
    return Busy("4 requests run and 0 wait; try again later", 2)


class StubGeneration:
    """Gives a delta of each answer in turn."""

    def __init__(self, client: StubClient, ask: Ask, number: int) -> None:
        self._client = client
        self._script = script = client.script
        self._ask = ask
        self._number = number
        cap = ask.params.get("max_new_tokens") or client.card.max_len
        self._tokens = [list(script.tokens(ask, index))[:cap] for index in range(ask.n)]
        self._done = [0] * ask.n
        self._open = set(range(ask.n))
        self._turns = 0
        client.running += 1
        client.most_running = max(client.most_running, client.running)

    def __aiter__(self) -> StubGeneration:
        return self

    async def __anext__(self) -> list[Delta]:
        await asyncio.sleep(0)
        script, turn = self._script, self._turns
        self._turns += 1
        if not self._open:
            self._close()
            raise StopAsyncIteration
        if script.fails_after is not None and max(self._done) >= script.fails_after:
            raise EngineGone("the engine's process has ended")
        if script.waits_after is not None and max(self._done) >= script.waits_after:
            await self._client.go.wait()
        size = script.cuts[min(turn, len(script.cuts) - 1)]
        return [self._delta(index, size) for index in sorted(self._open)]

    def _delta(self, index: int, size: int) -> Delta:
        params, begin = self._ask.params, self._done[index]
        tokens = self._tokens[index][begin : begin + size]
        delta = Delta(index, tokens)
        self._done[index] += len(tokens)
        self._client.given += len(tokens)
        if begin == 0:
            delta.cached_tokens = self._script.cached
        asked = params.get("prompt_logprobs")
        if asked is not None and (index, begin) == (0, self._script.scores_from):
            delta.prompt_scores = scores_of(self._ask.ids[1:], asked, self._script.logprob)
        if params.get("logprobs") is not None:
            delta.scores = scores_of(tokens, params["logprobs"], self._script.logprob)
        if self._done[index] >= len(self._tokens[index]):
            self._open.discard(index)
            delta.end = self._script.end or self._natural_end(tokens)
        return delta

    def _natural_end(self, tokens: Sequence[int]) -> End:
        stops = {*self._ask.params.get("stop_token_ids", ())}
        if not self._ask.params.get("ignore_eos"):
            stops |= {*self._client.card.eos_ids}
        if tokens and tokens[-1] in stops:
            return End("stop", tokens[-1])
        return End("length")

    async def __aenter__(self) -> StubGeneration:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()
        self._close()

    def cancel(self, index: int | None = None, over: bool = False) -> None:
        for each in sorted(self._open if index is None else self._open & {index}):
            self._client.cancelled.append((self._number, each))
            self._open.discard(each)

    def _close(self) -> None:
        if self._turns >= 0:
            self._client.running -= 1
            self._turns = -(10**9)

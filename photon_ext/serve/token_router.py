"""Who gets which tokens of a step: called by the engine thread, so it does little."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from photon_ext.serve.messages import EndOf, PackedScores, Tokens

if TYPE_CHECKING:
    from photon_ext.engine import Request, StepOutput
    from photon_ext.serve.engine_link import EngineLink


@dataclass(slots=True)
class Route:
    """The way of one answer.

    Attributes:
        number: the client's own.
        begun: the client has heard of it.
        scores_prompt: its client waits for scores of the prompt.
    """

    link: EngineLink
    number: int
    request: Request
    scores_prompt: bool
    begun: bool = False


class _Share(NamedTuple):
    """The places of a client's answers in a step, and their numbers."""

    link: EngineLink
    places: tuple[int, ...]
    numbers: array[int]


class TokenRouter:
    """Cuts each StepOutput into one Tokens for each client that has answers in it.

    While nobody joins, leaves or ends, a step costs one frame for each client, without a look at
    single answers.
    """

    def __init__(self, scores_ready: Callable[[Route], None]) -> None:
        """`scores_ready`: called once for an answer, when the scores of its prompt are complete."""
        self._scores_ready = scores_ready
        self._routes: dict[int, Route] = {}
        self._ids: bytes | None = None
        self._shares: list[_Share] = []
        self.steps = 0

    def add(self, route: Route) -> None:
        """Before its request is queued; from any thread."""
        self._routes[route.request.id] = route

    def remove(self, request: Request) -> None:
        """It was not queued after all."""
        self._routes.pop(request.id, None)

    def __call__(self, output: StepOutput) -> None:
        """See Engine.listen."""
        self.steps += 1
        if output.ids is not self._ids:
            self._ids = output.ids
            self._shares = self._shares_of(output.ids)
        even = output.counts.count(1) == len(output.counts)
        if even and not (output.logprobs or output.ends) and all(map(_is_told, self._shares)):
            self._tell_even(output.tokens)
        else:
            self._tell_uneven(output)

    def _tell_even(self, tokens: bytes) -> None:
        """Each answer got a token, and each client knows whose they are."""
        if len(self._shares) == 1 and 4 * len(self._shares[0].places) == len(tokens):
            self._shares[0].link.send(Tokens(tokens))
            return
        column = array("i", tokens)
        for share in self._shares:
            own = array("i", map(column.__getitem__, share.places))
            share.link.send(Tokens(own.tobytes()))

    def _tell_uneven(self, output: StepOutput) -> None:
        told = {id(share.link): (share.link, self._tokens(share, output)) for share in self._shares}
        for share in self._shares:
            share.link.shown_ids = share.numbers
        for end in output.ends:
            route = self._routes.pop(end.id, None)
            if route is None:
                continue
            link = route.link
            if id(link) not in told:  # none of its answers got a token
                told[id(link)] = link, Tokens(b"", b"", b"")
                link.shown_ids = None
            message = told[id(link)][1]
            message.ends.append(EndOf(route.number, *end[1:]))
            if not route.begun:
                message.cached[route.number] = route.request.cached_tokens
            if route.scores_prompt:
                self._scores_ready(route)
            link.requests.pop(route.number, None)
        for link, message in told.values():
            link.send(message)

    def _tokens(self, share: _Share, output: StepOutput) -> Tokens:
        ids, tokens = array("q", output.ids), array("i", output.tokens)
        begins = list(accumulate(output.counts, initial=0))
        counts = bytes(map(output.counts.__getitem__, share.places))
        own = array("i")
        for place, count in zip(share.places, counts, strict=True):
            own.extend(tokens[begins[place] : begins[place] + count])
        told = Tokens(own.tobytes(), share.numbers.tobytes(), counts)
        for place, number, count in zip(share.places, share.numbers, counts, strict=True):
            route = self._routes.get(ids[place])
            if route is None or not count:  # it has ended, in a step before; or waits for its mask
                continue
            if not route.begun:
                route.begun = True
                told.cached[number] = route.request.cached_tokens
            if route.scores_prompt:
                route.scores_prompt = False
                self._scores_ready(route)
            if found := output.logprobs.get(ids[place]):
                told.scores[number] = PackedScores.of(found)
        return told

    def _shares_of(self, ids: bytes) -> list[_Share]:
        """Of links that have answers in this step."""
        found: dict[int, tuple[EngineLink, list[int], array[int]]] = {}
        for place, request_id in enumerate(array("q", ids)):
            route = self._routes.get(request_id)
            if route is not None:
                _, places, numbers = found.setdefault(id(route.link), (route.link, [], array("q")))
                places.append(place)
                numbers.append(route.number)
        return [_Share(link, tuple(places), numbers) for link, places, numbers in found.values()]


def _is_told(share: _Share) -> bool:
    return share.link.shown_ids is share.numbers

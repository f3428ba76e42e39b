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


@dataclass(slots=True, eq=False)
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
    """A client's answers in a step.

    Attributes:
        places: of them in the step's columns; None: they are all that are there.
        numbers: the client's own, int64.
    """

    link: EngineLink
    routes: list[Route]
    places: list[int] | None
    numbers: bytes


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
            for share in self._shares:
                share.link.send(Tokens(_own(share, output)[0]))
        else:
            self._tell_uneven(output)

    def _tell_uneven(self, output: StepOutput) -> None:
        told: dict[int, Tokens] = {}
        links = [share.link for share in self._shares]
        for share in self._shares:
            told[id(share.link)] = self._tokens(share, output)
            share.link.shown_ids = share.numbers
        for end in output.ends:
            route = self._routes.pop(end.id, None)
            if route is None:
                continue
            link = route.link
            if id(link) not in told:  # none of its answers got a token
                links.append(link)
                told[id(link)] = Tokens(b"", b"", b"")
                link.shown_ids = None
            message = told[id(link)]
            message.ends.append(EndOf(route.number, *end[1:]))
            if not route.begun:
                self._begin(route, message)
            link.requests.pop(route.number, None)
        for link in links:
            link.send(told[id(link)])

    def _tokens(self, share: _Share, output: StepOutput) -> Tokens:
        tokens, counts = _own(share, output)
        told = Tokens(tokens, share.numbers, counts)
        for route, count in zip(share.routes, counts, strict=True):
            if not route.begun and count:
                self._begin(route, told)
        for request_id, found in output.logprobs.items():
            of = self._routes.get(request_id)
            if of is not None and of.link is share.link:
                told.scores[of.number] = PackedScores.of(found)
        return told

    def _begin(self, route: Route, told: Tokens) -> None:
        """Its first token, or its end without one."""
        route.begun = True
        told.cached[route.number] = route.request.cached_tokens
        if route.scores_prompt:
            self._scores_ready(route)

    def _shares_of(self, ids: bytes) -> list[_Share]:
        """Of links that have answers in this step."""
        routes = [*map(self._routes.get, array("q", ids))]
        links = {id(route.link): route.link for route in routes if route is not None}
        if len(links) == 1 and None not in routes:
            everybody = [route for route in routes if route is not None]
            return [_Share(everybody[0].link, everybody, None, _numbers(everybody))]
        shares = []
        for link in links.values():
            own = [(i, one) for i, one in enumerate(routes) if one is not None and one.link is link]
            theirs = [route for _, route in own]
            shares.append(_Share(link, theirs, [place for place, _ in own], _numbers(theirs)))
        return shares


def _own(share: _Share, output: StepOutput) -> tuple[bytes, bytes]:
    """The tokens and counts of its answers."""
    if share.places is None:
        return output.tokens, output.counts
    tokens = array("i", output.tokens)
    counts = bytes(map(output.counts.__getitem__, share.places))
    if len(tokens) == len(output.counts) == output.counts.count(1):
        return array("i", map(tokens.__getitem__, share.places)).tobytes(), counts
    begins = list(accumulate(output.counts, initial=0))
    own = array("i")
    for place, count in zip(share.places, counts, strict=True):
        own.extend(tokens[begins[place] : begins[place] + count])
    return own.tobytes(), counts


def _numbers(routes: list[Route]) -> bytes:
    return array("q", [route.number for route in routes]).tobytes()


def _is_told(share: _Share) -> bool:
    return share.link.shown_ids is share.numbers

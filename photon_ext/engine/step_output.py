"""What all requests get in a step, as columns of plain data, fit for another process as they
are.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, compress
from typing import NamedTuple, TypeAlias

from photon_ext.engine.output import End
from photon_ext.runtime import TokenLogprobs

Logprobs: TypeAlias = Mapping[int, Sequence[TokenLogprobs]]
_NO_TOKEN = -1


class EndedRequest(NamedTuple):
    """Why a request has ended; see Output."""

    id: int
    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None

    @classmethod
    def of(cls, request_id: int, end: End) -> EndedRequest:
        return cls(request_id, end.reason.value, end.stop_reason, end.error)


class ToldTokens(NamedTuple):
    """What one request got by itself, and its log-probabilities, where it asks for them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


_NOTHING = ToldTokens([], [])


class StepOutput(NamedTuple):
    """What one step gave to all requests, see `Engine.listen`: bytes, numbers and strings alone, so
    that `pickle`, `msgpack` and their like take it as it is, at little cost.

    Attributes:
        ids: int64 [n], of requests (`Request.id`): those that decode together, then others. While
            nobody joins, leaves or ends it is the same object.
        counts: uint8 [n], how many tokens each of them got, from 0 on.
        tokens: int32, in that order: a request's own follow each other.
        logprobs: by request, of those that ask for them: one for each of its tokens here.
        ends: of requests that have ended.
    """

    ids: bytes
    counts: bytes
    tokens: bytes
    logprobs: Logprobs
    ends: Sequence[EndedRequest]

    def rows(self) -> list[tuple[int, list[int]]]:
        """Each request with its tokens; for whoever listens in the same process."""
        tokens = iter(array("i", self.tokens))
        return [
            (request, [next(tokens) for _ in range(count)])
            for request, count in zip(array("q", self.ids), self.counts, strict=True)
        ]


class StepColumns:
    """Makes the outputs of steps, and keeps what the next has in common with the last."""

    def __init__(self) -> None:
        self._ids = array("q")
        self._id_bytes, self._ones = b"", b""

    def even(self, ids: array[int], tokens: array[int], logprobs: Logprobs) -> StepOutput:
        """Of a step in which each request got one token, and nothing else happened."""
        if ids is not self._ids:
            self._keep(ids)
        return StepOutput(self._id_bytes, self._ones, tokens.tobytes(), logprobs, ())

    def uneven(
        self,
        ids: array[int],
        columns: Sequence[array[int]],
        apart: Collection[int],
        told: dict[int, ToldTokens],
        logprobs: Logprobs,
        ends: Sequence[EndedRequest],
    ) -> StepOutput:
        """Of any step.

        Args:
            ids, columns: those that decode together, and their tokens, see StepResult.
            apart: places in them of requests that got what is in ``told``, or nothing.
            told: by request, also of others.
        """
        if ids is not self._ids:
            self._keep(ids)
        logprobs = {**logprobs, **{one: own.logprobs for one, own in told.items() if own.logprobs}}
        inside = {place: told.pop(ids[place], _NOTHING).tokens for place in apart}
        counts, tokens = _ragged(_with_own(columns, len(ids), inside))
        id_bytes = self._id_bytes
        if told:
            id_bytes += array("q", told).tobytes()
            counts += bytes(len(own.tokens) for own in told.values())
            tokens.extend(token for own in told.values() for token in own.tokens)
        return StepOutput(id_bytes, counts, tokens.tobytes(), logprobs, ends)

    def _keep(self, ids: array[int]) -> None:
        self._ids, self._id_bytes, self._ones = ids, ids.tobytes(), bytes([1]) * len(ids)


def _with_own(
    columns: Sequence[array[int]], size: int, inside: Mapping[int, Sequence[int]]
) -> list[array[int]]:
    """The columns, with these tokens in these places."""
    made = [column[:] for column in columns]
    for _ in range(len(made), max(map(len, inside.values()), default=0)):
        made.append(array("i", [_NO_TOKEN]) * size)
    for place, tokens in inside.items():
        for i, column in enumerate(made):
            column[place] = tokens[i] if i < len(tokens) else _NO_TOKEN
    return made


def _ragged(columns: Sequence[array[int]]) -> tuple[bytes, array[int]]:
    """How many tokens each place has, and all of them, place after place."""
    if len(columns) == 1:
        counts = bytes(map((0).__le__, columns[0]))
        return counts, array("i", compress(columns[0], counts))
    rows = [[token for token in row if token >= 0] for row in zip(*columns, strict=True)]
    return bytes(map(len, rows)), array("i", chain.from_iterable(rows))

"""Sequences to schedule, without anybody who reads their tokens."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence as Seq
from typing import Any

from photon_ext.runtime import Admission, RowParams, TokenLogprobs
from photon_ext.scheduling import Sequence

_ids = itertools.count(1)


class Sink:
    """A TokenSink that keeps nothing."""

    def __init__(self) -> None:
        self.id, self.cached_tokens = next(_ids), 0

    def add(self, tokens: Seq[int]) -> None: ...

    def add_logprobs(self, found: Seq[TokenLogprobs]) -> None: ...

    def add_prompt_logprobs(self, found: Seq[TokenLogprobs]) -> None: ...

    def attach(self, log: Seq[array[int]], column: int) -> None: ...

    def materialize(self) -> None: ...

    def tokens_from(self, begin: int) -> list[int]:
        return []


def make_sequence(prompt: int, new: int, **more: Any) -> Sequence:
    """A sequence of so many prompt tokens, and at most so many new ones; `more` are attributes."""
    admission = Admission(tuple(range(1, prompt + 1)), RowParams(max_new_tokens=new))
    return Sequence(admission, None, Sink(), **more)

"""Sequences to schedule, without anybody who reads their tokens."""

from typing import Any

from photon_ext.runtime import Admission, RowParams
from photon_ext.scheduling import Sequence


class Sink:
    """Where tokens would go."""

    cached_tokens = 0

    def settle(self) -> None:
        pass

    def snapshot(self, position: int) -> tuple[list[int], None]:
        return [], None


def make_sequence(prompt: int, new: int, **more: Any) -> Sequence:
    """A sequence of so many prompt tokens, and at most so many new ones; `more` are attributes."""
    admission = Admission(tuple(range(1, prompt + 1)), RowParams(max_new_tokens=new))
    return Sequence(admission, None, Sink(), **more)

"""Sequence: what its constraint hears, and whose verdict counts."""

import pytest

from photon_ext.runtime import Admission, FinishReason, RowParams
from photon_ext.sampling import Constraint, from_allowed_ids, from_callable
from photon_ext.scheduling import Sequence


def make(constraint: Constraint | None = None) -> Sequence:
    return Sequence(Admission((1, 2), RowParams(max_new_tokens=8)), constraint, object())


def test_a_constraint_does_not_hear_of_the_stop_token() -> None:
    """It may be one that the constraint has no state for."""
    heard: list[list[int]] = []
    sequence = make(from_callable(lambda tokens: [97], lambda tokens: bool(heard.append(tokens))))
    assert sequence.advance(97, None) is None
    assert sequence.advance(98, FinishReason.STOP) is FinishReason.STOP
    assert heard == [[97]]


@pytest.mark.parametrize("verdict", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_a_finished_constraint_counts_before_the_length_cap(verdict: FinishReason | None) -> None:
    assert make(from_allowed_ids([{97}])).advance(97, verdict) is FinishReason.STOP


def test_an_unfinished_constraint_leaves_the_verdict() -> None:
    sequence = make(from_allowed_ids([{97}, {97}, {97}]))
    assert sequence.advance(97, None) is None
    assert sequence.advance(97, FinishReason.LENGTH) is FinishReason.LENGTH


@pytest.mark.parametrize("verdict", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_without_a_constraint_the_verdict_is_the_devices(verdict: FinishReason | None) -> None:
    assert make().advance(97, verdict) is verdict

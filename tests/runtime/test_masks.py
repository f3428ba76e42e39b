"""Which words of masks a split step sends: those of rows that have a mask."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from photon_ext import _C
from photon_ext.layout import MASK_KEY_COLUMNS
from photon_ext.runtime import Pipeline, Row, RowParams, Runtime
from photon_ext.testing import SimRuntime, ToyForward
from tests.runtime.test_failure import VOCAB, Forward

ROWS = 32
WORD = 4
KEYS = ROWS * MASK_KEY_COLUMNS
MASK = -(-VOCAB // 32)
OPTIONS = {"vocab_size": VOCAB, "buckets": (ROWS,), "chunk": 2 * ROWS}
LIMITS = {"max_rows": ROWS, "max_len": 8, "depth": 1}


class WideForward(Forward):
    """For steps of as many tokens and segments as these have."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens, self.logits = torch.zeros(2 * ROWS, VOCAB), torch.zeros(ROWS, VOCAB)


class Sent:
    """The words that were copied to the device meanwhile."""

    words = 0


Sending = Callable[[], AbstractContextManager[Sent]]


def simulated() -> tuple[Pipeline, Sending]:
    runtime = SimRuntime(**LIMITS)  # type: ignore[arg-type]

    @contextmanager
    def sent() -> Iterator[Sent]:
        found, before = Sent(), (runtime.stats.copies_in, runtime.stats.bytes_in)
        yield found
        assert runtime.stats.copies_in == before[0] + 1
        found.words = (runtime.stats.bytes_in - before[1]) // WORD

    return Pipeline(runtime, ToyForward(runtime, VOCAB), **OPTIONS), sent  # type: ignore[arg-type]


def on_host() -> tuple[Pipeline, Sending]:
    runtime = Runtime(device="cpu", **LIMITS)  # type: ignore[arg-type]

    @contextmanager
    def sent() -> Iterator[Sent]:
        found = Sent()
        runtime.streams.synchronize()  # or the trace has the step's own input as well
        _C.start_host_trace(1000)
        try:
            yield found
            runtime.streams.synchronize()
        finally:
            records, dropped = _C.stop_host_trace()
        sizes = [
            size
            for work, _, stream, _, _, size, _ in records
            if work == "copy" and stream == runtime.streams.in_copy.id
        ]
        assert len(sizes) == 1
        assert dropped == 0
        found.words = sizes[0] // WORD

    return Pipeline(runtime, WideForward(), **OPTIONS), sent  # type: ignore[arg-type]


BACKENDS = pytest.mark.parametrize("make", [simulated, on_host], ids=lambda make: make.__name__)


def at_a_decode_step(pipeline: Pipeline, constrained: int) -> list[Row]:
    """Admits 32 rows, prefills them, and launches their first decode step."""
    rows = [
        pipeline.admit([1 + i % 3], RowParams(4, constrained=i >= ROWS - constrained))
        for i in range(ROWS)
    ]
    pipeline.tick(allow_all)
    assert pipeline.launch() is not None
    return rows


def allow_all(row: Row, words: memoryview) -> None:
    words[:] = array("i", [-1] * len(words))


@BACKENDS
@pytest.mark.parametrize("constrained", [1, 3])
def test_a_split_step_sends_the_masks_of_its_constrained_rows_alone(
    make: Callable[[], tuple[Pipeline, Sending]], constrained: int
) -> None:
    """And the keys of all, which tell that the others have none."""
    pipeline, sent = make()
    rows = at_a_decode_step(pipeline, constrained)
    with sent() as found:
        pipeline.finalize(allow_all)
    assert found.words == KEYS + constrained * MASK
    result = pipeline.commit()
    assert [event.row for event in result if event.error is None] == rows


@BACKENDS
def test_masks_that_an_interrupt_cut_short_are_sent_once(
    make: Callable[[], tuple[Pipeline, Sending]],
) -> None:
    """The second call writes them all again, each in its place."""
    pipeline, sent = make()
    rows = at_a_decode_step(pipeline, ROWS)
    asked: list[Row] = []

    def interrupted(row: Row, words: memoryview) -> None:
        asked.append(row)
        if len(asked) == 20:
            raise KeyboardInterrupt

    def only(row: Row, words: memoryview) -> None:
        words[0] = 1 << row.index % 7

    with pytest.raises(KeyboardInterrupt):
        pipeline.finalize(interrupted)
    with sent() as found:
        pipeline.finalize(only)
    assert found.words == KEYS + ROWS * MASK
    assert [token for event in pipeline.commit() for token in event.tokens] == [
        row.index % 7 for row in rows
    ]


@BACKENDS
def test_who_prepares_masks_hears_once_of_all_rows_that_get_one(
    make: Callable[[], tuple[Pipeline, Sending]],
) -> None:
    pipeline, _ = make()
    rows = at_a_decode_step(pipeline, 5)
    pipeline.abort(rows[-2])
    calls: list[object] = []

    def fill(row: Row, words: memoryview) -> None:
        calls.append(row)
        allow_all(row, words)

    pipeline.finalize(fill, lambda waiting: calls.append(list(waiting)))
    constrained = [row for row in rows if row.params.constrained and row.delivers]
    assert len(constrained) == 4
    assert calls == [constrained, *constrained]
    pipeline.finalize(fill, calls.append)  # there is nothing left to finalize
    assert len(calls) == 5
    assert len(pipeline.commit()) == ROWS - 1

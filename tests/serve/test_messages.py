"""Frames between processes."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from photon_ext.serve.messages import (
    MOST_BYTES,
    UP,
    BlockingFrames,
    Call,
    Cancel,
    FrameReader,
    PackedScores,
    Seen,
    Submit,
    frame,
)

PARAMS: dict[str, Any] = {
    "seed": 2**64 - 1,
    "logit_bias": {7: -1.5},
    "json_schema": {"type": "object", "x": [None, "\u2028", "😀"]},
    "stop_token_ids": [1, 2],
}


def test_hazard_b9_frames_may_be_cut_anywhere() -> None:
    """And a large one does not change those beside it."""
    sent = [
        Submit(1, b"\1\0\0\0" * 50_000, PARAMS, 2, -3, 1.5, "salt", None),
        Cancel([1, 2]),
        Seen(2**40),
        Call(3, "load_adapter", ["a", "b"]),
    ]
    data = b"".join(map(frame, sent))
    for seed in range(20):
        cut, reader, found = random.Random(seed), FrameReader(UP), []
        begin = 0
        while begin < len(data):
            end = begin + cut.choice([1, 3, 100, 70_000, 300_000])
            found += reader.feed(data[begin:end])
            begin = end
        assert found == sent


@pytest.mark.parametrize(
    "data",
    [(MOST_BYTES + 1).to_bytes(4, "little"), b"\1\0\0\0\xc1", b"\2\0\0\0\x91\xa0", bytes(4)],
)
def test_what_is_no_frame_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        list(FrameReader(UP).feed(data))


def test_a_blocking_reader_waits_and_hears_of_the_end() -> None:
    ours, theirs = socket.socketpair()
    frames = BlockingFrames(ours, UP)
    with pytest.raises(TimeoutError):
        frames.receive(0.01)
    theirs.sendall(frame(Seen(1)) + frame(Seen(2)))
    assert not frames.ended
    assert [frames.receive(1).beat, frames.receive(1).beat] == [1, 2]
    assert not frames.ended
    theirs.close()
    assert frames.ended
    with pytest.raises(EOFError):
        frames.receive(1)
    ours.close()


def test_scores_are_the_same_packed() -> None:
    class One:
        def __init__(self, sampled: float, *top: tuple[int, float]) -> None:
            self.sampled, self.top = sampled, top

    scored = [One(-0.5, (3, -0.25), (4, -float("inf"))), One(-1.0), One(-2.0, (2**31 - 1, 0.0))]
    found = list(PackedScores.of(scored).unpack())
    assert [(one.logprob, tuple(one.top)) for one in found] == [
        (one.sampled, one.top) for one in scored
    ]

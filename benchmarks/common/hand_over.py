"""Tokens on their way to another process, as a server would have them. Nothing heavy is imported
here: the other process imports it, too.
"""

from __future__ import annotations

import multiprocessing
import pickle
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_ext import Engine, StepOutput


def hand_over(engine: Engine) -> Callable[[], int]:
    """Sends each step's tokens to another process; what is returned waits for it to have all, and
    tells how many there were.
    """
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)  # one way: a pipe is cheaper than a socket
    answers, told = spawn.Pipe(duplex=False)
    consumer = spawn.Process(target=_consume, args=(theirs, told))
    consumer.start()
    assert answers.recv() == "ready"

    def send(output: StepOutput) -> None:
        message = tuple(output)  # so that the other process needs no class of ours
        ours.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    engine.listen(send)

    def finish() -> int:
        ours.send(None)
        count = answers.recv()
        consumer.join()
        return int(count)

    return finish


def _consume(pipe: Connection, told: Connection) -> None:
    """The other process: takes each token to its request."""
    answers: dict[int, list[int]] = {}
    told.send("ready")
    while (message := pipe.recv()) is not None:
        ids, counts, tokens, _logprobs, _ends = message
        begin, tokens = 0, array("i", tokens)
        for request, count in zip(array("q", ids), counts, strict=True):
            answers.setdefault(request, []).extend(tokens[begin : begin + count])
            begin += count
    told.send(sum(map(len, answers.values())))

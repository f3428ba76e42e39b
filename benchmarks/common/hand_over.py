"""Tokens on their way to another process, as a server would have them. Nothing heavy is imported
here: the other process imports it, too.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_ext import Engine, Request, StepOutput


def hand_over(engine: Engine) -> Callable[[], int]:
    """Sends each step's tokens to another process; what is returned waits for it to have all, and
    tells how many there were.
    """
    from photon_ext.runtime.decode_batch import changed_columns

    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)  # one way: a pipe is cheaper than a socket
    answers, told = spawn.Pipe(duplex=False)
    consumer = spawn.Process(target=_consume, args=(theirs, told))
    consumer.start()
    assert answers.recv() == "ready"
    names: dict[Request, int] = {}
    before: list[tuple[Request, ...]] = [()]  # the requests that decoded together

    def name(request: Request) -> int:
        return names.setdefault(request, len(names))

    def send(output: StepOutput) -> None:
        requests, old = output.requests, before[0]
        joined: list[tuple[int, int]] = []
        if requests is not old:
            before[0] = requests
            joined = [(column, name(requests[column])) for column in changed_columns(old, requests)]
        first = [(name(request), token) for request, token in output.first]
        message = joined, len(requests), output.tokens, first, len(output.ended)
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
    columns: list[list[int]] = []
    told.send("ready")
    while (message := pipe.recv()) is not None:
        joined, size, tokens, first, _ended = message
        del columns[size:]
        for column, name in joined:
            columns[column : column + 1] = [answers.setdefault(name, [])]
        for answer, token in zip(columns, tokens, strict=False):
            if token >= 0:
                answer.append(token)
        for name, token in first:
            answers.setdefault(name, []).append(token)
    told.send(sum(map(len, answers.values())))

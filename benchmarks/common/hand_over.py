"""Tokens on their way to another process, as a server would have them. Nothing heavy is imported
here: the other process imports it, too.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from photon_ext import Engine, StepOutput


def hand_over(engine: Engine) -> Callable[[], int]:
    """Sends each step's tokens to another process; what is returned waits for it to have all, and
    tells how many there were.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    consumer = multiprocessing.get_context("spawn").Process(target=_consume, args=(theirs,))
    consumer.start()
    assert ours.recv() == "ready"
    names: dict[int, int] = {}
    sent: list[tuple[Any, ...]] = []  # of the requests that decode together

    def send(output: StepOutput) -> None:
        requests = output.requests
        joined: list[int] | None = None
        if not sent or sent[-1] is not requests:
            sent[:] = [requests]
            joined = [names.setdefault(id(request), len(names)) for request in requests]
        first = [
            (names.setdefault(id(request), len(names)), token) for request, token in output.first
        ]
        ours.send((joined, output.tokens, first, len(output.ended)))

    engine.listen(send)

    def finish() -> int:
        ours.send(None)
        count = ours.recv()
        consumer.join()
        return int(count)

    return finish


def _consume(pipe: Connection) -> None:
    """The other process: takes each token to its request."""
    answers: dict[int, list[int]] = {}
    columns: list[list[int]] = []
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        joined, tokens, first, _ended = message
        if joined is not None:
            columns = [answers.setdefault(name, []) for name in joined]
        for answer, token in zip(columns, tokens, strict=False):
            if token >= 0:
                answer.append(token)
        for name, token in first:
            answers.setdefault(name, []).append(token)
    pipe.send(sum(map(len, answers.values())))

"""A client process: `python -m photon_ext.bench.worker`. It reads what to ask from stdin, a line of
JSON, connects and says so, reads when to begin, and says what came of its requests.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import uvloop

from photon_ext.bench.asks import Ask, Endpoint
from photon_ext.bench.connection import Answer, Connection

_PROGRESS_S = 0.5


class Worker:
    """A process's share of the requests.

    `streams`: so many run at any time, each followed by the next one of `asks`; 0: each is sent
    when it is due, whatever runs.
    """

    def __init__(
        self, endpoint: Endpoint, asks: Sequence[Ask], streams: int, timeout_s: float
    ) -> None:
        self.ended = 0
        self._endpoint, self._asks, self._streams = endpoint, asks, streams
        self._timeout_s = timeout_s
        self._idle = [Connection(endpoint, timeout_s) for _ in range(streams)]

    async def connect(self) -> None:
        """Where it cannot, the requests say so."""
        await asyncio.gather(*(one.open() for one in self._idle), return_exceptions=True)

    async def run(self, begin: float) -> list[Answer]:
        """All of them, from `begin` (of `time.perf_counter`) on."""
        await asyncio.sleep(begin - time.perf_counter())
        if not self._streams:
            return await asyncio.gather(*(self._clocked(ask, begin) for ask in self._asks))
        left = iter(self._asks)
        streams = (self._stream(left) for _ in range(self._streams))
        return [answer for found in await asyncio.gather(*streams) for answer in found]

    async def _stream(self, left: Iterator[Ask]) -> list[Answer]:
        return [await self._ask(ask, time.perf_counter()) for ask in left]

    async def _clocked(self, ask: Ask, begin: float) -> Answer:
        due = begin + ask.due_s
        await asyncio.sleep(due - time.perf_counter())
        return await self._ask(ask, due)

    async def _ask(self, ask: Ask, due: float) -> Answer:
        connection = self._connection()
        answer = await connection.ask(ask, due)
        self.ended += 1
        self._idle.append(connection)
        return answer

    def _connection(self) -> Connection:
        """One that is idle, or else a new one."""
        while self._idle:
            if (found := self._idle.pop()).usable:
                return found
            found.close()
        return Connection(self._endpoint, self._timeout_s)


async def _run(task: dict[str, Any], begins: TextIO) -> None:
    asks = [Ask(*one) for one in task["asks"]]
    worker = Worker(Endpoint(*task["endpoint"]), asks, task["streams"], task["timeout_s"])
    await worker.connect()
    _say({"ready": True})
    begin = json.loads(await asyncio.to_thread(begins.readline))
    threading.Thread(target=_end_with, args=(begins,), daemon=True).start()
    gc.collect()
    gc.freeze()  # prompts are not looked through while it is measured
    saying = asyncio.ensure_future(_progress(worker))
    busy = time.process_time()
    answers = await worker.run(begin)
    busy = (time.process_time() - busy) / max(time.perf_counter() - begin, 1e-9)
    saying.cancel()
    told = [{**asdict(one), "times": one.times.tolist()} for one in answers]
    _say({"busy": busy, "answers": told})


async def _progress(worker: Worker) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        _say({"ended": worker.ended})


def _end_with(parent: TextIO) -> None:
    """Nobody is left to ask for, once it has ended."""
    parent.read()
    os._exit(1)


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    uvloop.run(_run(json.loads(sys.stdin.readline()), sys.stdin))

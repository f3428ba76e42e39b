"""Runs of traffic: the requests are dealt out to client processes, and their answers gathered."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from photon_ext.bench.asks import Ask, Endpoint
from photon_ext.bench.connection import Answer
from photon_ext.errors import PhotonError

_LEAD_S = 0.05  # from when all clients are told to begin until they do
_LINE = 1 << 30  # bytes that a client says at once


class Outcome(NamedTuple):
    """What came of a run: the answers, when it began, and the share of the time for which the
    busiest client process computed.
    """

    answers: list[Answer]
    begin: float
    busy: float


class ClientLost(PhotonError):
    """A client process has ended before its time."""


class Clients:
    """Client processes, started anew for each run: none inherits what another has seen."""

    def __init__(self, endpoint: Endpoint, processes: int, timeout_s: float) -> None:
        """`processes`: at most, since none is without a stream. `timeout_s`: of an answer."""
        self._endpoint, self._processes, self._timeout_s = endpoint, processes, timeout_s

    def run(self, asks: Sequence[Ask], streams: int, progress: Callable[[int], None]) -> Outcome:
        """Asks all of them, and waits for their answers.

        `streams`: so many run at any time; 0: each is sent when it is due. `progress`: called now
        and then with how many have ended. Raises ClientLost.
        """
        return asyncio.run(self._run(asks, streams, progress))

    async def _run(
        self, asks: Sequence[Ask], streams: int, progress: Callable[[int], None]
    ) -> Outcome:
        count = max(1, min(self._processes, streams or len(asks), len(asks)))
        tasks = [
            {
                "endpoint": self._endpoint,
                "asks": asks[i::count],
                "streams": len(range(i, streams, count)),
                "timeout_s": self._timeout_s,
            }
            for i in range(count)
        ]
        clients = await asyncio.gather(*map(_Client.start, tasks))
        try:
            for client in clients:
                await client.heard("ready")
            begin = time.perf_counter() + _LEAD_S
            ended = Counter[_Client]()

            def heard(client: _Client, number: int) -> None:
                ended[client] = number
                progress(ended.total())

            runs = (client.run(begin, partial(heard, client)) for client in clients)
            found = await asyncio.gather(*runs)
        finally:
            await asyncio.gather(*(client.end() for client in clients))
        told = (answer for one in found for answer in one["answers"])
        answers = [Answer(**{**one, "times": array("d", one["times"])}) for one in told]
        return Outcome(answers, begin, max(one["busy"] for one in found))


class _Client:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, task: dict[str, Any]) -> _Client:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "photon_ext.bench.worker", stdin=pipe, stdout=pipe, limit=_LINE
        )
        client = cls(process)
        await client._tell(task)
        return client

    async def run(self, begin: float, progress: Callable[[int], None]) -> dict[str, Any]:
        await self._tell(begin)
        while "answers" not in (said := await self.heard()):
            progress(said["ended"])
        return said

    async def heard(self, name: str = "") -> dict[str, Any]:
        """The next that it says, which has this name."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ClientLost(f"a client process has ended, exit code {await self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        assert not name or name in said
        return said

    async def _tell(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        await self._process.stdin.drain()

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

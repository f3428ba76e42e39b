"""Run: the answers to all prompts of a request, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from photon_ext.serve.contract import Ask, Client, Delta, Generation

Numbered = list[tuple[int, Delta]]


class Run:
    """Asks of one request. Its answers are numbered through: those to the first prompt, then those
    to the second. What has not ended is cancelled where the `async with` is left.
    """

    def __init__(self, generations: Sequence[Generation], answers: int) -> None:
        """`answers`: to each prompt."""
        self._generations = generations
        self._answers = answers

    @classmethod
    async def start(cls, client: Client, asks: Sequence[Ask]) -> Run:
        """Waits until the engine has accepted all; where it refuses one, none runs. Raises as
        Client.generate.
        """
        if len(asks) == 1:
            return cls([await client.generate(asks[0])], asks[0].n)
        tasks = [asyncio.ensure_future(client.generate(ask)) for ask in asks]
        try:
            return cls(await asyncio.gather(*tasks), asks[0].n)
        except BaseException:
            for task in tasks:
                task.cancel()
            for started in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(started, BaseException):
                    started.cancel()
            raise

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *error: object) -> None:
        for generation in self._generations:
            with suppress(Exception):  # the first error is told, and the others have to end, too
                await generation.__aexit__(*error)

    def stop(self, answer: int) -> None:
        """One answer was cut at its stop; nothing more comes of it."""
        self._generations[answer // self._answers].cancel(answer % self._answers, over=True)

    async def deltas(self) -> AsyncGenerator[Numbered, None]:
        """What has come of any answer since the last look. Raises EngineGone."""
        if len(self._generations) == 1:
            async for deltas in self._generations[0]:
                yield [(delta.index, delta) for delta in deltas]
            return
        async with aclosing(self._merged()) as merged:
            async for found in merged:
                yield found

    async def _merged(self) -> AsyncGenerator[Numbered, None]:
        """Each generation is read by a task of its own. What waits here is bounded by the answers'
        lengths.
        """
        waiting: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()

        async def read(place: int, generation: Generation) -> None:
            try:
                async for deltas in generation:
                    first = place * self._answers
                    waiting.put_nowait([(first + delta.index, delta) for delta in deltas])
                waiting.put_nowait(None)
            except Exception as error:
                waiting.put_nowait(error)

        readers = [asyncio.ensure_future(read(*each)) for each in enumerate(self._generations)]
        try:
            left = len(readers)
            while left:
                found = await waiting.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for reader in readers:
                reader.cancel()

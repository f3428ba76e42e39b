"""Asking: what tests ask of a client, be it a blocking or an async one."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


class Asking:
    """A client, blocking or async; whoever asks does not see which.

    Attributes:
        client: it.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._loop = asyncio.new_event_loop()

    def one(self, found: Any) -> Any:
        """An answer."""
        return self._loop.run_until_complete(found) if inspect.isawaitable(found) else found

    def all(self, found: Any) -> list[Any]:
        """What a stream, or a list in pages, has."""

        async def collected(stream: Any) -> list[Any]:
            return [each async for each in stream]

        found = found if hasattr(found, "__aiter__") else self.one(found)
        return self.one(collected(found)) if hasattr(found, "__aiter__") else [*found]

    def helped(self, manager: Any, final: str) -> tuple[list[Any], Any]:
        """The events of a helper for streams, and what its method `final` makes of them."""

        async def collected() -> tuple[list[Any], Any]:
            async with manager as stream:
                events = [each async for each in stream]
                return events, await getattr(stream, final)()

        if hasattr(manager, "__aenter__"):
            return self.one(collected())
        with manager as stream:
            return [*stream], getattr(stream, final)()

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *error: object) -> None:
        self.one(self.client.close())
        self._loop.close()

"""A server that answers each request with bytes that a test gives."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reply = list[bytes | float | None]  # what is sent, seconds to wait, None: hang up
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


def event(value: Any) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def text_event(text: str) -> str:
    return event({"choices": [{"index": 0, "text": text}]})


def usage(tokens: int) -> str:
    used = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
    return event({"choices": [], "usage": used})


END = b"0\r\n\r\n"


def streamed(*events: str, tokens: int) -> Reply:
    """Each event in a chunk of its own, then the usage."""
    return [OK, *map(chunk, (*events, usage(tokens), event("[DONE]"))), END]


def refused(status: str, body: str, headers: str = "") -> Reply:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}"
    return [head.encode()]


@contextmanager
def serving(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[str]:
    """Its URL. `reply` gets a request's body."""
    loop = asyncio.new_event_loop()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                told = reply(json.loads(await reader.readexactly(length)))
                for part in told:
                    if part is None:
                        raise ConnectionError
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    else:
                        await asyncio.sleep(part)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(talk, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

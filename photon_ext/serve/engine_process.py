"""The engine's process: the engine thread, a thread for its clients, and one for forms of answers.
The main thread listens to the parent.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from photon_ext.errors import PhotonError, describe
from photon_ext.serve.child import become_child
from photon_ext.serve.messages import (
    TO_CHILD,
    Compiler,
    CompilerHangs,
    Failed,
    FrameReader,
    Link,
    Ready,
    Start,
    frame,
)

if TYPE_CHECKING:
    from photon_ext.engine import Engine
    from photon_ext.serve.contract import ModelCard

# A thread that computes gives the interpreter back after this long: a step would wait for it.
SWITCH_S = 0.0005
_RECEIVED, _MOST_DESCRIPTORS = 2**16, 8


def main() -> None:
    channel = become_child()
    logging.basicConfig(format="photon-ext engine: %(message)s")
    orders = Orders(channel)
    start = next(orders, None)
    if start is None:
        return
    assert isinstance(start[0], Start)
    try:
        _serve(channel, orders, start[0].settings)
    except (PhotonError, MemoryError, ImportError) as error:
        told = str(error) if isinstance(error, PhotonError) else describe(error)
        _fail(channel, told)


def _serve(channel: socket.socket, orders: Orders, told: dict[str, Any]) -> None:
    from photon_ext.serve.form_desk import FormDesk
    from photon_ext.serve.hub import Hub

    engine, card = open_engine(told["model"], told["options"], told["adapters"])
    sys.setswitchinterval(SWITCH_S)
    forms = FormDesk(
        engine.compiler,
        form_settings(engine, card, told),
        partial(tell_parent, channel, CompilerHangs()),
        told["form_seconds"],
    )
    hub = Hub(engine, card, forms)
    hub.beats = partial(tell_parent, channel)
    hub.crashed = partial(_fail, channel)
    hub.start()
    tell_parent(channel, Ready(asdict(card)))
    for order, sock in orders:
        if isinstance(order, Link) and sock is not None:
            hub.connect(sock)
        elif isinstance(order, Compiler) and sock is not None:
            forms.connect(sock)
    hub.close()  # the parent wants an end, or has ended
    engine.close()
    os._exit(0)  # nothing of torch has to be put away


def _fail(channel: socket.socket, why: str) -> None:
    """Ends the process at once: what was sent is read by who is at the other end."""
    tell_parent(channel, Failed(why))
    os._exit(1)


def open_engine(
    model: str, options: Mapping[str, Any], adapters: Mapping[str, str]
) -> tuple[Engine, ModelCard]:
    """Loads the model; says what it is. Raises PhotonError."""
    import photon_ext
    import photon_ext._library
    from photon_ext.engine import Engine
    from photon_ext.models.loading.model_files import resolve_model
    from photon_ext.serve.contract import ModelCard

    path = resolve_model(model)
    engine = Engine.from_pretrained(model, **options)
    for name, folder in adapters.items():
        engine.load_lora(name, folder)
    card = ModelCard(
        model=str(model),
        path=str(path),
        max_len=engine.max_len,
        vocab_size=engine.vocab_size,
        eos_ids=engine.eos_ids,
        device=engine.device,
        max_rows=engine.max_rows,
        max_waiting=engine.max_waiting,
        adapters=engine.adapters,
        version=photon_ext.__version__,
    )
    return engine, card


def form_settings(engine: Engine, card: ModelCard, told: Mapping[str, Any]) -> Start:
    """What a compiler of forms is told first."""
    return Start(
        {
            "path": card.path,
            "vocab_size": card.vocab_size,
            "eos_ids": card.eos_ids,
            "automaton_words": engine.compiler.automaton_words,
            "automata_dir": told["options"].get("automata_dir"),
            "memory_bytes": told["form_bytes"],
        }
    )


def tell_parent(channel: socket.socket, message: Any) -> None:
    """Never waits: a parent that does not read for long misses what is told it."""
    data = frame(message)
    with suppress(OSError):
        sent = channel.send(data, socket.MSG_DONTWAIT)
        if sent < len(data):
            channel.sendall(data[sent:])


class Orders(Iterator["tuple[Any, socket.socket | None]"]):
    """What the parent sends, each with the socket that came beside it; ends with the parent."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = FrameReader(TO_CHILD)
        self._messages: deque[Any] = deque()
        self._sockets: deque[socket.socket] = deque()

    def __next__(self) -> tuple[Any, socket.socket | None]:
        while not self._messages:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._channel, _RECEIVED, _MOST_DESCRIPTORS
                )
            except OSError:
                data, descriptors = b"", []
            if not data:
                raise StopIteration
            self._sockets.extend(socket.socket(fileno=one) for one in descriptors)
            self._messages.extend(self._reader.feed(data))
        message = self._messages.popleft()
        carries = isinstance(message, Link | Compiler)
        return message, self._sockets.popleft() if carries else None


if __name__ == "__main__":
    main()

"""Where the engine of an EngineClient lives: in processes of its own, or in this one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from photon_ext.serve.settings import EngineSettings
from photon_ext.serve.supervisor import Supervisor


class Home(Protocol):
    """Belongs to one client."""

    def client_socket(self) -> socket.socket:
        """The client's end of its channel."""

    def why(self) -> str:
        """Why there is no engine any more; "": there is, or nothing more is known."""

    def close(self) -> None:
        """Ends the engine; waits for it."""


class ProcessHome:
    """The engine and its compiler of forms, under a supervisor that is a thread of this process."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._supervisor = Supervisor(EngineSettings(model, dict(options)))
        self._socket = self._supervisor.link()
        # children end with the thread that has started them
        self._thread = threading.Thread(
            target=self._supervisor.run, name="photon-supervisor", daemon=True
        )
        self._thread.start()

    def client_socket(self) -> socket.socket:
        return self._socket

    def why(self) -> str:
        self._thread.join(2.0)  # it learns of the end as the client does
        return self._supervisor.why

    def close(self) -> None:
        self._supervisor.stop()
        self._thread.join()


class LocalHome:
    """The engine in this process, which the client talks to as if it were not."""

    def __init__(
        self, model: str, options: Mapping[str, Any], adapters: Mapping[str, str] | None = None
    ) -> None:
        from photon_ext.serve.engine_process import open_engine
        from photon_ext.serve.hub import Hub

        self.engine, self.card = open_engine(model, options, adapters or {})
        self.hub = Hub(self.engine, self.card, None)
        self.hub.crashed = self._crash
        self._theirs: list[socket.socket] = []
        self._why = ""
        self.hub.start()

    def client_socket(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._theirs.append(theirs)
        self.hub.connect(theirs)
        return ours

    def why(self) -> str:
        return self._why

    def _crash(self, why: str) -> None:
        """Clients learn of it as of a process that has ended."""
        self._why = why
        for sock in self._theirs:
            with suppress(OSError):  # it is closed
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hub.close()
        self.engine.close()

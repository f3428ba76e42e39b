"""Supervisor: what it does in moments that no test of processes meets by chance."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest

from photon_ext.serve import supervisor as module
from photon_ext.serve.messages import Beat
from photon_ext.serve.settings import EngineSettings, HttpSettings, ServeSettings
from photon_ext.serve.supervisor import State, Supervisor


class EndedChild:
    """As supervisor.Child, of a process that has ended."""

    def __init__(self) -> None:
        self.channel, self.theirs = socket.socketpair()
        self.pidfd, self._write = os.pipe()
        self.signals: list[int] = []

    def wait(self, seconds: float) -> bool:
        return True

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def close(self) -> None:
        for fd in (self.pidfd, self._write):
            os.close(fd)
        self.channel.close()
        self.theirs.close()


def test_an_end_that_is_seen_before_the_last_words_are_is_no_fault() -> None:
    """Both were ready in one look: the closed channel was looked for among those that are open."""
    supervisor, child, ended = Supervisor(EngineSettings("model")), EndedChild(), list[bool]()
    made: Any = child
    supervisor._watch(made, lambda message: None, lambda: ended.append(True))
    files = supervisor._selector.get_map()
    receive, end = files[child.channel].data, files[child.pidfd].data
    end()
    receive()
    assert ended == [True]


def test_who_starts_while_others_drain_is_told_again() -> None:
    with socket.socket() as listening:
        settings = ServeSettings("model", "path", ("model",))
        supervisor = Supervisor(EngineSettings("model"), HttpSettings(settings, listening))
        child: Any = EndedChild()
        supervisor._workers[0].child = child
        supervisor._state, supervisor._beat = State.DRAINING, Beat(1, 1, 0, 0.0)
        now = time.monotonic()
        for passed_s in (0.0, 0.5, 1.0):
            supervisor._drain(now + passed_s)
        assert child.signals == [signal.SIGTERM] * 2
        child.close()


def test_a_client_hears_of_an_engine_that_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its channel stayed open, and nobody was at the other end."""

    def fails(*arguments: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(module, "Child", fails)
    supervisor = Supervisor(EngineSettings("model"))
    with supervisor.link() as client:
        client.settimeout(5.0)
        with pytest.raises(OSError, match="planted"):
            supervisor.run()
        assert client.recv(1) == b""


def test_a_process_that_cannot_be_started_again_is_tried_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the system has no memory or descriptor left for it, the others go on."""
    tried = []

    def fails(name: str, *arguments: object) -> None:
        tried.append(name)
        raise BlockingIOError("planted")

    monkeypatch.setattr(module, "Child", fails)
    with socket.socket() as listening:
        settings = ServeSettings("model", "path", ("model",))
        supervisor = Supervisor(EngineSettings("model"), HttpSettings(settings, listening))
        engine: Any = EndedChild()
        supervisor._engine, supervisor._state = engine, State.SERVING
        worker, now = supervisor._workers[0], time.monotonic()
        worker.due = supervisor._compiler_due = now
        for passed_s in (0.0, 0.5, 1.5):
            supervisor._tick(now + passed_s, 0.25)
        assert tried == [worker.child_name, "compiler of forms"] * 2
        engine.close()

"""A child process of the server: how it is started, and what it does first."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Child:
    """A Python process that runs one module of this folder.

    Attributes:
        name: for the log.
        pid: the process.
        pidfd: readable once it has ended.
        channel: its parent's end of a socketpair; the child ends where this is closed.
    """

    def __init__(self, name: str, module: str, descriptors: Sequence[socket.socket] = ()) -> None:
        """`descriptors`: further sockets that the child gets (`inherited`), copies of these."""
        self.name = name
        self.channel, theirs = socket.socketpair()
        given = [theirs.fileno(), *(one.fileno() for one in descriptors)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), *map(str, given)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=given,
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def code(self) -> int | None:
        """Its exit code, negative: the signal that ended it; None: it runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def close(self) -> None:
        """Lets go of what belongs to a process that has ended."""
        self.channel.close()
        os.close(self.pidfd)


def _environment() -> dict[str, str]:
    """With this package to be found, and what happens to lie in the working directory not."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def become_child() -> socket.socket:
    """What a child does first; returns its end of the channel to its parent. Signals that a
    terminal, or who looks after services, sends to all processes are its parent's affair. The child
    ends with the thread that started it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it has ended already
        os._exit(1)
    return socket.socket(fileno=int(sys.argv[2]))


def inherited(index: int) -> socket.socket:
    """One of the further sockets that this child got."""
    return socket.socket(fileno=int(sys.argv[3 + index]))


def end_with(channel: socket.socket) -> None:
    """Ends this process when the other side of the channel is closed; for channels on which
    nothing comes.
    """

    def watch() -> None:
        with suppress(OSError):
            while channel.recv(1):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="photon-parent", daemon=True).start()

"""WakePipe: who waits is woken, once for any number of calls, and a closed one is left alone."""

from __future__ import annotations

import os
import selectors
import threading

import pytest

from photon_ext.serve.wake_pipe import WakePipe


def test_a_thread_that_waits_is_woken() -> None:
    pipe = WakePipe()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        assert selector.select(0) == []
        threading.Timer(0.05, pipe.wake).start()
        assert len(selector.select(10)) == 1
        for _ in range(100_000):  # more than the pipe holds
            pipe.wake()
        pipe.drain()
        assert selector.select(0) == []
    pipe.close()


def test_a_closed_pipe_writes_to_nobody_elses_descriptor() -> None:
    pipe = WakePipe()
    pipe.close()
    reads, writes = os.pipe()  # they have the numbers of those that were closed
    try:
        assert pipe.fileno() == reads
        os.set_blocking(reads, False)
        pipe.wake()
        pipe.close()
        with pytest.raises(BlockingIOError):
            os.read(reads, 1)
    finally:
        os.close(reads)
        os.close(writes)

"""Kernels for CPU streams, compiled once per session, and the backends that tests of common
behaviour run on.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from photon_ext import _C

CPU_BACKENDS = ("host", "inline")


class Kernels:
    """The functions of kernels.cpp, enqueued by name."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._library = ctypes.CDLL(self.path)

    def address(self, name: str) -> int:
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        assert address
        return address

    def sleep(self, stream: _C.Stream, microseconds: int) -> None:
        stream.enqueue(self.address("sleep_us"), struct.pack("q", microseconds))

    def multiply_add(self, stream: _C.Stream, cell: torch.Tensor, factor: int, term: int) -> None:
        """cell[0] = cell[0] * factor + term."""
        stream.enqueue(
            self.address("multiply_add"), struct.pack("Pii", cell.data_ptr(), factor, term)
        )

    def wait_for_flag(self, stream: _C.Stream, flag: torch.Tensor) -> None:
        stream.enqueue(self.address("wait_for_flag"), struct.pack("P", flag.data_ptr()))

    def hold(self, stream: _C.Stream, flag: torch.Tensor) -> None:
        """As ``wait_for_flag``; returns once the stream is at it."""
        runs = torch.zeros(1, dtype=torch.int32)
        stream.enqueue(self.address("hold"), struct.pack("PP", runs.data_ptr(), flag.data_ptr()))
        while not runs.item():
            time.sleep(1e-3)

    def fail(self, stream: _C.Stream, name: str = "fail_std") -> None:
        stream.enqueue(self.address(name), b"")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = Path(__file__).with_name("kernels.cpp")
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-pthread",
            str(source),
            "-o",
            str(library),
        ],
        check=True,
    )
    return Kernels(library)


@pytest.fixture(params=CPU_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stream(backend: str) -> _C.Stream:
    return _C.Stream.create(backend)


@pytest.fixture
def flag() -> Iterator[torch.Tensor]:
    """What ``Kernels.wait_for_flag`` waits for.

    Raised at the end, so that a failing test fails instead of hanging in a destructor.
    """
    flag = torch.zeros(1, dtype=torch.int32)
    yield flag
    flag.fill_(1)

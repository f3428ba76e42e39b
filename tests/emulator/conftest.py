"""The emulator, built once per session by setup.py, as a process would use it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.conftest import ROOT

SEEDS = range(6)  # 0: round robin; the others: random orders


class EmulatorError(Exception):
    """What cudaGetErrorString says about a launch of a test's kernel."""


class Emulator:
    """The functions of kernels.cu: tensors and integers in, an exception where the launch
    failed.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.message.restype = ctypes.c_char_p
        self._library.photon_emulator_set_seed.argtypes = [ctypes.c_uint64]

    def launch(self, name: str, *arguments: Tensor | int, seed: int = 0) -> None:
        self._library.photon_emulator_set_seed(seed)
        function: Callable[..., int] = getattr(self._library, name)
        error = function(
            *[
                ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int64(x)
                for x in arguments
            ]
        )
        if error:
            raise EmulatorError(self._library.message(error).decode())

    def failures(self, name: str, *arguments: Tensor | int) -> list[str]:
        """What each seed's launch failed with; "" where it did not."""
        messages = []
        for seed in SEEDS:
            try:
                self.launch(name, *arguments, seed=seed)
                messages.append("")
            except EmulatorError as error:
                messages.append(str(error))
        return messages

    def attribute(self, which: int) -> int:
        return int(self._library.attribute(which))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the ops on the emulator run beside all others; what came of them is asked for
    at the end.
    """
    items.sort(key=lambda item: item.name.startswith("test_the_cuda_kernels_pass"))


@pytest.fixture(scope="session")
def emulated() -> Path:
    """The directory of the libraries that `setup.py build_emulator` builds."""
    if not (ROOT / "setup.py").exists() or not (ROOT / "build" / "obj").exists():
        pytest.skip(
            "photon_ext was not built here: the emulator is built from its sources and objects"
        )
    done = subprocess.run(
        [sys.executable, "setup.py", "build_emulator"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "emulated"


@pytest.fixture(scope="session")
def emulator(emulated: Path) -> Emulator:
    return Emulator(emulated / "kernels.so")

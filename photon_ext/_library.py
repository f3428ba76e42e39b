"""Loads the compiled parts, once: _ops (the ops of ``torch.ops.photon_ext``) and _C (streams,
events, slots), and ties them together.

_C's host streams need to claim the thread that calls an op; _ops holds that claim. Neither links
the other: the address travels through here.

PHOTON_OPS_LIBRARY, read at import, names another build of _ops to load. It is there for tests: the
build of tests/emulator runs the CUDA kernels on CPU tensors.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "torch is not installed, and photon_ext needs it; see pytorch.org/get-started, or run "
        "`make demo` in the source directory"
    ) from error

_WISH = os.environ.get("PHOTON_OPS_LIBRARY")
OPS_FILE = Path(_WISH) if _WISH else Path(__file__).with_name("_ops.abi3.so")
_MOST_THREADS = 256  # as in csrc/cpu/parallel.cpp
_HOW_TO_BUILD = (
    "build it with `python setup.py build_ext --inplace` or `pip install -e . "
    "--no-build-isolation` in the source directory"
)


def _load() -> ctypes.CDLL:
    if _WISH and not OPS_FILE.exists():
        raise ImportError(f"PHOTON_OPS_LIBRARY is {_WISH!r}, and there is no such file")
    if not OPS_FILE.exists():
        raise ImportError(f"photon_ext is not built: {OPS_FILE} is missing; {_HOW_TO_BUILD}")
    try:
        torch.ops.load_library(str(OPS_FILE))
        library = ctypes.CDLL(str(OPS_FILE))
    except OSError as error:
        raise ImportError(
            f"photon_ext's ops cannot be loaded by torch {torch.__version__}: {error}; torch 2.11 "
            "or newer is needed; "
            f"if it is there, {_HOW_TO_BUILD}"
        ) from error
    try:
        from photon_ext import _C
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"photon_ext._C cannot be loaded by Python {version} ({error}); {_HOW_TO_BUILD}"
        ) from error
    address = ctypes.cast(library.photon_ext_set_host_queue, ctypes.c_void_p).value
    assert address is not None
    _C.bind_ops(address)
    library.photon_ext_num_threads.restype = ctypes.c_int
    library.photon_ext_has_hopper.restype = ctypes.c_bool
    library.photon_ext_fallback_op.restype = ctypes.c_char_p
    library.photon_ext_fallback_reason.restype = ctypes.c_char_p
    library.photon_ext_cpu_isa.restype = ctypes.c_char_p
    library.photon_ext_cpu_isa_error.restype = ctypes.c_char_p
    library.photon_ext_set_num_threads.argtypes = [ctypes.c_int]
    library.photon_ext_set_num_threads.restype = None
    isa_error: bytes | None = library.photon_ext_cpu_isa_error()
    if isa_error is not None:
        raise ImportError(isa_error.decode())
    return library


_ops_library = _load()
_logger = logging.getLogger("photon_ext")
_logged: set[tuple[str, str]] = set()


def num_threads() -> int:
    """Threads that a CPU kernel uses, its caller's included, 1 to 256.

    At first PHOTON_NUM_THREADS, read when they are first needed, or the cores that affinity and
    cgroup quota let this process use.
    """
    return int(_ops_library.photon_ext_num_threads())


def set_num_threads(threads: int) -> None:
    """Sets the threads of the CPU kernels, for the whole process, from the next kernel on. Results
    do not depend on it.

    May be called from any thread. More than 256 count as 256; where the system gives fewer threads,
    :func:`num_threads` tells how many.

    Raises:
        ValueError: `threads` is no integer, or below 1.
    """
    try:
        wanted = 0 if isinstance(threads, bool) else operator.index(threads)
    except TypeError:
        wanted = 0
    if wanted < 1:
        raise ValueError(f"set_num_threads: threads is {threads!r}, expected an integer, 1 or more")
    _ops_library.photon_ext_set_num_threads(min(wanted, _MOST_THREADS))


def hopper_runs() -> bool:
    """Whether the current GPU runs the Hopper kernels made for Hopper, which ops choose with
    ``hopper=True``: compute capability 9.0; and 10.0, where they are untested, in a build with
    PHOTON_SM_100=1 if the environment variable PHOTON_HOPPER_ON_10 is 1.

    False without a GPU, and in a build without CUDA. The current GPU is torch's, which each thread
    has for itself.

    The Hopper attention of prefill chunks, see :func:`photon_ext.ops.paged_attention_into`, runs
    from 8.0 on.
    """
    return bool(_ops_library.photon_ext_has_hopper())


def fallbacks() -> dict[str, str]:
    """Which ops were called with ``hopper=True`` on a GPU in this process and ran their portable
    kernel: why, by op; several reasons of an op are joined by "; ".
    """
    found: dict[str, str] = {}
    for op, reason in _noted_fallbacks():
        found[op] = f"{found[op]}; {reason}" if op in found else reason
    return found


def log_fallbacks() -> None:
    """Warns of each fallback (see `fallbacks`) that has not been warned of yet, by the logger
    "photon_ext".
    """
    for op, reason in _noted_fallbacks():
        if (op, reason) not in _logged:
            _logged.add((op, reason))
            _logger.warning("%s runs its portable kernel instead of the Hopper one: %s", op, reason)


def _noted_fallbacks() -> Iterator[tuple[str, str]]:
    """The pairs of op and reason, in the order in which they first came up."""
    for index in count():
        op: bytes | None = _ops_library.photon_ext_fallback_op(index)
        if op is None:
            return
        reason: bytes = _ops_library.photon_ext_fallback_reason(index)
        yield op.decode(), reason.decode()


def cpu_isa() -> str:
    """Which variant of the CPU kernels runs here: "baseline", "avx2" or "avx512".

    PHOTON_CPU_ISA, read at import, asks for a lower one; a name that is none, or does not run here,
    makes the import an ImportError.
    """
    name: bytes = _ops_library.photon_ext_cpu_isa()
    return name.decode()

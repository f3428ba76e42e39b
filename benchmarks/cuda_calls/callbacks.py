"""CUDA API calls counted by CUPTI callbacks, through ctypes: every runtime and driver call of the
process, statically linked ones included.

CUPTI has one subscriber at a time: count before torch.profiler is first used in the process, or
without it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from collections import Counter
from typing import Any

from benchmarks.cuda_calls.counts import Counts
from photon_ext.observe.api import CallKind, classify, plain_name

# Numbers and layouts of cupti_callbacks.h (CUDA 11 to 13).
DRIVER_API, RUNTIME_API = 1, 2
ENTER = 0
LIBRARIES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so", "/usr/local/cuda/lib64/libcupti.so")
# cuda.h: CU_POINTER_ATTRIBUTE_MEMORY_TYPE and what it answers.
MEMORY_TYPE = 2
MEMORY_NAMES = {1: "Pinned", 2: "Device", 4: "Managed"}
LINEAR_COPIES = frozenset(
    f"Memcpy{kind}{tail}" for kind in ("", "HtoD", "DtoH", "DtoD") for tail in ("", "Async")
)

# CUPTI_ERROR_MAX_LIMIT_REACHED and CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED of
# cupti_result.h.
SUBSCRIBER_ERRORS = (12, 39)
HAS_SUBSCRIBER = (
    "; CUPTI has one subscriber at a time, and this process has another: torch.profiler, which "
    "stays subscribed once it was used, or a profiler that the process runs under; count in a "
    "process of its own, before torch.profiler is first used"
)

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class CallbackData(ctypes.Structure):
    """The head of CUpti_CallbackData."""

    _fields_ = [
        ("site", ctypes.c_int),
        ("function_name", ctypes.c_char_p),
        ("function_params", ctypes.c_void_p),
    ]


class CopyParams(ctypes.Structure):
    """How the parameters of every call in LINEAR_COPIES begin."""

    _fields_ = [("dst", ctypes.c_uint64), ("src", ctypes.c_uint64), ("nbytes", ctypes.c_size_t)]


class CuptiError(Exception):
    """CUPTI is missing or refused."""


class ApiCounter:
    """Counts calls inside a `with` block; a call made by another call (a driver call of the
    runtime) is not counted.

    Raises CuptiError on entry where CUPTI is missing, has another subscriber, or has no driver.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.transfers: Counter[tuple[int, int, int]] = Counter()  # (dst, src, bytes)
        # copies whose parameters are not read: 2D, batched, ...
        self.odd_copies: Counter[str] = Counter()
        self._depth: dict[int, int] = {}
        self._callback = _Callback(self._on_call)
        self._subscriber = ctypes.c_void_p()
        self._cupti: Any = None

    def __enter__(self) -> ApiCounter:
        self._cupti = load_cupti()
        result = self._cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None)
        self._check(result, "cuptiSubscribe", HAS_SUBSCRIBER if result in SUBSCRIBER_ERRORS else "")
        try:
            for domain in (RUNTIME_API, DRIVER_API):
                result = self._cupti.cuptiEnableDomain(1, self._subscriber, domain)
                self._check(result, "cuptiEnableDomain")
        except CuptiError:
            self._cupti.cuptiUnsubscribe(self._subscriber)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for domain in (RUNTIME_API, DRIVER_API):
            self._cupti.cuptiEnableDomain(0, self._subscriber, domain)
        self._cupti.cuptiUnsubscribe(self._subscriber)

    def counts(self, steps: int) -> Counts:
        """What was counted, as a window of `steps` steps. Call it while the copied memory is still
        allocated."""
        made = Counts("cupti callbacks", steps)
        made.calls.update(self.calls)
        for (dst, src, nbytes), times in self.transfers.items():
            name = copy_name(memory_kind(src), memory_kind(dst))
            made.copies[name] += times
            made.copied_bytes[name] += times * nbytes
        for name, times in self.odd_copies.items():
            made.copies[f"HtoD? {name}"] += times
        return made

    def _on_call(self, _user: int, _domain: int, _cbid: int, address: int) -> None:
        data = CallbackData.from_address(address)
        thread = threading.get_ident()
        depth = self._depth.get(thread, 0)
        if data.site != ENTER:
            self._depth[thread] = max(0, depth - 1)
            return
        self._depth[thread] = depth + 1
        if depth:
            return
        name = plain_name(data.function_name.decode())
        self.calls[name] += 1
        bare = name.removeprefix("cuda").removeprefix("cu")
        if bare in LINEAR_COPIES:
            params = CopyParams.from_address(data.function_params)
            self.transfers[params.dst, params.src, params.nbytes] += 1
        elif classify(name) is CallKind.COPY:
            self.odd_copies[name] += 1

    def _check(self, result: int, call: str, remedy: str = "") -> None:
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._cupti.cuptiGetResultString(result, ctypes.byref(text))
        raise CuptiError(f"{call}: {(text.value or b'?').decode()} ({result}){remedy}")


def load_cupti() -> Any:
    """libcupti, the one that is loaded already (torch's) if there is one. Raises CuptiError."""
    problems = []
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise CuptiError(f"no libcupti: {'; '.join(problems)}")


def memory_kind(address: int) -> str:
    """ "Device", "Pinned", "Managed", or "Pageable" for memory that the driver does not know."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "Pageable"
    kind = ctypes.c_uint32()
    result = driver.cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, ctypes.c_uint64(address))
    return MEMORY_NAMES.get(kind.value, "Pageable") if result == 0 else "Pageable"


def copy_name(source: str, target: str) -> str:
    """As activity records call it: "HtoD Pinned -> Device"."""
    letters = {"Device": "D", "Managed": "D"}
    return f"{letters.get(source, 'H')}to{letters.get(target, 'H')} {source} -> {target}"

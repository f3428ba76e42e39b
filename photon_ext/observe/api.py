"""What CUDA API calls mean for a decode step, by their names, runtime and driver calls alike."""

from __future__ import annotations

import re
from enum import Enum


class CallKind(Enum):
    """What a call does to a step."""

    GRAPH_LAUNCH = "graph launch"
    KERNEL_LAUNCH = "kernel launch"
    EVENT_WAIT = "event wait"  # blocks the host until an event: the commit's wait is one
    SYNC = "sync"  # any other call that blocks the host on the device
    ALLOCATION = "allocation"
    COPY = "copy"
    OTHER = "other"


_PATTERNS = {
    r"GraphLaunch": CallKind.GRAPH_LAUNCH,
    r"Launch(CooperativeKernel|Kernel|KernelEx|KernelExC|HostFunc|Grid|GridAsync)?": (
        CallKind.KERNEL_LAUNCH
    ),
    r"EventSynchronize": CallKind.EVENT_WAIT,
    r"(Stream|Device|Ctx|Context|Thread)Synchronize": CallKind.SYNC,
    r"Mem(cpy|set)\w*(?<!Async)": CallKind.SYNC,  # what does not say Async may block
    r"Memcpy\w*Async": CallKind.COPY,
    r"(Malloc|Free)\w*": CallKind.ALLOCATION,
    r"Mem(Alloc|Free|Host(Alloc|Register|Unregister)|Create|Release|Map|Unmap)\w*": (
        CallKind.ALLOCATION
    ),
    r"MemAddress(Reserve|Free)\w*": CallKind.ALLOCATION,
    r"Host(Alloc|Register|Unregister)\w*": CallKind.ALLOCATION,
    r"MemPool(Create|Destroy|TrimTo)": CallKind.ALLOCATION,
    r"Array(3D)?(Create|Destroy)": CallKind.ALLOCATION,
}
_COMPILED = [(re.compile(pattern), kind) for pattern, kind in _PATTERNS.items()]
_API_NAME = re.compile(r"^(?:cuda|cu)([A-Z]\w*)$")
_SUFFIX = re.compile(r"(_v\d+|_ptsz|_ptds)+$")


def is_api_call(name: str) -> bool:
    """Whether `name` is that of a CUDA runtime or driver function."""
    return _API_NAME.match(name) is not None


def plain_name(name: str) -> str:
    """`cuMemcpyHtoDAsync_v2` without its version suffix."""
    return _SUFFIX.sub("", name)


def classify(name: str) -> CallKind:
    """The kind of a runtime (`cuda...`) or driver (`cu...`) call."""
    match = _API_NAME.match(plain_name(name))
    if match is None:
        return CallKind.OTHER
    found = (kind for pattern, kind in _COMPILED if pattern.fullmatch(match.group(1)))
    return next(found, CallKind.OTHER)

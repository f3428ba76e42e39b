"""What CUDA API calls mean for a decode step: launches, waits, allocations, copies; by name, for runtime and driver calls alike."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
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


_PATTERNS = (
    (CallKind.GRAPH_LAUNCH, r"GraphLaunch"),
    (CallKind.KERNEL_LAUNCH, r"Launch(CooperativeKernel|Kernel|KernelEx|KernelExC|HostFunc|Grid|GridAsync)?"),
    (CallKind.EVENT_WAIT, r"EventSynchronize"),
    (CallKind.SYNC, r"(Stream|Device|Ctx|Context|Thread)Synchronize"),
    (CallKind.SYNC, r"Mem(cpy|set)\w*(?<!Async)"),  # what does not say Async may block
    (CallKind.COPY, r"Memcpy\w*Async"),
    (CallKind.ALLOCATION, r"(Malloc|Free)\w*"),
    (CallKind.ALLOCATION, r"Mem(Alloc|Free|HostAlloc|HostRegister|HostUnregister|Create|Release|Map|Unmap|Address(Reserve|Free))\w*"),
    (CallKind.ALLOCATION, r"Host(Alloc|Register|Unregister)\w*"),
    (CallKind.ALLOCATION, r"MemPool(Create|Destroy|TrimTo)"),
    (CallKind.ALLOCATION, r"Array(3D)?(Create|Destroy)"),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
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
    bare = match.group(1)
    return next((kind for kind, pattern in _COMPILED if pattern.fullmatch(bare)), CallKind.OTHER)


@dataclass
class Counts:
    """Calls and copies of a window of steps.

    Attributes:
        source: how they were counted.
        steps: turns of the loop in the window.
        calls: outermost API calls by plain name.
        copies: device copies by direction and memory kind, "HtoD Pinned -> Device".
        copied_bytes: bytes of each, where the source tells.
    """

    source: str
    steps: int
    calls: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)

    def of(self, kind: CallKind) -> int:
        """Calls of one kind."""
        return sum(count for name, count in self.calls.items() if classify(name) is kind)

    def named(self, *names: str) -> int:
        """Calls by bare name ("MemcpyAsync"), runtime and driver together."""
        return sum(count for name, count in self.calls.items() if name.removeprefix("cuda").removeprefix("cu") in names)

    @property
    def host_to_device(self) -> int:
        return sum(count for name, count in self.copies.items() if name.startswith("HtoD"))

    @property
    def host_to_device_bytes(self) -> int | None:
        """Bytes sent to the device; None if there were copies whose size is not known."""
        sent = [name for name in self.copies if name.startswith("HtoD")]
        return None if any(name not in self.copied_bytes for name in sent) else sum(self.copied_bytes[name] for name in sent)

    @property
    def pageable(self) -> int:
        return sum(count for name, count in self.copies.items() if "Pageable" in name)

    def add(self, other: Counts) -> None:
        """Adds another window of the same source."""
        self.steps += other.steps
        self.calls.update(other.calls)
        self.copies.update(other.copies)
        self.copied_bytes.update(other.copied_bytes)

    def faults(self, quiet_steps: int) -> list[str]:
        """What is not as it must be in a window of steady steps (I7); empty if all is well."""
        found = []
        if (launches := self.of(CallKind.GRAPH_LAUNCH)) != self.steps:
            found.append(f"{launches} graph launches in {self.steps} steps, expected one each")
        if (kernels := self.of(CallKind.KERNEL_LAUNCH)) != 0:
            found.append(f"{kernels} kernel launches outside of graphs")
        if (waits := self.of(CallKind.EVENT_WAIT)) != self.steps:
            found.append(f"{waits} event waits in {self.steps} steps, expected one each")
        for kind in (CallKind.SYNC, CallKind.ALLOCATION):
            names = {name: count for name, count in self.calls.items() if classify(name) is kind}
            if names:
                found.append(f"{kind.value}: {names}")
        if self.pageable:
            found.append(f"{self.pageable} copies of pageable memory")
        if quiet_steps != self.steps:
            found.append(f"only {quiet_steps} of {self.steps} steps were quiet")
        elif self.host_to_device:
            found.append(f"{self.host_to_device} copies to the device in quiet steps ({self.host_to_device_bytes} bytes)")
        return found

    def as_dict(self) -> dict[str, object]:
        """For a result file: totals by kind, then calls and copies by name."""
        kinds = {kind.value: self.of(kind) for kind in CallKind}
        return {
            "source": self.source,
            "steps": self.steps,
            "kinds": kinds,
            "host_to_device_bytes": self.host_to_device_bytes,
            "calls": dict(self.calls),
            "copies": dict(self.copies),
            "copied_bytes": dict(self.copied_bytes),
        }

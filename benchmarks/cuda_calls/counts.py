"""Counts of calls and copies in a window of steps, and what is a fault in a steady one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from photon_ext.observe.api import CallKind, classify


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

    @property
    def host_to_device(self) -> int:
        return sum(count for name, count in self.copies.items() if name.startswith("HtoD"))

    @property
    def host_to_device_bytes(self) -> int | None:
        """Bytes sent to the device; None if there were copies whose size is not known."""
        sent = [name for name in self.copies if name.startswith("HtoD")]
        if any(name not in self.copied_bytes for name in sent):
            return None
        return sum(self.copied_bytes[name] for name in sent)

    @property
    def pageable(self) -> int:
        return sum(count for name, count in self.copies.items() if "Pageable" in name)

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
            sent = f"({self.host_to_device_bytes} bytes)"
            found.append(f"{self.host_to_device} copies to the device in quiet steps {sent}")
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

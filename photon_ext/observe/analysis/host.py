"""Where the host's time goes: phases of ours, and torch ops."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from photon_ext.observe.analysis.intervals import by_thread, flatten
from photon_ext.observe.records import OpKind, Records


class OpCost(NamedTuple):
    """A torch op: calls, and microseconds of its own, without those of ops inside it."""

    name: str
    calls: int
    own_us: float


def phase_costs(records: Records) -> dict[str, float]:
    """Microseconds per launched step, by innermost phase, largest first."""
    own: dict[str, float] = defaultdict(float)
    for spans in by_thread(records.host).values():
        for piece in flatten(spans):
            own[piece.path[-1].phase.value] += (piece.end - piece.start) / 1e3
    steps = max(len(records.launches), 1)
    return {phase: us / steps for phase, us in sorted(own.items(), key=lambda item: -item[1])}


def op_costs(records: Records) -> list[OpCost]:
    """By their own time, largest first."""
    calls: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    for op in records.ops:
        calls[op.name] += op.kind is OpKind.TORCH
    for ops in by_thread(records.ops).values():
        for piece in flatten(ops):
            if piece.path[-1].kind is OpKind.TORCH:
                own[piece.path[-1].name] += (piece.end - piece.start) / 1e3
    return sorted(
        (OpCost(name, calls[name], us) for name, us in own.items()), key=lambda cost: -cost.own_us
    )

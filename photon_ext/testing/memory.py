"""The ledger of accesses: memory as a set of named ranges, each with its last write and the reads
since.

A conflicting pair that no happens-before relation orders is a race, in whichever order the two
happened to run.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import gt

from photon_ext.testing.clock import Actor, Clock
from photon_ext.testing.errors import SimRace

Range = tuple[Hashable, ...]
"""Name of a range: what it is, and which one of them: ("page", 3), ("input", 0)."""


class _Cell:
    __slots__ = ("labels", "reads", "write", "writer", "written_by")

    def __init__(self) -> None:
        self.writer = Actor.HOST
        self.write = 0
        self.written_by = ""
        self.reads = [0] * len(Actor)
        self.labels = [""] * len(Actor)


class Memory:
    """Checks every access against those before it.

    Args:
        check: False keeps the ledger but reports nothing, so that a test can show what values alone
            would reveal.
    """

    def __init__(self, check: bool = True) -> None:
        self._cells: dict[Range, _Cell] = {}
        self._check = check

    def read(self, name: Range, actor: Actor, clock: Clock, label: str) -> None:
        """``label`` of ``actor`` reads range ``name``; raises SimRace unless the last write
        happened before.
        """
        cell = self._cells.get(name) or self._new_cell(name)
        if cell.write > clock[cell.writer]:
            self._race(name, label, "reads", cell.written_by, "writes")
        cell.reads[actor] = clock[actor]
        cell.labels[actor] = label

    def write(self, name: Range, actor: Actor, clock: Clock, label: str) -> None:
        """``label`` of ``actor`` writes range ``name``; raises SimRace unless the last write and
        all reads happened before.
        """
        cell = self._cells.get(name) or self._new_cell(name)
        if cell.write > clock[cell.writer]:
            self._race(name, label, "writes", cell.written_by, "writes")
        reads = cell.reads
        if any(map(gt, reads, clock)):
            reader = next(reader for reader in Actor if reads[reader] > clock[reader])
            self._race(name, label, "writes", cell.labels[reader], "reads")
        cell.writer, cell.write, cell.written_by = actor, clock[actor], label
        cell.reads = [0] * len(reads)

    def last_write(self, name: Range) -> int:
        """Epoch of the last write to ``name`` within its writer's clock; 0 if there was none."""
        return self._cells[name].write if name in self._cells else 0

    def __len__(self) -> int:
        return len(self._cells)

    def _new_cell(self, name: Range) -> _Cell:
        cell = self._cells[name] = _Cell()
        return cell

    def _race(self, name: Range, label: str, verb: str, other: str, other_verb: str) -> None:
        if self._check:
            what = " ".join(str(part) for part in name)
            raise SimRace(
                f"{label!r} {verb} {what} while {other!r} {other_verb} it: nothing orders the two"
            )


class Access:
    """One action's view of the ledger: its actor, its clock, and a label for messages."""

    __slots__ = ("_memory", "actor", "clock", "label")

    def __init__(self, memory: Memory, actor: Actor, clock: Clock, label: str) -> None:
        self._memory = memory
        self.actor = actor
        self.clock = clock
        self.label = label

    def read(self, *name: Hashable) -> None:
        self._memory.read(name, self.actor, self.clock, self.label)

    def write(self, *name: Hashable) -> None:
        self._memory.write(name, self.actor, self.clock, self.label)

    def last_write(self, *name: Hashable) -> int:
        return self._memory.last_write(name)

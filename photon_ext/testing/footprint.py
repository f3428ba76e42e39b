"""What an op reads and writes, as its schema says: every op that a step runs declares its accesses
to the ledger of the simulated device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from photon_ext.runtime.streams import is_view
from photon_ext.testing.memory import Access, Range
from photon_ext.testing.state import DeviceState


class Footprint(TorchDispatchMode):
    """Declares the accesses of the ops that run under it, before each runs.

    Memory without a name is nobody's concern: what a forward allocates for itself is used on the
    compute stream alone. Watched pages count one by one, as the step's tokens need them.

    Args:
        names: the range of each tensor's memory, by the address of its storage.
        device: says which memory holds pages.

    Attributes:
        access: where to declare; see ``of``.
        written_pages, read_pages: pages that the step's tokens write, and that they attend to.
    """

    def __init__(self, names: dict[int, Range], device: DeviceState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._device = device
        self.access: Access | None = None
        self._addresses: dict[int, Range] = {}
        self._declared: dict[Range, bool] = {}
        self.written_pages: set[int] = set()
        self.read_pages: set[int] = set()

    def of(self, access: Access) -> Footprint:
        """Itself, for ``with``: what runs under it is declared to ``access``."""
        self.access = access
        self._declared.clear()
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under this mode; torch would import its compiler (seconds) to say so
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = _writes(func)
        if writes is not None:
            for value, write in zip(args, writes[0], strict=False):
                self._declare(value, write)
            for name, value in (kwargs or {}).items():
                self._declare(value, writes[1][name])
        return func(*args, **(kwargs or {}))

    def _declare(self, value: Any, write: bool) -> None:
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            name = self._addresses.get(address)
            if name is not None:
                self._once(name, write)
            else:
                self._find(value, address, write)
        elif isinstance(value, (list, tuple)):
            for one in value:
                self._declare(one, write)

    def _find(self, value: torch.Tensor, address: int, write: bool) -> None:
        """Memory that was not seen at this address before."""
        storage = value.untyped_storage().data_ptr()
        name = self._names.get(storage)
        if name is not None:
            self._addresses[address] = name
            self._once(name, write)
        elif self._device.watches(storage):
            for page in self.read_pages:
                self._once(("page", page), False)
            if write:
                for page in self.written_pages:
                    self._once(("page", page), True)
                self._device.pages |= self.written_pages

    def _once(self, name: Range, write: bool) -> None:
        """Declares what this action has not declared yet; a write says all that a read does."""
        declared = self._declared.get(name)
        if declared is None or (write and not declared):
            self._declared[name] = write
            assert self.access is not None
            (self.access.write if write else self.access.read)(*name)


@cache
def _writes(func: Any) -> tuple[tuple[bool, ...], dict[str, bool]] | None:
    """Whether ``func`` writes each of its arguments, by place and by name; None for a view, which
    touches no memory.
    """
    if is_view(func):
        return None
    arguments = func._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    return tuple(written), {a.name: w for a, w in zip(arguments, written, strict=True)}

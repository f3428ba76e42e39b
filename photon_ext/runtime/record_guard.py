"""What may run while a host graph is captured: ops that are enqueued as plain functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from photon_ext.errors import CaptureError

# They return what was just made from host data, which their schemas do not tell from a view.
FRESH = ("aten::lift_fresh", "aten::lift")


class RecordGuard(TorchDispatchMode):
    """Lets photon_ext ops and views through; any other torch op would run now, once, and be missing
    from every replay.

    Attributes:
        tensors: arguments of the ops that passed, by id. Their addresses are in the record, so
            whoever replays it keeps them alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[int, torch.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under this mode; torch would import its compiler (seconds) to say so
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "photon_ext":
            arguments = (*args, *(kwargs or {}).values())
            tensors = (value for value in arguments if isinstance(value, torch.Tensor))
            self.tensors.update((id(tensor), tensor) for tensor in tensors)
        elif not is_view(func):
            raise CaptureError(
                f"{func} cannot be recorded into a CPU graph, which replays photon_ext ops only; "
                "use those in forward, or build the Pipeline with graph=False"
            )
        return func(*args, **(kwargs or {}))


def is_view(func: Any) -> bool:
    """Whether a torch op only gives another view of memory, by its schema."""
    returns = func._schema.returns
    aliases = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return aliases and func._schema.name not in FRESH

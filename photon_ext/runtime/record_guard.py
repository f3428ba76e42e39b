"""Recording on the CPU: only ops that can be enqueued as plain functions may run while a host graph is captured."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from photon_ext.errors import CaptureError


class RecordGuard(TorchDispatchMode):
    """Lets photon_ext ops and views through; any other torch op would run now, once, and be missing from every replay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under this mode; torch would import its compiler (seconds) to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "photon_ext" and not _is_view(func):
            raise CaptureError(
                f"{func} cannot be recorded into a CPU graph, which replays photon_ext ops only; "
                "use those in forward, or build the Pipeline with graph=False"
            )
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)

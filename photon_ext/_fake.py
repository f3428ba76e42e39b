"""How the ops behave under FakeTensorMode (torch.compile, torch.export).

All ops write into their arguments and return nothing, so nothing has to be inferred. Where the
sizes are known, the C++ checks run on Meta tensors of the same shapes, and a wrong call fails while
it is traced. Sizes that are symbolic stay so (reading one in C++ would make it a constant); their
checks run when the op does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def _is_static(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_static, value))
    return not isinstance(value, torch.Tensor) or all(
        isinstance(number, int) for number in (*value.shape, *value.stride())
    )


def _on_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_meta(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _check(
    mode: Any,
    func: Callable[..., None],
    types: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> None:
    named = kwargs or {}
    if _is_static((*args, *named.values())):
        func(*map(_on_meta, args), **{name: _on_meta(value) for name, value in named.items()})


def register(op_names: Sequence[str]) -> None:
    """Installs the rule for ``photon_ext::<name>`` of each name."""
    for name in op_names:
        torch.library.register_torch_dispatch(f"photon_ext::{name}", FakeTensorMode, _check)

"""Poison: what memory holds that was released, consumed or never written, and the look that finds
it.
"""

from __future__ import annotations

from ctypes import c_int32
from functools import lru_cache

import torch

from photon_ext.testing.errors import SimPoison

POISON = -559038737
"""Word that such memory holds: 0xDEADBEEF. Floating-point memory holds NaN."""


def clean(word: int, what: str) -> int:
    """``word``, unless it is poison; raises SimPoison."""
    if word == POISON:
        raise SimPoison(f"{what} was read, and it was released, consumed or never written")
    return word


def words_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous int32 CPU tensor that is not empty, as int32 words.

    The caller keeps the tensor alive. A few words of Python cost less this way than through torch.
    """
    return _words_at(tensor.data_ptr(), tensor.numel())


@lru_cache(maxsize=256)
def _words_at(address: int, count: int) -> memoryview:
    # it owns nothing: whoever has it later has a tensor of this size at this address, too
    return memoryview((c_int32 * count).from_address(address)).cast("B").cast("i")


def poison(tensor: torch.Tensor) -> None:
    """Overwrites all of ``tensor`` with poison."""
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else POISON)

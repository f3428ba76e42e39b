"""Poison: what memory holds that was released, consumed or never written, and the look that finds
it.
"""

from __future__ import annotations

from ctypes import c_int32

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
    memory = (c_int32 * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B").cast("i")


def poison(tensor: torch.Tensor) -> None:
    """Overwrites all of ``tensor`` with poison."""
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else POISON)

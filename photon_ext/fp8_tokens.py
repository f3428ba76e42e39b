"""Fp8Tokens: what a linear reads of tokens, in fp8."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Fp8Tokens(NamedTuple):
    """Tokens [T, k] as `photon_ext.ops.quantize_fp8_into` leaves them: a number is its e4m3 number
    times the scale of its token.
    """

    data: Tensor  # float8_e4m3fn [T, k]
    scale: Tensor  # float32 [T]

"""The noise of temperature sampling: philox4x32-10 keyed by a row's seed, counted by position
and token id (csrc/common/philox.h).
"""

from __future__ import annotations

import math

_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four 32-bit words of a counter under a key. Source: Salmon et al., SC 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seed_low: int, seed_high: int, position: int, token: int) -> float:
    """The Gumbel noise of ``token`` at ``position``, in double precision."""
    block = philox4x32((token >> 2, position & _MASK, 0, 0), (seed_low & _MASK, seed_high & _MASK))
    uniform = ((block[token & 3] >> 9) + 0.5) / 8388608.0
    return -math.log(-math.log(uniform))

"""Single ops, in memory that you own: `help(photon_ext.ops)` has their shapes and dtypes.

python -m photon_ext.examples.ops --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from photon_ext import Weight, WeightFormat, ops
from photon_ext.dequantize import dequantized

ROWS, Q_HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 3, 6, 2, 64, 128


def carry_over(device: str) -> torch.Tensor:
    """Token ids of the next step: next[i] = prev[idx[i]] where idx[i] >= 0. Returns int32 [ROWS]:
    41, 8, 40.
    """
    next_ids, prev, idx = (
        torch.tensor(ids, dtype=torch.int32, device=device)
        for ids in ([7, 8, 9], [40, 41], [1, -1, 0])
    )
    ops.carry_over_ids_(next_ids, prev, idx)
    return next_ids


def attend(next_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token a row over a contiguous cache [B, H, L, D], which needs no page table:
    a page is a row. Returns what comes out, [ROWS, Q_HEADS, HEAD_DIM], and the values.
    """
    device = next_ids.device
    meta = torch.zeros(ROWS, 4, dtype=torch.int32, device=device)
    positions = torch.tensor([5, 0, 2], dtype=torch.int32, device=device)
    ops.decode_meta_set_(meta, next_ids, positions)  # id, position, length, row of each token

    q = torch.randn(ROWS, Q_HEADS, HEAD_DIM, device=device)
    k, v = torch.randn(2, ROWS, KV_HEADS, HEAD_DIM, device=device)
    k_cache, v_cache = torch.zeros(2, ROWS, KV_HEADS, MAX_LEN, HEAD_DIM, device=device)
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=device).repeat(2) / HEAD_DIM)
    angles = torch.arange(MAX_LEN, device=device)[:, None] * frequencies
    out = torch.empty_like(q)
    ops.fused_attention_decode_into(
        out,
        q,
        k,
        v,
        k_cache.transpose(1, 2),  # [pages, page size, KV heads, head_dim]
        v_cache.transpose(1, 2),
        meta,
        None,
        angles.cos(),
        angles.sin(),
        scale=HEAD_DIM**-0.5,
    )
    return out, v


def multiply(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tokens times a weight of four bits: codes from 0 to 15, less 8, with a scale for each 32
    columns of a row. Returns the products, [2, 16], and the same by PyTorch.
    """
    codes = torch.randint(256, (16, 64 // 2), dtype=torch.uint8, device=device)  # two in a byte
    weight = Weight(codes, WeightFormat.INT4, scale=torch.full((16, 2), 0.1, device=device))
    x = torch.randn(2, 64, device=device)
    return ops.linear(x, weight), x @ dequantized(weight).T


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all and prints what came of them."""
    parser = argparse.ArgumentParser(description="Single ops.")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)

    next_ids = carry_over(options.device)
    print("carried over:", *next_ids.tolist())
    out, v = attend(next_ids)
    # row 1 is at position 0: its own token gets all of the attention
    alone = v[1].repeat_interleave(Q_HEADS // KV_HEADS, 0)
    print("one key gets all of the attention:", torch.allclose(out[1], alone, atol=1e-5))
    products, expected = multiply(options.device)
    print("a weight of four bits:", torch.allclose(products, expected, atol=1e-4))


if __name__ == "__main__":
    main()

"""KV memory for attention tests: shuffled pages with strides of any kind, or a contiguous [B, H,
L, D] cache; in the dtype of queries, or in fp8.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from photon_ext import reference
from tests.ops.numeric import ints, randn, same_bits
from tests.ops.tables import SAMPLE, STAGED


@dataclass
class Cache:
    """k and v are [pages, page size, kv heads, head_dim] views; every element that no test
    writes is NaN.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    page_size: int

    def double(self) -> Cache:
        return Cache(self.k.double(), self.v.double(), self.page_table, self.page_size)

    def clone(self) -> Cache:
        """Copies with the same strides."""
        return Cache(_strided_copy(self.k), _strided_copy(self.v), self.page_table, self.page_size)

    def scaled(self) -> dict[str, Tensor]:
        """The ops' arguments besides keys, values and the page table."""
        return {}

    def parts(self) -> tuple[Tensor, ...]:
        return self.k, self.v

    def place(self, row: int, position: int) -> tuple[int, int]:
        if self.page_table is None:
            return row, position
        return int(self.page_table[row, position // self.page_size]), position % self.page_size

    def fill(self, row: int, positions: int, seed: int) -> None:
        """Random keys and values at positions 0 .. positions - 1 of a row."""
        heads, head_dim = self.k.shape[2:]
        values = randn(
            2, positions, heads, head_dim, dtype=self.k.dtype, device=str(self.k.device), seed=seed
        )
        if self.page_table is None:
            self.k[row, :positions], self.v[row, :positions] = values
            return
        at = torch.arange(positions, device=self.k.device)
        pages, at = self.page_table[row, at // self.page_size].long(), at % self.page_size
        self.k[pages, at], self.v[pages, at] = values


@dataclass
class Fp8Cache(Cache):
    """A cache whose numbers are stored in fp8, heads before tokens."""

    scale: Tensor

    @classmethod
    def of(cls, cache: Cache) -> Fp8Cache:
        """The same numbers, rounded; where they are NaN, so are the scales."""
        both = [reference.quantize_heads(numbers) for numbers in (cache.k, cache.v)]
        k, v = (codes.transpose(1, 2).contiguous().transpose(1, 2) for codes, _ in both)
        scale = torch.stack([of.transpose(1, 2) for _, of in both], dim=1).contiguous()
        return cls(k, v, cache.page_table, cache.page_size, scale)

    def clone(self) -> Fp8Cache:
        codes = (cache.clone(memory_format=torch.preserve_format) for cache in (self.k, self.v))
        return Fp8Cache(*codes, self.page_table, self.page_size, self.scale.clone())

    def double(self) -> Cache:
        """The numbers that are stored."""
        scales = self.scale.transpose(2, 3).unbind(1)
        k, v = (
            reference.dequantize_heads(codes, scale).double()
            for codes, scale in zip((self.k, self.v), scales, strict=True)
        )
        return Cache(k, v, self.page_table, self.page_size)

    def scaled(self) -> dict[str, Tensor]:
        return {"kv_scale": self.scale}

    def parts(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.scale


def assert_same_cache(actual: Cache, expected: Cache) -> None:
    assert all(map(same_bits, actual.parts(), expected.parts()))


def _strided_copy(x: Tensor) -> Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def paged_cache(
    rows: int,
    pages_per_row: int,
    page_size: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    lengths: Sequence[int] | None = None,
) -> Cache:
    """Pages in random order, the last one nobody's; k and v are the halves of one buffer with
    heads before tokens. `lengths`: of each row, where rows have no more pages than they need;
    behind these the table names nobody's.
    """
    counts = [pages_per_row] * rows
    if lengths is not None:
        counts = [-(-length // page_size) for length in lengths]
    pages = 1 + sum(counts)
    both = torch.full(
        (pages, 2, heads, page_size, head_dim), float("nan"), dtype=dtype, device=device
    )
    order = list(range(pages - 1))
    random.Random(pages).shuffle(order)
    table = torch.full((rows, pages_per_row), pages - 1, dtype=torch.int32)
    for row, own in enumerate(torch.tensor(order, dtype=torch.int32).split(counts)):
        table[row, : len(own)] = own
    table = table.to(device)
    return Cache(both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2), table, page_size)


def contiguous_cache(
    rows: int, length: int, heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> Cache:
    """A [B, H, L, D] cache as other engines have it: a row's only page is the row."""
    k, v = (
        torch.full((rows, heads, length, head_dim), float("nan"), dtype=dtype, device=device)
        for _ in range(2)
    )
    return Cache(k.transpose(1, 2), v.transpose(1, 2), None, length)


def heads_first(cache: Cache) -> Cache:
    """A copy with all pages of a head before the next head's."""
    k, v = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (cache.k, cache.v))
    return replace(cache, k=k, v=v)


def tokens_and_segments(
    spans: list[tuple[int, int, int]], device: str, dead_after: int = 0
) -> tuple[Tensor, Tensor]:
    """decode_meta and segments of (row, first position, number of tokens) each, then
    `dead_after` dead tokens; row 0 is a dead segment.
    """
    num_tokens: list[list[int]] = []
    segments: list[list[int]] = []
    for row, first, count in spans:
        segments.append([row, len(num_tokens), count, SAMPLE if count == 1 else SAMPLE | STAGED])
        num_tokens += [
            [7, first + i, first + i + 1, row] if row else [0, 0, 0, 0] for i in range(count)
        ]
    num_tokens += [[0, 0, 0, 0]] * dead_after
    return ints(num_tokens, device).reshape(-1, 4), ints(segments, device).reshape(-1, 4)


def rotary_tables(max_len: int, head_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim], both halves alike."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_len).double()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos().float().to(device), angles.sin().float().to(device)

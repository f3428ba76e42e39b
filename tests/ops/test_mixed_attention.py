"""Mixed steps: the attention of decode tokens and that of chunks share a step, and the device's
counts tell each which tokens are its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.layout import RowColumn
from tests.ops.caches import Cache, paged_cache, rotary_tables, tokens_and_segments
from tests.ops.numeric import assert_close, assert_same_bits, ints, poisoned
from tests.ops.tables import SAMPLE, STAGED, empty_step, row_state
from tests.ops.test_attention import qkv

KV_HEADS, SCALE = 2, 0.2
# (first position, tokens) of the rows that have chunks
CHUNKS = [(0, 5), (3, 20), (30, 1), (0, 40)]


@dataclass
class Mixed:
    """`bucket` decode tokens, of which some are dead, then chunks, then padding."""

    cache: Cache
    meta: Tensor
    segments: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    tables: tuple[Tensor, Tensor]
    bucket: int

    def decode(self, out: Tensor, hopper: bool, counts: Tensor | None, tokens: int) -> None:
        """fused_attention_decode_into of the first `tokens`; the Hopper kernel takes no counts, so
        it gets the decode tokens alone, as a decoder gives them.
        """
        if hopper and counts is not None:
            tokens, counts = max(0, min(tokens, int(counts[0]))), None
        q = self.q[:tokens]
        words = ops.attention_workspace_words(tokens, q.shape[1], KV_HEADS, q.shape[2])
        ops.fused_attention_decode_into(
            *(out[:tokens], q, self.k[:tokens], self.v[:tokens], self.cache.k, self.cache.v),
            *(self.meta[:tokens], self.cache.page_table, *self.tables, SCALE),
            workspace=torch.zeros(words, device=q.device),
            hopper=hopper,
            counts=counts,
        )

    def chunks(self, out: Tensor, hopper: bool, counts: Tensor | None, first: int = 0) -> Tensor:
        """rope_append_kv_ and paged_attention_into of the tokens from `first` on; returns q."""
        q, segments = self.q.clone(), self.segments.clone()
        segments[:, 1] -= first
        ops.rope_append_kv_(
            *(q[first:], self.k[first:], self.v[first:], self.cache.k, self.cache.v),
            *(self.meta[first:], self.cache.page_table, *self.tables),
            counts=counts,
        )
        ops.paged_attention_into(
            *(out[first:], q[first:], self.cache.k, self.cache.v, self.meta[first:], segments),
            *(self.cache.page_table, SCALE),
            hopper=hopper,
            counts=counts,
        )
        return q

    def clone(self) -> Mixed:
        return Mixed(**{**vars(self), "cache": self.cache.clone()})

    def out(self) -> Tensor:
        return poisoned(*self.q.shape, dtype=self.q.dtype, device=str(self.q.device))


def mixed(
    device: str, decodes: int, dtype: torch.dtype, head_dim: int = 64, q_heads: int = 6
) -> Mixed:
    """Decode tokens of rows 1 .. `decodes`, every fifth of them dead, and two that pad their
    bucket; then CHUNKS of rows behind those, and three tokens of padding.
    """
    rng = random.Random(decodes)
    rows = 1 + decodes + len(CHUNKS)
    cache = paged_cache(rows, 4, 16, KV_HEADS, head_dim, dtype, device)
    for row in range(1, rows):
        cache.fill(row, 64, seed=row)
    spans = [(row if row % 5 else 0, rng.randrange(60), 1) for row in range(1, decodes + 1)]
    spans += [(0, 0, 1)] * 2
    spans += [(1 + decodes + i, first, count) for i, (first, count) in enumerate(CHUNKS)]
    meta, segments = tokens_and_segments(spans, device, dead_after=3)
    q, k, v = (x.contiguous() for x in qkv(len(meta), q_heads, KV_HEADS, head_dim, dtype, device))
    return Mixed(
        cache, meta, segments, q, k, v, rotary_tables(64, head_dim, device), bucket=decodes + 2
    )


def counts_of(step: Mixed, decode_tokens: int) -> Tensor:
    return ints([decode_tokens, len(step.meta), len(step.segments)], str(step.q.device))


WAYS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "hopper"), WAYS, ids=str)
@pytest.mark.parametrize("decodes", [1, 6, 40])
def test_both_attentions_of_a_step_give_the_bits_they_give_alone(
    device: str, dtype: torch.dtype, hopper: bool, decodes: int
) -> None:
    """Neither touches the other's tokens; those that pad the bucket are the chunks', and zeros."""
    step = mixed(device, decodes, dtype)
    live = decodes - (decodes % 5 == 0)
    alone, expected = step.clone(), step.out()
    alone.decode(expected, hopper, None, live)
    rotated = alone.chunks(expected, hopper, None, first=live)

    out, counts = step.out(), counts_of(step, live)
    untouched = out.clone()
    step.decode(out, hopper, counts, step.bucket)
    assert_same_bits(out[:live], expected[:live])
    assert_same_bits(out[live:], untouched[live:])
    q = step.chunks(out, hopper, counts)
    assert_same_bits(out, expected)
    assert_same_bits(out[live : step.bucket], torch.zeros_like(out[live : step.bucket]))
    assert_same_bits(q, rotated)
    assert_same_bits(step.cache.k, alone.cache.k)
    assert_same_bits(step.cache.v, alone.cache.v)


@pytest.mark.parametrize("order", ["decode first", "chunks first"])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_mixed_step_is_near_the_float64_reference(device: str, hopper: bool, order: str) -> None:
    step = mixed(device, 7, torch.bfloat16, head_dim=128, q_heads=4)
    counts, out = counts_of(step, 7), step.out()
    exact, expected = step.cache.double(), torch.zeros_like(step.q, dtype=torch.float64)
    parts = step.q.double(), step.k.double(), step.v.double(), exact.k, exact.v, step.meta
    table = step.cache.page_table
    reference.fused_attention_decode_into(
        expected, *parts, table, *step.tables, SCALE, counts=counts
    )
    reference.rope_append_kv_(*parts, table, *step.tables, counts=counts)
    reference.paged_attention_into(
        *(expected, parts[0], exact.k, exact.v, step.meta, step.segments, table, SCALE),
        counts=counts,
    )
    if order == "decode first":
        step.decode(out, hopper, counts, step.bucket)
        step.chunks(out, hopper, counts)
    else:
        step.chunks(out, hopper, counts)
        step.decode(out, hopper, counts, step.bucket)
    for token_index in range(len(out)):
        assert_close(out[token_index], expected[token_index], slack=4)


@pytest.mark.parametrize(("dtype", "hopper"), WAYS, ids=str)
@pytest.mark.parametrize("decode_tokens", [-(2**31), -1, 0, 1, 5, 11, 20, 2**31 - 1])
def test_any_count_parts_a_step(
    device: str, dtype: torch.dtype, hopper: bool, decode_tokens: int
) -> None:
    """Also one in the midst of a chunk, below 0 or beyond the step; dead tokens are zeros on their
    own side.
    """
    step = mixed(device, 6, dtype)
    own = min(max(decode_tokens, 0), len(step.meta))
    counts, alone = counts_of(step, decode_tokens), step.clone()
    out, expected = step.out(), step.out()
    # decode attention takes tokens of distinct rows: those of the bucket
    first = min(own, step.bucket)
    step.decode(out, hopper, counts, step.bucket)
    alone.decode(expected, hopper, None, first)
    assert_same_bits(out, expected)
    alone.chunks(expected, hopper, None, first=own)
    step.chunks(out, hopper, counts)
    assert_same_bits(out, expected)
    assert_same_bits(step.cache.k, alone.cache.k)
    assert_same_bits(step.cache.v, alone.cache.v)


def test_the_count_is_read_when_the_kernel_runs(device: str) -> None:
    """A view of the step's counts, which a graph's head writes before each replay."""
    step = mixed(device, 6, torch.float32)
    counts, out = counts_of(step, 0), step.out()
    before = out.clone()
    step.decode(out, False, counts[:1], step.bucket)
    assert_same_bits(out, before)
    counts[0] = 6
    step.decode(out, False, counts[:1], step.bucket)
    assert out[:6].isfinite().all()
    assert_same_bits(out[6:], before[6:])


def test_a_steps_head_feeds_both_attentions(device: str) -> None:
    """begin_step_ fills decode_meta and counts from rows of which one ended: as the reference has
    it, and so are the keys and values.
    """
    state = row_state(
        device,
        {
            row: {RowColumn.LAST_TOKEN: 9, RowColumn.POSITION: 7 * row, RowColumn.ALIVE: row != 3}
            for row in (1, 2, 3, 4)
        },
        5,
    )
    segments = [[1, 0, 1, SAMPLE], [2, 1, 1, SAMPLE], [3, 2, 1, SAMPLE], [4, 3, 6, STAGED]]
    head = empty_step(device, state, segments, num_tokens=10)
    head.staged_ids[3:9] = ints(range(6), device)
    expected_head = head.clone()
    ops.begin_step_(*head.arguments())
    reference.begin_step_(*expected_head.arguments())
    assert head.counts.tolist() == expected_head.counts.tolist() == [2, 9, 2]

    cache = paged_cache(5, 3, 16, KV_HEADS, 64, torch.float32, device)
    for row in (1, 2, 3, 4):
        cache.fill(row, 7 * row, seed=row)
    exact = cache.double()
    q, k, v = (x.contiguous() for x in qkv(10, 4, KV_HEADS, 64, torch.float32, device))
    tables = rotary_tables(48, 64, device)
    step = Mixed(cache, head.decode_meta, head.segments, q, k, v, tables, bucket=3)
    out = step.out()
    step.decode(out, False, head.counts, step.bucket)
    step.chunks(out, False, head.counts)

    expected = torch.zeros_like(q, dtype=torch.float64)
    meta, counts = expected_head.decode_meta, expected_head.counts
    parts = q.double(), k.double(), v.double(), exact.k, exact.v, meta, cache.page_table
    reference.fused_attention_decode_into(expected, *parts, *tables, SCALE, counts=counts)
    reference.rope_append_kv_(*parts, *tables, counts=counts)
    reference.paged_attention_into(
        *(expected, parts[0], exact.k, exact.v, meta, head.segments, cache.page_table, SCALE),
        counts=counts,
    )
    assert_close(out, expected, slack=2)
    assert torch.equal(cache.k.isnan(), exact.k.isnan())
    assert_close(cache.k.nan_to_num(), exact.k.nan_to_num())
    assert_same_bits(cache.v.nan_to_num(), exact.v.nan_to_num().float())

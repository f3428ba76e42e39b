"""Rotation, KV writes and attention, against the float64 reference, over pages of many shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from tests.ops.caches import (
    Cache,
    contiguous_cache,
    paged_cache,
    rotary_tables,
    tokens_and_segments,
)
from tests.ops.numeric import DTYPES, assert_close, assert_same_bits, ints, poisoned, randn

# q heads, kv heads, head_dim
SHAPES = [
    (1, 1, 16),
    (3, 1, 64),
    (7, 1, 96),
    (6, 2, 64),
    (4, 4, 128),
    (9, 3, 2),
    (5, 5, 34),
    (2, 1, 256),
]
MANY_HEADS = (12, 4, 96)  # of a token more than two CTAs of the CUDA kernel that rotates has
# row, first position, tokens: decode, chunks, a dead token
MIXED = [(1, 0, 1), (2, 5, 3), (0, 0, 1), (4, 17, 1), (3, 0, 9)]
# tokens of decode_meta that cannot be: rows, positions or lengths outside the tables
GARBAGE_TOKENS = [[7, 3, 4, 99], [7, 3, 4, -1], [7, 500, 501, 1], [7, -2, 4, 1], [7, 3, -4, 1]]
GARBAGE_TOKENS += [[7, 2**31 - 1, 2**31 - 1, 1]]


def qkv(
    num_tokens: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one fused projection [tokens, (q heads + 2 kv heads) * head_dim],
    as a decoder has them.
    """
    fused = randn(
        num_tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device, seed=num_tokens
    )
    heads = fused.view(num_tokens, q_heads + 2 * kv_heads, head_dim)
    return (
        heads[:, :q_heads],
        heads[:, q_heads : q_heads + kv_heads],
        heads[:, q_heads + kv_heads :],
    )


def qk_norms(head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor | None, Tensor | None]:
    """Weights of q's and k's norms."""
    q, k = (randn(head_dim, dtype=dtype, device=device, seed=seed) for seed in (5, 6))
    return q, k


def filled_cache(
    kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, page_size: int = 4
) -> Cache:
    """Five rows of 24 positions, 20 of them filled; row 0's pages stay NaN: nobody may read
    them.
    """
    cache = paged_cache(5, -(-24 // page_size), page_size, kv_heads, head_dim, dtype, device)
    for row in range(1, 5):
        cache.fill(row, 20, seed=row)
    return cache


# --- rope_append_kv_ ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [*SHAPES, MANY_HEADS])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_append_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    meta, _ = tokens_and_segments(MIXED, device, dead_after=1)
    q, k, v = qkv(len(meta), q_heads, kv_heads, head_dim, dtype, device)
    cache = filled_cache(kv_heads, head_dim, dtype, device)
    cos, sin = rotary_tables(24, head_dim, device)
    norms = qk_norms(head_dim, dtype, device) if normed else (None, None)
    exact_q, exact = q.double(), cache.double()
    reference.rope_append_kv_(
        *(exact_q, k.double(), v.double(), exact.k, exact.v, meta, cache.page_table, cos, sin),
        *(norm if norm is None else norm.double() for norm in norms),
    )
    before_q, before_k, before_v = q.clone(), cache.k.clone(), cache.v.clone()
    ops.rope_append_kv_(q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin, *norms)

    live = meta[:, 2] > 0
    assert_close(q[live], exact_q[live])
    assert_same_bits(q[~live], before_q[~live])
    written = torch.zeros(cache.k.shape[:2], dtype=torch.bool)
    for token_index in meta[live].tolist():
        written[cache.place(token_index[3], token_index[1])] = True
    assert_close(cache.k[written], exact.k[written])
    assert_same_bits(cache.v[written], exact.v[written].to(dtype))
    assert_same_bits(cache.k[~written], before_k[~written])
    assert_same_bits(cache.v[~written], before_v[~written])


def test_rope_append_rounds_as_the_reference_does(device: str) -> None:
    """The norm is rounded to the dtype before the rotation: nearly all bits agree, which a
    kernel that skips the rounding cannot reach.
    """
    meta, _ = tokens_and_segments([(1, 0, 16)], device)
    q, k, v = qkv(16, 4, 2, 64, torch.bfloat16, device)
    cache = paged_cache(2, 2, 16, 2, 64, torch.bfloat16, device)
    cos, sin = rotary_tables(16, 64, device)
    norms = qk_norms(64, torch.bfloat16, device)
    expected_q, expected = q.clone(), cache.clone()
    reference.rope_append_kv_(
        expected_q, k, v, expected.k, expected.v, meta, cache.page_table, cos, sin, *norms
    )
    ops.rope_append_kv_(q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin, *norms)
    assert (q == expected_q).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_append_into_a_contiguous_cache(device: str, dtype: torch.dtype) -> None:
    meta, _ = tokens_and_segments([(0, 0, 1), (2, 7, 1), (1, 3, 2)], device)
    # without a row table row 0 is a row like any other
    meta[0] = torch.tensor([5, 2, 3, 0], device=device)
    q, k, v = qkv(4, 6, 2, 64, dtype, device)
    cache = contiguous_cache(3, 8, 2, 64, dtype, device)
    cos, sin = rotary_tables(8, 64, device)
    expected_q, expected = q.double(), cache.double()
    reference.rope_append_kv_(
        expected_q, k.double(), v.double(), expected.k, expected.v, meta, None, cos, sin
    )
    ops.rope_append_kv_(q, k, v, cache.k, cache.v, meta, None, cos, sin)
    assert_close(q, expected_q)
    assert torch.equal(cache.k.isnan(), expected.k.isnan())
    assert_close(cache.k.nan_to_num(), expected.k.nan_to_num())
    assert_same_bits(cache.v.nan_to_num(), expected.v.nan_to_num().to(dtype))


# --- paged_attention_into -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_attention_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    meta, segments = tokens_and_segments(MIXED, device, dead_after=2)
    q, _, _ = qkv(len(meta), q_heads, kv_heads, head_dim, dtype, device)
    cache = filled_cache(kv_heads, head_dim, dtype, device)
    scale = head_dim**-0.5
    out = poisoned(len(meta), q_heads, head_dim, dtype=dtype, device=device)
    ops.paged_attention_into(out, q, cache.k, cache.v, meta, segments, cache.page_table, scale)
    exact = cache.double()
    assert_close(
        out,
        reference.paged_attention(
            q.double(), exact.k, exact.v, meta, segments, cache.page_table, scale
        ),
        slack=2,
    )
    assert_same_bits(out[meta[:, 2] == 0], torch.zeros_like(out[meta[:, 2] == 0]))
    assert_same_bits(
        ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, scale), out
    )


@pytest.mark.parametrize(
    "spans", [[], [(1, 0, 1)], [(1, 19, 1), (2, 3, 1), (3, 0, 1)], [(2, 0, 20), (1, 7, 13)]]
)
@pytest.mark.parametrize("page_size", [1, 3, 16, 24])
def test_attention_over_pages_of_any_size(
    device: str, spans: list[tuple[int, int, int]], page_size: int
) -> None:
    meta, segments = tokens_and_segments(spans, device)
    q, _, _ = qkv(len(meta), 6, 2, 32, torch.float32, device)
    cache = filled_cache(2, 32, torch.float32, device, page_size)
    exact = cache.double()
    out = ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.2)
    assert_close(
        out,
        reference.paged_attention(
            q.double(), exact.k, exact.v, meta, segments, cache.page_table, 0.2
        ),
    )
    # the same values elsewhere: the same bits
    other = filled_cache(2, 32, torch.float32, device, page_size=4)
    assert_same_bits(
        out, ops.paged_attention(q, other.k, other.v, meta, segments, other.page_table, 0.2)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_a_contiguous_cache(device: str, dtype: torch.dtype) -> None:
    meta, segments = tokens_and_segments([(2, 4, 1), (1, 0, 3)], device)
    q, _, _ = qkv(4, 4, 2, 64, dtype, device)
    cache = contiguous_cache(3, 6, 2, 64, dtype, device)
    cache.fill(1, 3, seed=1)
    cache.fill(2, 5, seed=2)
    exact = cache.double()
    out = ops.paged_attention(q, cache.k, cache.v, meta, segments, None, 0.125)
    assert_close(
        out,
        reference.paged_attention(q.double(), exact.k, exact.v, meta, segments, None, 0.125),
        slack=2,
    )


@pytest.mark.parametrize("length", [1, 31, 257, 1000])
def test_attention_over_a_long_context_with_large_scores(device: str, length: int) -> None:
    """Scores up to some hundreds: a softmax that does not subtract the maximum overflows."""
    cache = paged_cache(2, 63, 16, 1, 64, torch.float32, device)
    cache.fill(1, length, seed=3)
    meta, segments = tokens_and_segments([(1, length - 1, 1)], device)
    q = 12 * randn(1, 3, 64, dtype=torch.float32, device=device)
    exact = cache.double()
    out = ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 1.0)
    assert_close(
        out,
        reference.paged_attention(
            q.double(), exact.k, exact.v, meta, segments, cache.page_table, 1.0
        ),
        slack=20,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(6, 2, 64), (7, 1, 34)])
def test_a_token_alone_has_the_bits_it_has_in_a_chunk_or_a_batch(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    spans = [(1, 3, 1), (2, 0, 12), (3, 18, 1), (4, 5, 2)]
    meta, segments = tokens_and_segments(spans, device)
    q, _, _ = qkv(len(meta), q_heads, kv_heads, head_dim, dtype, device)
    cache = filled_cache(kv_heads, head_dim, dtype, device)
    together = ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.3)
    for token_index, (_, position, _, row) in enumerate(meta.tolist()):
        alone_meta, alone_segments = tokens_and_segments([(row, position, 1)], device)
        alone = ops.paged_attention(
            q[token_index : token_index + 1],
            cache.k,
            cache.v,
            alone_meta,
            alone_segments,
            cache.page_table,
            0.3,
        )
        assert_same_bits(alone, together[token_index : token_index + 1])


def test_attention_writes_strided_tokens_and_nothing_between(device: str) -> None:
    meta, segments = tokens_and_segments([(1, 3, 1), (2, 5, 2)], device)
    q, _, _ = qkv(3, 4, 2, 32, torch.bfloat16, device)
    cache = filled_cache(2, 32, torch.bfloat16, device)
    buffer = poisoned(3, 4, 40, dtype=torch.bfloat16, device=device)
    ops.paged_attention_into(
        buffer[:, :, 3:35], q, cache.k, cache.v, meta, segments, cache.page_table, 0.2
    )
    assert_same_bits(
        buffer[:, :, 3:35],
        ops.paged_attention(
            q.contiguous(), cache.k, cache.v, meta, segments, cache.page_table, 0.2
        ),
    )
    assert buffer[:, :, :3].isnan().all()
    assert buffer[:, :, 35:].isnan().all()


# --- fused_attention_decode_into ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_fused_decode_does_what_its_two_parts_do(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    meta, segments = tokens_and_segments([(1, 0, 1), (3, 20, 1), (0, 0, 1), (2, 9, 1)], device)
    q, k, v = qkv(4, q_heads, kv_heads, head_dim, dtype, device)
    cache = filled_cache(kv_heads, head_dim, dtype, device)
    cos, sin = rotary_tables(24, head_dim, device)
    norms = qk_norms(head_dim, dtype, device) if normed else (None, None)
    exact, parts, scale = cache.double(), cache.clone(), head_dim**-0.5
    exact_out = torch.zeros(4, q_heads, head_dim, dtype=torch.float64, device=device)
    reference.fused_attention_decode_into(
        *(exact_out, q.double(), k.double(), v.double(), exact.k, exact.v, meta, cache.page_table),
        *(cos, sin, scale),
        *(norm if norm is None else norm.double() for norm in norms),
    )
    before = q.clone()
    out = poisoned(4, q_heads, head_dim, dtype=dtype, device=device)
    ops.fused_attention_decode_into(
        out, q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin, scale, *norms
    )
    assert_same_bits(q, before)
    assert_close(out, exact_out, slack=4)
    assert_same_bits(out[2], torch.zeros_like(out[2]))

    rotated = q.clone()
    ops.rope_append_kv_(rotated, k, v, parts.k, parts.v, meta, cache.page_table, cos, sin, *norms)
    in_parts = ops.paged_attention(
        rotated, parts.k, parts.v, meta, segments, cache.page_table, scale
    )
    assert_same_bits(cache.v, parts.v)
    if normed:  # each sums the squares in an order of its own
        assert_close(parts.k.nan_to_num(), exact.k.nan_to_num(), slack=4)
        assert_close(in_parts, exact_out, slack=4)
    else:
        assert_same_bits(cache.k, parts.k)
        assert_same_bits(out, in_parts)


def test_fused_decode_over_a_contiguous_cache_of_many_rows(device: str) -> None:
    rows = 33
    cache = contiguous_cache(rows, 8, 2, 16, torch.float32, device)
    spans = [(row, row % 8, 1) for row in range(1, rows)]
    for row, position, _ in spans:
        cache.fill(row, position, seed=row)
    meta, _ = tokens_and_segments(spans, device)
    q, k, v = qkv(len(spans), 6, 2, 16, torch.float32, device)
    cos, sin = rotary_tables(8, 16, device)
    exact, exact_out = (
        cache.double(),
        torch.zeros(len(spans), 6, 16, dtype=torch.float64, device=device),
    )
    reference.fused_attention_decode_into(
        exact_out, q.double(), k.double(), v.double(), exact.k, exact.v, meta, None, cos, sin, 0.25
    )
    out = torch.empty(len(spans), 6, 16, device=device)
    ops.fused_attention_decode_into(out, q, k, v, cache.k, cache.v, meta, None, cos, sin, 0.25)
    assert_close(out, exact_out, slack=4)


# --- garbage in the tables ------------------------------------------------------------------------


@pytest.mark.parametrize("token_index", [*GARBAGE_TOKENS, [7, 3, 2**31 - 1, 1]])
@pytest.mark.parametrize("paged", [True, False])
def test_garbage_in_decode_meta_touches_no_foreign_memory(
    device: str, token_index: list[int], paged: bool
) -> None:
    """Such a token's own output may be anything; the token beside it and all guarded memory stay
    right.
    """
    if paged:
        cache = paged_cache(2, 2, 4, 1, 16, torch.float32, device)
    else:
        cache = contiguous_cache(2, 8, 1, 16, torch.float32, device)
    cache.fill(1, 8, seed=1)
    meta, segments = tokens_and_segments([(1, 2, 1), (1, 2, 1)], device)
    q, k, v = qkv(2, 3, 1, 16, torch.float32, device)
    cos, sin = rotary_tables(8, 16, device)
    right = ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.2)[0]
    meta[1] = torch.tensor(token_index, device=device)
    assert_same_bits(
        ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.2)[0], right
    )
    ops.rope_append_kv_(q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin)
    out = torch.empty(2, 3, 16, device=device)
    ops.fused_attention_decode_into(
        out, q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin, 0.2
    )
    # row 0 was never named
    nobodys = [0] if not paged else [len(cache.k) - 1, *cache.page_table[0].tolist()]
    assert cache.k[nobodys].isnan().all()
    assert torch.isfinite(out[0]).all()


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("none", [-1, 99, -(2**31), 2**31 - 1])
def test_page_0_is_a_page_and_an_entry_that_is_none_is_not(
    device: str, none: int, hopper: bool
) -> None:
    """Row 1 has page 0 alone, and lives in it; all other pages are poison that nobody may read or
    write. Row 2 has none: all entries of a page table before its row is written.
    """
    cache = paged_cache(3, 2, 4, 1, 64, torch.bfloat16, device)
    cache.page_table = ints([[none, none], [0, none], [none, none]], device)
    cache.fill(1, 4, seed=1)
    exact = cache.double()
    meta, segments = tokens_and_segments([(1, 3, 1), (1, 2, 1), (2, 3, 1), (1, 5, 1)], device)
    q, k, v = (x.contiguous() for x in qkv(4, 4, 1, 64, torch.bfloat16, device))
    cos, sin = rotary_tables(8, 64, device)
    out = poisoned(4, 4, 64, dtype=torch.bfloat16, device=device)
    words = torch.zeros(ops.attention_workspace_words(4, 4, 1, 64), device=device)
    # tokens of distinct rows: of row 1 one at a time
    for tokens in (slice(0, 1), slice(1, 3), slice(3, 4)):
        ops.fused_attention_decode_into(
            *(out[tokens], q[tokens], k[tokens], v[tokens], cache.k, cache.v, meta[tokens]),
            *(cache.page_table, cos, sin, 0.2),
            workspace=words,
            hopper=hopper,
        )
        expected = q[tokens].double()
        reference.fused_attention_decode_into(
            *(expected, q[tokens].double(), k[tokens].double(), v[tokens].double()),
            *(exact.k, exact.v, meta[tokens], cache.page_table, cos, sin, 0.2),
        )
        assert_close(out[tokens], expected, slack=4)
    assert_same_bits(out[2:], torch.zeros_like(out[2:]))
    assert cache.k[0].isfinite().all()
    assert cache.k[1:].isnan().all()
    assert cache.v[1:].isnan().all()
    # the same through the two ops: a context is without the positions that have no page
    attended = ops.paged_attention(
        q, cache.k, cache.v, meta, segments, cache.page_table, 0.2, hopper
    )
    assert attended.isfinite().all()
    assert_same_bits(attended[2], torch.zeros_like(attended[2]))
    assert_close(
        attended[:2],
        reference.paged_attention(
            *(q[:2].double(), exact.k, exact.v, meta[:2], segments, cache.page_table, 0.2)
        ),
        slack=4,
    )
    before = cache.clone()
    ops.rope_append_kv_(
        *(q[2:], k[2:], v[2:], cache.k, cache.v, meta[2:], cache.page_table, cos, sin)
    )
    assert_same_bits(cache.k, before.k)
    assert_same_bits(cache.v, before.v)


@pytest.mark.parametrize("page", [-1, 99, 2**31 - 1])
def test_garbage_in_the_page_table_touches_no_foreign_memory(device: str, page: int) -> None:
    cache = paged_cache(2, 2, 4, 1, 16, torch.float32, device)
    cache.fill(1, 8, seed=1)
    assert cache.page_table is not None
    cache.page_table[1, 1] = page
    before = cache.k.clone()
    meta, segments = tokens_and_segments([(1, 6, 1)], device)
    q, k, v = qkv(1, 3, 1, 16, torch.float32, device)
    cos, sin = rotary_tables(8, 16, device)
    ops.rope_append_kv_(q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin)
    ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.2)
    assert_same_bits(cache.k, before)


@pytest.mark.parametrize(
    ("token_index", "rotated"),
    [
        ([7, 3, 4, 99], True),
        ([7, 6, 7, 1], True),
        ([7, 8, 9, 0], True),
        ([7, 20, 21, 1], False),
        ([7, 3, 0, 1], False),
    ],
)
def test_a_token_without_a_place_or_without_angles_writes_nothing(
    device: str, token_index: list[int], rotated: bool
) -> None:
    """A row outside the tables, a page outside the cache, a position beyond the row's pages, one
    beyond the angles, a dead token.
    """
    cache = paged_cache(2, 2, 4, 1, 16, torch.float32, device)
    cache.fill(1, 8, seed=1)
    assert cache.page_table is not None
    cache.page_table[1, 1] = 99
    before = cache.k.clone(), cache.v.clone()
    meta = torch.tensor([token_index], dtype=torch.int32, device=device)
    q, k, v = qkv(1, 3, 1, 16, torch.float32, device)
    cos, sin = rotary_tables(20, 16, device)
    out = torch.full_like(q, float("nan"))
    ops.fused_attention_decode_into(
        out, q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin, 0.2
    )
    assert_same_bits(out, torch.zeros_like(out))
    expected = q.double()
    if rotated:
        place = contiguous_cache(1, 20, 1, 16, torch.float64, device)
        meta_with_place = torch.tensor([[*token_index[:3], 0]], dtype=torch.int32, device=device)
        reference.rope_append_kv_(
            expected, k.double(), v.double(), place.k, place.v, meta_with_place, None, cos, sin
        )
    ops.rope_append_kv_(q, k, v, cache.k, cache.v, meta, cache.page_table, cos, sin)
    assert_close(q, expected)
    assert_same_bits(cache.k, before[0])
    assert_same_bits(cache.v, before[1])


def test_a_context_is_cut_where_its_row_ends_and_where_a_page_is_missing(device: str) -> None:
    cache = paged_cache(2, 3, 4, 1, 16, torch.float32, device)
    cache.fill(1, 12, seed=1)
    assert cache.page_table is not None
    q = qkv(4, 3, 1, 16, torch.float32, device)[0]
    meta, segments = tokens_and_segments([(1, 11, 1)] * 4, device)
    meta[1, 2] = 2**31 - 1  # beyond the row's pages
    meta[2, 3] = 99
    meta[3, 2] = 0
    all_of_them = ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.2)
    same_q = ops.paged_attention(
        q[:1].expand(4, 3, 16).contiguous(), cache.k, cache.v, meta, segments, cache.page_table, 0.2
    )
    assert_same_bits(same_q[1], all_of_them[0])
    assert_same_bits(all_of_them[2:], torch.zeros_like(all_of_them[2:]))
    two_pages = cache.page_table[:, [0, 2]].contiguous()
    expected = torch.empty(1, 3, 16, dtype=torch.float64, device=device)
    shorter, segment = tokens_and_segments([(1, 7, 1)], device)
    exact = cache.double()
    reference.paged_attention_into(
        expected, q[:1].double(), exact.k, exact.v, shorter, segment, two_pages, 0.2
    )
    cache.page_table[1, 1] = -1
    assert_close(
        ops.paged_attention(q, cache.k, cache.v, meta, segments, cache.page_table, 0.2)[:1],
        expected,
    )

"""Keys and values in fp8: what is appended is what the reference stores of the numbers that a cache
of the op's dtype gets, bit for bit; attention is near the float64 reference of the stored numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from tests.ops.caches import (
    Fp8Cache,
    assert_same_cache,
    contiguous_cache,
    rotary_tables,
    tokens_and_segments,
)
from tests.ops.numeric import DTYPES, assert_close, assert_same_bits, ints, poisoned
from tests.ops.test_attention import MANY_HEADS, MIXED, SHAPES, filled_cache, qk_norms, qkv
from tests.ops.test_opcheck import overload

LENGTH = 24  # positions of a row


def append(q: Tensor, k: Tensor, v: Tensor, cache: Fp8Cache, meta: Tensor, *rest: Any) -> None:
    ops.rope_append_kv_(
        q, k, v, cache.k, cache.v, meta, cache.page_table, *rest, kv_scale=cache.scale
    )


def attended(q: Tensor, cache: Fp8Cache, meta: Tensor, segments: Tensor, scale: float) -> Tensor:
    return ops.paged_attention(
        q, cache.k, cache.v, meta, segments, cache.page_table, scale, kv_scale=cache.scale
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [*SHAPES, MANY_HEADS])
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_appended_is_what_a_plain_cache_gets_rounded(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    """All other places stay as they are, and queries become what they become there."""
    meta, _ = tokens_and_segments(MIXED, device, dead_after=1)
    q, k, v = qkv(len(meta), q_heads, kv_heads, head_dim, dtype, device)
    plain = filled_cache(kv_heads, head_dim, dtype, device)
    cache, own_q = Fp8Cache.of(plain), q.clone()
    cos, sin = rotary_tables(LENGTH, head_dim, device)
    norms = qk_norms(head_dim, dtype, device) if normed else (None, None)
    ops.rope_append_kv_(q, k, v, plain.k, plain.v, meta, plain.page_table, cos, sin, *norms)
    append(own_q, k, v, cache, meta, cos, sin, *norms)
    assert_same_bits(own_q, q)
    assert_same_cache(cache, Fp8Cache.of(plain))


def test_the_reference_appends_so_too() -> None:
    meta, _ = tokens_and_segments(MIXED, "cpu")
    q, k, v = qkv(len(meta), 6, 2, 64, torch.float32, "cpu")
    plain = filled_cache(2, 64, torch.float32, "cpu")
    cache, tables = Fp8Cache.of(plain), rotary_tables(LENGTH, 64, "cpu")
    step = meta, plain.page_table, *tables
    reference.rope_append_kv_(q.clone(), k, v, plain.k, plain.v, *step)
    reference.rope_append_kv_(q, k, v, cache.k, cache.v, *step, kv_scale=cache.scale)
    assert_same_cache(cache, Fp8Cache.of(plain))
    expected = attended(q, cache, meta, tokens_and_segments(MIXED, "cpu")[1], 0.2)
    found = reference.paged_attention(
        q, cache.k, cache.v, meta, meta, cache.page_table, 0.2, kv_scale=cache.scale
    )
    assert_close(found, expected.double())


def test_numbers_are_rounded_to_the_nearest_of_e4m3(device: str) -> None:
    """Every one of them, what lies between two of them and on either side of that; beside heads of
    zeros, and of the smallest and the largest numbers of float32.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    all_of_them = [codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])]
    numbers = torch.cat([*all_of_them, *(-part for part in all_of_them)])
    heads = torch.nn.functional.pad(numbers, (0, -len(numbers) % 15)).view(-1, 15)
    heads = torch.cat([heads, heads.new_full((len(heads), 1), 448.0)], dim=1)  # so scales are 1
    extremes = heads.new_zeros(8, 16)
    for row, most in enumerate((1e-45, 1e-43, 1e-41, 1e-38, 3e38, float("inf"))):
        extremes[row + 1] = most * torch.linspace(-1, 1, 16)
    extremes[7, 3] = float("nan")
    v = torch.cat([heads, extremes])[:, None].to(device)
    meta, _ = tokens_and_segments([(1, 0, len(v))], device)
    meta[:, 3] = 0
    plain = contiguous_cache(1, len(v), 1, 16, torch.float32, device)
    plain.k.fill_(0.0)
    plain.v.fill_(0.0)
    cache = Fp8Cache.of(plain)
    append(v.clone(), torch.zeros_like(v), v, cache, meta, *rotary_tables(len(v), 16, device))
    expected, scale = reference.quantize_heads(v[:-2])
    assert torch.equal(cache.v[0, :-2].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(cache.scale[0, 1, 0, :-2], scale[:, 0])
    assert (scale[: len(heads)] == 1).all()
    assert not cache.double().v[0, -2:].isfinite().any(), "what is not a number spoils its head"
    assert not cache.k.float().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_attention_is_near_the_reference_of_the_stored_numbers(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    meta, segments = tokens_and_segments(MIXED, device, dead_after=1)
    q, _, _ = qkv(len(meta), q_heads, kv_heads, head_dim, dtype, device)
    cache = Fp8Cache.of(filled_cache(kv_heads, head_dim, dtype, device))
    exact, scale = cache.double(), head_dim**-0.5
    assert_close(
        attended(q, cache, meta, segments, scale),
        reference.paged_attention(
            q.double(), exact.k, exact.v, meta, segments, exact.page_table, scale
        ),
        slack=2,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_fused_decode_does_what_its_two_parts_do(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    """It attends to its own key and value as they are stored, with `hopper`, too."""
    meta, segments = tokens_and_segments([(1, 0, 1), (3, 20, 1), (0, 0, 1), (2, 9, 1)], device)
    q, k, v = qkv(4, q_heads, kv_heads, head_dim, dtype, device)
    cache = Fp8Cache.of(filled_cache(kv_heads, head_dim, dtype, device))
    tables = rotary_tables(LENGTH, head_dim, device)
    norms = qk_norms(head_dim, dtype, device) if normed else (None, None)
    parts, scale = cache.clone(), head_dim**-0.5
    words = ops.attention_workspace_words(4, q_heads, kv_heads, head_dim)
    for hopper in (False, True):
        out = poisoned(4, q_heads, head_dim, dtype=dtype, device=device)
        ops.fused_attention_decode_into(
            *(out, q, k, v, cache.k, cache.v, meta, cache.page_table, *tables, scale, *norms),
            workspace=torch.zeros(words, device=device),
            hopper=hopper,
            kv_scale=cache.scale,
        )
        rotated = q.clone()
        append(rotated, k, v, parts, meta, *tables, *norms)
        assert_same_bits(out[2], torch.zeros_like(out[2]))
        exact = cache.double()
        expected = reference.paged_attention(
            rotated.double(), exact.k, exact.v, meta, segments, exact.page_table, scale
        )
        assert_close(out, expected, slack=4)
        if normed:  # each sums the squares in an order of its own
            same = (cache.k.view(torch.uint8) == parts.k.view(torch.uint8)).float().mean()
            assert same > 0.99
        else:
            assert_same_cache(cache, parts)
            if not hopper:
                assert_same_bits(out, attended(rotated, parts, meta, segments, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(6, 2, 64), (7, 1, 34)])
def test_a_token_alone_has_the_bits_it_has_in_a_chunk_or_a_batch(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    meta, segments = tokens_and_segments([(1, 3, 1), (2, 0, 12), (3, 18, 1), (4, 5, 2)], device)
    q, k, v = qkv(len(meta), q_heads, kv_heads, head_dim, dtype, device)
    cache = Fp8Cache.of(filled_cache(kv_heads, head_dim, dtype, device))
    one_by_one, tables = cache.clone(), rotary_tables(LENGTH, head_dim, device)
    rotated = q.clone()
    append(rotated, k, v, cache, meta, *tables)
    together = attended(rotated, cache, meta, segments, 0.3)
    for i, (_, position, _, row) in enumerate(meta.tolist()):
        own, (own_meta, own_segments) = (
            slice(i, i + 1),
            tokens_and_segments([(row, position, 1)], device),
        )
        alone = q[own].clone()
        append(alone, k[own], v[own], one_by_one, own_meta, *tables)
        assert_same_bits(attended(alone, one_by_one, own_meta, own_segments, 0.3), together[own])
    assert_same_cache(one_by_one, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_any_strides_and_contiguous_caches_hold_the_same(
    device: str, dtype: torch.dtype
) -> None:
    meta, segments = tokens_and_segments([(1, 4, 1), (2, 7, 3)], device)
    q, k, v = qkv(4, 6, 2, 32, dtype, device)
    tables = rotary_tables(LENGTH, 32, device)
    pages = filled_cache(2, 32, dtype, device)
    rows = contiguous_cache(5, LENGTH, 2, 32, dtype, device)
    for row in range(1, 5):
        rows.fill(row, 20, seed=row)
    bits = []
    caches = [Fp8Cache.of(pages), Fp8Cache.of(rows), Fp8Cache.of(pages)]
    caches[2] = replace(caches[2], k=_apart(caches[2].k), v=_apart(caches[2].v))
    for cache in caches:
        rotated = q.clone()
        append(rotated, k, v, cache, meta, *tables)
        bits.append(attended(rotated, cache, meta, segments, 0.2))
    assert_same_bits(bits[1], bits[0])
    assert_same_bits(bits[2], bits[0])


def _apart(codes: Tensor) -> Tensor:
    """The same numbers in heads of one byte more, so that none is a whole vector from the next."""
    wider = torch.nn.functional.pad(codes.view(torch.uint8), (0, 1))
    return wider[..., :-1].view(torch.float8_e4m3fn)


def test_each_attention_of_a_mixed_step_leaves_the_others_tokens_alone(device: str) -> None:
    meta, segments = tokens_and_segments([(1, 3, 1), (3, 18, 1), (2, 0, 12), (4, 5, 2)], device)
    q, k, v = qkv(len(meta), 6, 2, 64, torch.float32, device)
    before = Fp8Cache.of(filled_cache(2, 64, torch.float32, device))
    tables, counts = rotary_tables(LENGTH, 64, device), ints([2, len(meta), 4], device)
    mixed, apart = before.clone(), before.clone()
    out = poisoned(*q.shape, dtype=q.dtype, device=device)
    rotated = q.clone()
    append(rotated, k, v, mixed, meta, *tables, None, None, 1e-6, counts)
    assert_same_bits(rotated[:2], q[:2])
    ops.paged_attention_into(
        *(out, rotated, mixed.k, mixed.v, meta, segments, mixed.page_table, 0.2),
        counts=counts,
        kv_scale=mixed.scale,
    )
    assert out[:2].isnan().all()
    ops.fused_attention_decode_into(
        *(out, q, k, v, mixed.k, mixed.v, meta, mixed.page_table, *tables, 0.2),
        counts=counts,
        kv_scale=mixed.scale,
    )
    expected = q.clone()
    append(expected, k, v, apart, meta, *tables)
    assert_same_cache(mixed, apart)
    assert_same_bits(out, attended(expected, apart, meta, segments, 0.2))


def test_what_is_nowhere_is_neither_read_nor_written(device: str) -> None:
    """Rows and positions outside of the tables, and pages that are none."""
    plain = filled_cache(1, 16, torch.float32, device)
    cache = Fp8Cache.of(plain)
    assert cache.page_table is not None
    cache.page_table[1, 1] = 99
    meta = ints([[7, 3, 4, 99], [7, 6, 7, 1], [7, 500, 501, 1], [7, -2, 4, 1]], device)
    q, k, v = qkv(4, 3, 1, 16, torch.float32, device)
    tables, before = rotary_tables(LENGTH, 16, device), cache.clone()
    out = poisoned(*q.shape, dtype=q.dtype, device=device)
    ops.fused_attention_decode_into(
        *(out, q, k, v, cache.k, cache.v, meta, cache.page_table, *tables, 0.2),
        kv_scale=cache.scale,
    )
    assert_same_bits(out, torch.zeros_like(out))
    append(q.clone(), k, v, cache, meta, *tables)
    assert_same_cache(cache, before)
    reads, segments = tokens_and_segments([(1, 7, 1)], device)
    exact, two = cache.double(), cache.page_table[:, [0, 2]].contiguous()
    shorter, _ = tokens_and_segments([(1, 3, 1)], device)
    assert_close(
        attended(q[:1], cache, reads, segments, 0.2),
        reference.paged_attention(q[:1].double(), exact.k, exact.v, shorter, segments, two, 0.2),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "kv_scale is None, expected float32 [pages, 2, KV heads, page size]"),
        ({"scale": torch.Tensor.half}, "kv_scale has dtype float16, expected float32"),
        (
            {"scale": lambda scale: scale[:, :1]},
            "kv_scale has shape [31, 1, 2, 4], expected [31, 2, 2, 4] ([pages, 2, KV heads",
        ),
        (
            {"scale": lambda scale: scale.transpose(2, 3).contiguous().transpose(2, 3)},
            "expected a contiguous tensor",
        ),
        (
            {"v": torch.Tensor.float},
            "v_cache has dtype float32, expected float8_e4m3fn, the dtype of k_cache",
        ),
        (
            {"k": torch.Tensor.float, "v": torch.Tensor.float},
            "kv_scale is a tensor, expected None, because k_cache is not float8_e4m3fn",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    cache = Fp8Cache.of(filled_cache(2, 16, torch.float32, "cpu"))
    for name, change in changes.items():
        setattr(cache, name, change and change(getattr(cache, name)))
    meta, segments = tokens_and_segments([(1, 3, 1)], "cpu")
    q, k, v = qkv(1, 4, 2, 16, torch.float32, "cpu")
    tables = rotary_tables(LENGTH, 16, "cpu")
    attends = cache.k, cache.v, meta, cache.page_table
    with pytest.raises(RuntimeError) as found:
        attended(q, cache, meta, segments, 0.2)
    assert message in str(found.value)
    with pytest.raises(RuntimeError) as found:
        append(q, k, v, cache, meta, *tables)
    assert message in str(found.value)
    with pytest.raises(RuntimeError) as found:
        ops.fused_attention_decode_into(
            torch.zeros_like(q), q, k, v, *attends, *tables, 0.2, kv_scale=cache.scale
        )
    assert message in str(found.value)


def test_the_scales_are_written_apart_from_what_is_read() -> None:
    cache = Fp8Cache.of(filled_cache(2, 16, torch.float32, "cpu"))
    meta, _ = tokens_and_segments([(1, 3, 1)], "cpu")
    q, _, v = qkv(1, 4, 2, 16, torch.float32, "cpu")
    k = cache.scale.view(-1)[:32].view(1, 2, 16)
    with pytest.raises(RuntimeError, match="kv_scale shares memory with k, expected separate"):
        append(q, k, v, cache, meta, *rotary_tables(LENGTH, 16, "cpu"))


def test_ops_run_on_fake_tensors() -> None:
    """torch's check of schemas knows no fp8."""
    cache = Fp8Cache.of(filled_cache(2, 16, torch.float32, "cpu"))
    meta, segments = tokens_and_segments([(1, 3, 1), (2, 5, 2)], "cpu")
    q, k, v = (x.contiguous() for x in qkv(3, 4, 2, 16, torch.float32, "cpu"))
    tables = rotary_tables(LENGTH, 16, "cpu")
    caches, out = (cache.k, cache.v, meta), torch.zeros_like(q)
    calls = {
        "rope_append_kv_": (q, k, v, *caches, cache.page_table, *tables),
        "paged_attention_into": (out, q, *caches, segments, cache.page_table, 0.2),
        "fused_attention_decode_into": (out, q, k, v, *caches, cache.page_table, *tables, 0.2),
    }
    for name, arguments in calls.items():
        scale = {"kv_scale": cache.scale}
        torch.library.opcheck(overload(name), arguments, scale, test_utils=("test_faketensor",))

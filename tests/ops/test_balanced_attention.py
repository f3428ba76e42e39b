"""paged_attention_into with hopper=True and a workspace: the work of a step dealt evenly to all
SMs, near the float64 reference.

On the CPU neither changes anything, and these tests hold for the portable kernel; they are written
for the CUDA one, on a GPU or emulated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from photon_ext import ops
from tests.ops import test_chunk_attention as chunk_attention
from tests.ops.caches import Cache, heads_first, rotary_tables, tokens_and_segments
from tests.ops.numeric import assert_close, assert_same_bits, ints, poisoned
from tests.ops.test_attention import qkv
from tests.ops.test_chunk_attention import Span, filled_rows, make_plan, queries, set_sms

BF16 = torch.bfloat16
KV_TILE = 128  # positions
MOST_TOKENS = 4096
HEAD_DIMS = [64, 128]
BOTH_KINDS = pytest.mark.parametrize("exact", [False, True])


def make_workspace(head_dim: int, device: str, ctas: int = 132, exact: bool = False) -> Tensor:
    return torch.zeros(ops.chunk_workspace_words(head_dim, ctas, exact), device=device)


def attend(
    q: Tensor,
    cache: Cache,
    meta: Tensor,
    segments: Tensor,
    workspace: Tensor | None,
    exact: bool = False,
) -> Tensor:
    return chunk_attention.attend(q, cache, meta, segments, workspace=workspace, exact=exact)


def check_near_the_reference(
    spans: list[Span],
    group: int,
    kv_heads: int,
    head_dim: int,
    device: str,
    ctas: int = 132,
    exact: bool = False,
) -> None:
    workspace = make_workspace(head_dim, device, ctas, exact)
    sizes = group, kv_heads, head_dim
    chunk_attention.check_near_the_reference(
        spans, *sizes, device, workspace=workspace, exact=exact
    )


# --- right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@BOTH_KINDS
def test_mixed_steps_are_near_the_float64_reference(
    device: str, exact: bool, head_dim: int, group: int
) -> None:
    """Two chunks, decode tokens, a dead segment and padding."""
    spans = [(2, 100, 65), (1, 40, 1), (0, 0, 1), (4, 77, 1), (3, 0, 130 // group)]
    check_near_the_reference(spans, group, 1 + group % 2, head_dim, device, exact=exact)


@pytest.mark.parametrize("context", [0, 1, KV_TILE - 1, KV_TILE, 3 * KV_TILE - 20])
@pytest.mark.parametrize("chunk", [1, 2, 31, 32, 33, 130])
def test_chunks_over_contexts_are_near_the_float64_reference(
    device: str, chunk: int, context: int
) -> None:
    check_near_the_reference([(1, context, chunk)], 4, 1, HEAD_DIMS[chunk % 2], device)


@pytest.mark.parametrize("sms", [1, 3, 7, 40])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cta_ranges_of_every_size_are_near_the_float64_reference(
    device: str, head_dim: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CTA has many query tiles, or a context has many CTAs; query tiles begin and end at the ends
    of CTA ranges and within them, and rows have contexts that end in other partial tiles. With 40
    CTAs each has one partial tile at most.
    """
    set_sms(monkeypatch, device, sms)
    spans = [(1, 1100, 40), (2, 1, 1), (0, 0, 1), (3, 450, 3), (4, 0, 64)]
    check_near_the_reference(spans, 4, 2, head_dim, device, sms)


@BOTH_KINDS
def test_many_rows_of_one_token_are_near_the_float64_reference(device: str, exact: bool) -> None:
    spans = [(row, 5 * row % 90, 1) for row in range(1, 34)]
    check_near_the_reference(spans, 4, 2, 64, device, exact=exact)


@BOTH_KINDS
def test_a_step_of_dead_tokens_is_zeros(device: str, exact: bool) -> None:
    cache, q = filled_rows([(1, 0, 5)], 2, 64, device), queries(40, 4, 64, device)
    meta, segments = torch.zeros(40, 4, dtype=torch.int32, device=device), ints([[0] * 4], device)
    out = attend(q, cache, meta, segments, make_workspace(64, device, exact=exact), exact)
    assert_same_bits(out, torch.zeros_like(out))


@BOTH_KINDS
def test_decode_tokens_are_left_as_they_are(device: str, exact: bool) -> None:
    """The device's counts say how many there are; chunks have the bits that they have alone."""
    spans = [(1, 90, 1), (2, 5, 1), (3, 200, 70)]
    cache, q = filled_rows(spans, 2, 128, device), queries(72, 8, 128, device)
    meta, segments = tokens_and_segments(spans, device)
    workspace, table = make_workspace(128, device, exact=exact), cache.page_table
    alone = attend(q[2:], cache, meta[2:], segments[2:], workspace, exact)
    out = poisoned(*q.shape, dtype=BF16, device=device)
    before = out.clone()
    arguments = out, q, cache.k, cache.v, meta, segments[2:], table, 128**-0.5
    counts = ints([2, 72, 3], device)
    plan = make_plan(q, cache, meta, workspace, counts, exact)
    memory = {"workspace": workspace, "plan": plan, "exact": exact}
    ops.paged_attention_into(*arguments, hopper=True, counts=counts, **memory)
    assert_same_bits(out[:2], before[:2])
    assert_same_bits(out[2:], alone)


@BOTH_KINDS
def test_behind_a_rotation_it_may_start_early(device: str, exact: bool) -> None:
    """Queries, keys and values are there only when the kernel before has ended."""
    spans = [(1, 300, 70), (2, 0, 33), (3, 40, 1)]
    meta, segments = tokens_and_segments(spans, device)
    q, k, v = qkv(len(meta), 4, 2, 64, BF16, device)
    outs = []
    for pdl in (False, True, True):
        cache, own = filled_rows(spans, 2, 64, device), q.clone()
        workspace = make_workspace(64, device, exact=exact)
        out, pages = poisoned(*q.shape, dtype=BF16, device=device), (cache.k, cache.v)
        plan = make_plan(own, cache, meta, workspace, exact=exact)
        memory = {"workspace": workspace, "plan": plan, "exact": exact}
        ops.rope_append_kv_(
            own, k, v, *pages, meta, cache.page_table, *rotary_tables(512, 64, device)
        )
        step = meta, segments, cache.page_table, 64**-0.5
        ops.paged_attention_into(out, own, *pages, *step, hopper=True, pdl=pdl, **memory)
        outs.append(out)
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


# --- again and again ------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [3, 40])
def test_a_step_has_the_same_bits_every_time(
    device: str, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever CTA comes last; and the workspace serves steps of other sizes in between."""
    set_sms(monkeypatch, device, sms)
    workspace = make_workspace(64, device, sms)
    steps = [[(1, 1000, 40)], [(1, 0, 9), (2, 700, 33)], [(1, 300, 1)]]
    expected: list[Tensor] = []
    for turn in range(3):
        for index, spans in enumerate(steps):
            cache = filled_rows(spans, 2, 64, device)
            meta, segments = tokens_and_segments(spans, device)
            q = queries(len(meta), 8, 64, device, seed=index)
            out = attend(q, cache, meta, segments, workspace)
            if turn == 0:
                expected.append(out)
            assert_same_bits(out, expected[index])


# --- values that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sms", [1, 7])
def test_what_is_not_finite_reaches_those_that_attend_to_it_alone(
    device: str, sms: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sms(monkeypatch, device, sms)
    spans, begin, column = [(1, 100, 190)], 33, 13
    cache, q = filled_rows(spans, 1, 64, device), queries(190, 2, 64, device)
    step = (*tokens_and_segments(spans, device), make_workspace(64, device, sms))
    before = attend(q, cache, *step)
    cache.v[(*cache.place(1, 100 + begin), 0, column)] = bad
    after = attend(q, cache, *step)
    assert not after[begin:, :, column].isfinite().any()
    after[begin:, :, column] = before[begin:, :, column]
    assert_same_bits(after, before)
    cache.k[cache.place(1, 100 + begin)] = float("nan")
    after = attend(q, cache, *step)
    assert_same_bits(after[:begin], before[:begin])
    assert not after[begin:].isfinite().any()


# --- where it does not fit ------------------------------------------------------------------------


def test_it_is_another_kernel(device: str) -> None:
    if device == "cpu" and "PHOTON_OPS_LIBRARY" not in os.environ:
        pytest.skip("the CPU has one kernel")
    spans = [(1, 60, 64)]
    cache, q = filled_rows(spans, 1, 64, device), queries(64, 4, 64, device)
    step = tokens_and_segments(spans, device)
    balanced = attend(q, cache, *step, make_workspace(64, device))
    assert not torch.equal(balanced, attend(q, cache, *step, None))


@pytest.mark.parametrize(("head_dim", "page_size"), [(96, 16), (256, 16), (64, 23), (128, 8)])
def test_other_head_dims_and_pages_run_chunk_attention(
    device: str, head_dim: int, page_size: int
) -> None:
    spans = [(1, 60, 64)]
    cache = filled_rows(spans, 1, head_dim, device, page_size)
    q, step = queries(64, 4, head_dim, device), tokens_and_segments(spans, device)
    workspace = make_workspace(head_dim, device)
    assert_same_bits(attend(q, cache, *step, workspace), attend(q, cache, *step, None))


def with_strides(cache: Cache, gap: int) -> Cache:
    """A copy whose heads stand side by side in a token, `gap` elements from token to token."""
    pages, page_size, heads, head_dim = cache.k.shape

    def copy(x: Tensor) -> Tensor:
        wide = x.new_full((pages, page_size, heads * head_dim + gap), torch.nan)
        return wide[:, :, : heads * head_dim].view(x.shape).copy_(x)

    return replace(cache, k=copy(cache.k), v=copy(cache.v))


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_do_not_depend_on_how_the_cache_lies(device: str, head_dim: int, gap: int) -> None:
    spans = [(1, 60, 64), (2, 0, 33)]
    cache = filled_rows(spans, 2, head_dim, device)
    q, step = queries(97, 6, head_dim, device), tokens_and_segments(spans, device)
    step = (*step, make_workspace(head_dim, device))
    assert_same_bits(attend(q, with_strides(cache, gap), *step), attend(q, cache, *step))


@pytest.mark.parametrize("lay", [partial(with_strides, gap=8), heads_first])
def test_what_a_tensor_copy_does_not_take_runs_chunk_attention(
    device: str, lay: Callable[[Cache], Cache]
) -> None:
    spans = [(1, 60, 64)]
    cache = filled_rows(spans, 2, 64, device)
    q, step = queries(64, 4, 64, device), tokens_and_segments(spans, device)
    expected = attend(q, cache, *step, None)
    balanced = attend(q, lay(cache), *step, make_workspace(64, device))
    assert_same_bits(balanced, expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_and_values_in_fp8_run_chunk_attention(device: str, head_dim: int) -> None:
    spans = [(1, 60, 64)]
    cache = filled_rows(spans, 1, head_dim, device, fp8=True)
    q, step = queries(64, 4, head_dim, device), tokens_and_segments(spans, device)
    balanced = attend(q, cache, *step, make_workspace(head_dim, device))
    assert_same_bits(balanced, attend(q, cache, *step, None))


def test_a_step_of_too_many_tokens_runs_chunk_attention(device: str) -> None:
    spans = [(1, 0, 5)]
    cache, q = filled_rows(spans, 1, 64, device), queries(MOST_TOKENS + 1, 1, 64, device)
    meta, segments = tokens_and_segments(spans, device, dead_after=MOST_TOKENS - 4)
    step = meta, segments
    balanced = attend(q, cache, *step, make_workspace(64, device))
    assert_same_bits(balanced, attend(q, cache, *step, None))


def test_a_step_of_as_many_tokens_as_it_takes(device: str) -> None:
    """Live ones at both ends."""
    spans = [(1, 0, 5)]
    cache, q = filled_rows(spans, 1, 64, device), queries(MOST_TOKENS, 1, 64, device)
    meta, segments = tokens_and_segments(spans, device, dead_after=MOST_TOKENS - 5)
    meta[-1] = meta[4]
    q[-1] = q[4]
    out = attend(q, cache, meta, segments, make_workspace(64, device))
    assert_same_bits(out[-1], out[4])
    assert not out[5:-1].any()
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("workspace", "error"),
    [
        (torch.zeros(9), r"workspace has shape \[9\], expected dimension 0 to be at least 16960"),
        (torch.zeros(17000).half(), "workspace has dtype float16, expected float32"),
    ],
)
def test_a_workspace_that_is_none_is_refused(workspace: Tensor, error: str) -> None:
    cache, q = filled_rows([(1, 0, 5)], 1, 64, "cpu"), queries(5, 1, 64, "cpu")
    with pytest.raises(RuntimeError, match=error):
        attend(q, cache, *tokens_and_segments([(1, 0, 5)], "cpu"), workspace)


@pytest.mark.parametrize(("head_dim", "ctas"), [(0, 1), (64, 0)])
def test_a_workspace_of_no_size_is_refused(head_dim: int, ctas: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim {head_dim}, ctas {ctas}; both must be"):
        ops.chunk_workspace_words(head_dim, ctas)


# --- garbage in the tables ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token_index",
    [[7, 3, 4, 99], [7, 3, 4, -1], [7, 500, 501, 1], [7, 3, -4, 1], [7, 3, 2**31 - 1, 2]],
)
def test_garbage_in_decode_meta_touches_no_other_token(device: str, token_index: list[int]) -> None:
    spans = [(1, 2, 18), (2, 0, 9)]
    cache, q = filled_rows(spans, 1, 64, device), queries(27, 3, 64, device)
    meta, segments = tokens_and_segments(spans, device)
    workspace = make_workspace(64, device)
    right = attend(q, cache, meta, segments, workspace)
    meta[7] = ints(token_index, device)
    others = [index for index in range(27) if index != 7]
    out = attend(q, cache, meta, segments, workspace)
    for index in others:
        assert_close(out[index], right[index].double(), slack=2)


@pytest.mark.parametrize("page", [-1, 99, 2**31 - 1])
def test_garbage_in_the_page_table_touches_no_other_row(device: str, page: int) -> None:
    spans = [(1, 0, 40), (2, 10, 30)]
    cache, q = filled_rows(spans, 1, 64, device), queries(70, 2, 64, device)
    step = (*tokens_and_segments(spans, device), make_workspace(64, device))
    right = attend(q, cache, *step)
    assert cache.page_table is not None
    cache.page_table[1, 1] = page
    out = attend(q, cache, *step)
    assert_same_bits(out[:16], right[:16])
    assert_same_bits(out[40:], right[40:])
    assert out.isfinite().all()

"""paged_attention_into with hopper=True: chunks by matrix instructions, near the float64 reference
and free of what else is in the step; keys and values in bfloat16, and in fp8.

On the CPU `hopper` changes nothing, and these tests hold for the portable kernel; they are written
for the CUDA one, on a GPU or emulated.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.layout import Meta
from tests.ops.caches import (
    Cache,
    Fp8Cache,
    contiguous_cache,
    paged_cache,
    tokens_and_segments,
)
from tests.ops.numeric import assert_close, assert_same_bits, ints, poisoned, randn

BF16 = torch.bfloat16
HEAD_DIMS = [64, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 7, 8, 16]  # query heads of a KV head
CHUNKS = [1, 2, 5, 16, 63, 64, 65, 130, 300]
CONTEXTS = [0, 1, 15, 64, 100, 1100]
PAGE_SIZES = [16, 64, 1, 23]
FP8 = pytest.mark.parametrize("fp8", [False, True])  # keys and values
WHOLE_KEYS = 1024  # of the longest context that is not cut
Span = tuple[int, int, int]  # row, first position, tokens


def queries(num_tokens: int, q_heads: int, head_dim: int, device: str, seed: int = 0) -> Tensor:
    """A view of a fused projection, as a decoder has it: tokens are further apart than their
    heads are long.
    """
    return randn(num_tokens, q_heads + 4, head_dim, dtype=BF16, device=device, seed=seed)[
        :, 2 : q_heads + 2
    ]


def filled_rows(
    spans: list[Span],
    kv_heads: int,
    head_dim: int,
    device: str,
    page_size: int = 16,
    fp8: bool = False,
) -> Cache:
    """A cache whose rows hold just the positions that the spans reach; the rest is NaN.

    Values depend on row and position alone.
    """
    ends: dict[int, int] = {}
    for row, first, count in spans:
        ends[row] = max(ends.get(row, 0), first + count)
    lengths = [ends.get(row, 0) if row else 0 for row in range(max(ends) + 1)]
    pages_per_row = -(-max(lengths) // page_size)
    cache = paged_cache(
        len(lengths), pages_per_row, page_size, kv_heads, head_dim, BF16, device, lengths
    )
    for row, end in ends.items():
        if row:
            cache.fill(row, end, seed=row)
    return Fp8Cache.of(cache) if fp8 else cache


def spoil(cache: Cache, row: int, position: int, bad: float, column: int | None = None) -> None:
    """Makes a value not finite, in one column; None: in all of them, and its key, too. In fp8 the
    scale is spoiled, and so are all columns.
    """
    page, token = cache.place(row, position)
    if isinstance(cache, Fp8Cache):
        cache.scale[page, slice(None) if column is None else 1, :, token] = bad
    elif column is None:
        cache.k[page, token] = cache.v[page, token] = bad
    else:
        cache.v[page, token, :, column] = bad


def make_plan(
    q: Tensor,
    cache: Cache,
    meta: Tensor,
    workspace: Tensor,
    counts: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """How attention with this workspace deals out a step."""
    ctas = max(len(workspace) // ops.chunk_workspace_words(q.shape[2], 1, exact), 1)
    words = ops.chunk_plan_words(len(q), ctas, exact)
    plan = poisoned(words, dtype=torch.int32, device=str(q.device))
    step = meta, cache.page_table, workspace, counts
    ops.chunk_plan_into(plan, q, cache.k, cache.v, *step, **cache.scaled(), exact=exact)
    return plan


def attend(
    q: Tensor,
    cache: Cache,
    meta: Tensor,
    segments: Tensor,
    scale: float | None = None,
    hopper: bool = True,
    workspace: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    out = poisoned(*q.shape, dtype=q.dtype, device=str(q.device))
    arguments = out, q, cache.k, cache.v, meta, segments, cache.page_table
    plan = None if workspace is None else make_plan(q, cache, meta, workspace, exact=exact)
    memory = {"workspace": workspace, "plan": plan}
    scale = scale or q.shape[2] ** -0.5
    ops.paged_attention_into(*arguments, scale, hopper, **memory, **cache.scaled(), exact=exact)
    return out


def expected_of(
    q: Tensor, cache: Cache, meta: Tensor, segments: Tensor, scale: float | None = None
) -> Tensor:
    """What the reference computes in float64."""
    exact = cache.double()
    arguments = q.double(), exact.k, exact.v, meta, segments, cache.page_table
    return reference.paged_attention(*arguments, scale or q.shape[2] ** -0.5)


def set_sms(monkeypatch: pytest.MonkeyPatch, device: str, count: int) -> int:
    """How many the device has: `count` from now on if it is emulated; a GPU has what it has."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    monkeypatch.setenv("PHOTON_EMULATOR_SMS", str(count))
    return count


def check_near_the_reference(
    spans: list[Span],
    group: int,
    kv_heads: int,
    head_dim: int,
    device: str,
    page_size: int = 16,
    workspace: Tensor | None = None,
    fp8: bool = False,
    exact: bool = False,
) -> None:
    meta, segments = tokens_and_segments(spans, device, dead_after=3)
    segments = torch.cat([segments, torch.zeros_like(segments[:2])])  # a bucket's unused segments
    q = queries(len(meta), group * kv_heads, head_dim, device)
    cache = filled_rows(spans, kv_heads, head_dim, device, page_size, fp8)
    out = attend(q, cache, meta, segments, workspace=workspace, exact=exact)
    expected = expected_of(q, cache, meta, segments)
    dead = meta[:, Meta.LENGTH] == 0
    assert_same_bits(out[dead], torch.zeros_like(out[dead]))
    # token by token: one wrong token among hundreds must not hide
    for token_index in range(len(meta)):
        assert_close(out[token_index], expected[token_index], slack=2)


# --- right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_mixed_steps_are_near_the_float64_reference(
    device: str, fp8: bool, head_dim: int, group: int
) -> None:
    """Two chunks, decode tokens, a dead segment and padding; the sizes go round, so that each
    meets each in some case.
    """
    case = HEAD_DIMS.index(head_dim) * len(GROUPS) + GROUPS.index(group)
    chunk, other = CHUNKS[case % 8], CHUNKS[(3 * case + 1) % 7]
    context, other_context = CONTEXTS[case % 5], CONTEXTS[(case + 2) % 5]
    spans = [(2, context, chunk), (1, 40, 1), (0, 0, 1), (4, 77, 1), (3, other_context, other)]
    page_size = PAGE_SIZES[case % 4]
    check_near_the_reference(spans, group, 1 + case % 2, head_dim, device, page_size, fp8=fp8)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("chunk", CHUNKS)
@FP8
def test_chunks_over_contexts_are_near_the_float64_reference(
    device: str, fp8: bool, chunk: int, context: int
) -> None:
    case = CHUNKS.index(chunk) + CONTEXTS.index(context)
    sizes = 1 + case % 3, 1, HEAD_DIMS[case % 3]
    check_near_the_reference([(1, context, chunk)], *sizes, device, PAGE_SIZES[case % 4], fp8=fp8)


@FP8
def test_many_rows_of_one_token_are_near_the_float64_reference(device: str, fp8: bool) -> None:
    spans = [(row, 5 * row % 90, 1) for row in range(1, 34)]
    check_near_the_reference(spans, 4, 2, 64, device, fp8=fp8)


@pytest.mark.emulated_later(head_dim=(96, 128, 256))
@pytest.mark.parametrize("sms", [4, 1000])
@pytest.mark.parametrize("context", [200, WHOLE_KEYS - 40, 1780])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_contexts_in_parts_are_near_the_float64_reference(
    device: str, fp8: bool, head_dim: int, context: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a chunk the number of parts changes, and where they begin; a second row has fewer,
    and a third is not cut.
    """
    set_sms(monkeypatch, device, sms)
    group = 1 + HEAD_DIMS.index(head_dim)
    spans = [(1, context, 80), (2, 1, 1), (0, 0, 1), (3, context // 2, 3)]
    check_near_the_reference(spans, group, 1, head_dim, device, fp8=fp8)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_a_contiguous_cache(device: str, fp8: bool, head_dim: int) -> None:
    cache = contiguous_cache(3, 90, 2, head_dim, BF16, device)
    cache.fill(1, 80, seed=1)
    cache.fill(2, 21, seed=2)
    cache = Fp8Cache.of(cache) if fp8 else cache
    q, spans = queries(71, 6, head_dim, device), [(2, 20, 1), (1, 10, 70)]
    step = (q, cache, *tokens_and_segments(spans, device))
    assert_close(attend(*step), expected_of(*step), slack=2)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@FP8
def test_scores_of_any_size(device: str, fp8: bool, scale: float) -> None:
    """Up to some hundreds, where a softmax that does not subtract the maximum overflows; and all
    alike.
    """
    cache = filled_rows([(1, 200, 70)], 1, 64, device, fp8=fp8)
    q = 12 * queries(70, 2, 64, device)
    step = (q, cache, *tokens_and_segments([(1, 200, 70)], device), scale)
    assert_close(attend(*step), expected_of(*step), slack=2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("power", [-60, 60])
def test_keys_and_values_in_fp8_of_any_size(device: str, power: int, head_dim: int) -> None:
    """All numbers of e4m3 are among the codes, and magnitudes of positions are far apart."""
    spans = [(1, 100, 70)]
    cache = filled_rows(spans, 2, head_dim, device)
    for row, end in [(1, 170)]:
        for position in range(end):
            place = cache.place(row, position)
            cache.k[place] *= 2.0 ** (position % 3 - power)
            cache.v[place] *= 2.0 ** (position % 9 + power)
    fp8, q = Fp8Cache.of(cache), queries(70, 4, head_dim, device) * 2.0**power
    fp8.k.view(torch.uint8)[fp8.place(1, 7)][:, :2] = ints([1, 0x87], device).byte()
    step = (q, fp8, *tokens_and_segments(spans, device))
    assert_close(attend(*step), expected_of(*step), slack=2)


# --- the same bits, whatever else is in the step --------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 3), (96, 1), (128, 2), (128, 8), (256, 2), (64, 16)]
)
@FP8
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    device: str, fp8: bool, head_dim: int, group: int
) -> None:
    """One chunk, several, single tokens, among other rows and alone; in few tokens and in many,
    over pages of other sizes.
    """
    context, num_tokens, kv_heads = 30, 150, 2
    whole = [(1, context, num_tokens)]
    cache, q = (
        filled_rows(whole, kv_heads, head_dim, device, fp8=fp8),
        queries(num_tokens, group * kv_heads, head_dim, device),
    )
    together = attend(q, cache, *tokens_and_segments(whole, device))
    around = [0, 63, 127, 150], [0, 64, 128, 150], [0, 65, 129, 150]  # ends of tiles
    for cuts in (*around, [0, 1, 2, 7, 23, 86, 150], [0, 33, 34, 97, 98, 149, 150]):
        for begin, end in pairwise(cuts):
            part = attend(
                q[begin:end],
                cache,
                *tokens_and_segments([(1, context + begin, end - begin)], device),
            )
            assert_same_bits(part, together[begin:end])

    spans = [(3, 0, 5), (1, context, num_tokens), (2, 90, 1), (4, 9, 70)]
    crowd = filled_rows(spans, kv_heads, head_dim, device, 23, fp8)
    all_q = torch.cat(
        [
            queries(5, group * kv_heads, head_dim, device, 1),
            q,
            queries(71, group * kv_heads, head_dim, device, 2),
        ]
    )
    assert_same_bits(
        attend(all_q, crowd, *tokens_and_segments(spans, device))[5 : 5 + num_tokens], together
    )


@pytest.mark.emulated_later(fp8=(True,), head_dim=(96, 128, 256))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_a_step_that_fills_the_device_has_the_bits_of_small_ones(
    device: str, fp8: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tokens are cut into larger tiles than few are, by the number of sms."""
    sms = set_sms(monkeypatch, device, 40)
    num_tokens, heads = -(-sms * 128 // 16) + 5, 16
    cache, q = (
        filled_rows([(1, 3, num_tokens)], 2, head_dim, device, fp8=fp8),
        queries(num_tokens, heads, head_dim, device),
    )
    spans = [(1, 3 + begin, min(13, num_tokens - begin)) for begin in range(0, num_tokens, 13)]
    together = attend(q, cache, *tokens_and_segments(spans, device))
    for span in spans:
        own = slice(span[1] - 3, span[1] - 3 + span[2])
        assert_same_bits(attend(q[own], cache, *tokens_and_segments([span], device)), together[own])


@pytest.mark.parametrize("context", [190, WHOLE_KEYS - 80, 1730])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (96, 1), (128, 2), (256, 2)])
@FP8
def test_a_long_context_has_the_same_parts_in_every_step(
    device: str, fp8: bool, head_dim: int, group: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the prompt is cut, beside rows whose contexts are shorter and longer, and in a
    table that has room for longer ones.
    """
    set_sms(monkeypatch, device, 40)
    num_tokens = 150
    whole = [(1, context, num_tokens)]
    cache = filled_rows(whole, 1, head_dim, device, fp8=fp8)
    q = queries(num_tokens, group, head_dim, device)
    together = attend(q, cache, *tokens_and_segments(whole, device))
    for begin, end in pairwise([0, 1, 7, 64, 130, 150]):
        part = attend(
            q[begin:end], cache, *tokens_and_segments([(1, context + begin, end - begin)], device)
        )
        assert_same_bits(part, together[begin:end])
    spans = [(3, 0, 2), (1, context, num_tokens), (2, 2300, 3)]
    crowd = filled_rows(spans, 1, head_dim, device, 23, fp8)
    all_q = torch.cat(
        [queries(2, group, head_dim, device, 1), q, queries(3, group, head_dim, device, 2)]
    )
    assert_same_bits(
        attend(all_q, crowd, *tokens_and_segments(spans, device))[2 : 2 + num_tokens], together
    )


@pytest.mark.emulated_later(fp8=(True,), head_dim=(96, 128, 256), context=(1100,))
@pytest.mark.parametrize("context", [WHOLE_KEYS - 40, 1100], ids=["some cut", "all cut"])
@pytest.mark.parametrize("num_tokens", [23, 90])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_a_chunk_has_the_same_bits_whatever_rides_along(
    device: str,
    fp8: bool,
    head_dim: int,
    num_tokens: int,
    context: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, among other chunks, after many decode tokens, in a bucket, and in a table that has
    room for longer contexts.
    """
    set_sms(monkeypatch, device, 8)
    heads, most = 32, 90
    long, chunk, decode = (
        (4, 9, most),
        (1, context, num_tokens),
        [(2, 500 + i, 1) for i in range(40)],
    )
    q, crowd_q = (
        queries(num_tokens, heads, head_dim, device),
        queries(len(decode) + 3 * most, heads, head_dim, device, seed=1),
    )

    def in_step(before: list[Span], after: list[Span], unused: int = 0, dead: int = 0) -> Tensor:
        spans = [*before, chunk, *after]
        cache = filled_rows(spans, 2, head_dim, device, fp8=fp8)
        first = sum(span[2] for span in before)
        meta, segments = tokens_and_segments(spans, device, dead_after=dead)
        step_q = torch.cat([crowd_q[:first], q, crowd_q[: len(meta) - first - num_tokens]])
        return attend(
            step_q,
            cache,
            meta,
            torch.cat([segments, torch.zeros_like(segments[:1]).expand(unused, -1)]),
        )[first:][:num_tokens]

    alone = in_step([], [])
    assert_same_bits(in_step([(3, 0, 5)], [(0, 0, 1), long]), alone)
    assert_same_bits(in_step([long], [(2, 2300, 3)]), alone)
    assert_same_bits(in_step(decode, []), alone)
    assert_same_bits(in_step([], [], unused=40, dead=most), alone)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_clusters_take_one_tile_after_another(
    device: str, fp8: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tiles with long contexts than the device has clusters at a time, some with short ones
    between them: every token has the bits that it has as a chunk of its own.
    """
    set_sms(monkeypatch, device, 7)  # two clusters
    contexts = [1400, 30, 1030, 1200, WHOLE_KEYS - 7] * (1 if device == "cpu" else 12)
    spans = [(row + 1, context, 11) for row, context in enumerate(contexts)]
    meta, segments = tokens_and_segments(spans, device)
    cache = filled_rows(spans, 2, head_dim, device, fp8=fp8)
    q = queries(len(meta), 8, head_dim, device)
    together = attend(q, cache, meta, segments)
    for index in range(0, len(meta), 7):
        own = slice(index, index + 1)
        alone = attend(
            q[own], cache, meta[own], ints([[int(meta[index, Meta.ROW]), 0, 1, 0]], device)
        )
        assert_same_bits(alone, together[own])
    assert_close(together, expected_of(q, cache, meta, segments), slack=2)


@FP8
def test_tokens_of_any_length_share_a_tile(device: str, fp8: bool) -> None:
    """Tokens of one row out of order, long ones beside short and dead ones: each has the bits
    that it has alone.
    """
    lengths = [1700, 1, 0, 640, 257, 1793, 256, 64, 2000, 0, 65, 1200]
    cache = filled_rows([(1, 0, 2000)], 2, 64, device, fp8=fp8)
    q = queries(len(lengths), 4, 64, device)
    meta = ints([[7, max(length - 1, 0), length, 1] for length in lengths], device)
    segments = ints([[1, 0, len(lengths), 0]], device)
    together = attend(q, cache, meta, segments)
    for token_index in range(len(lengths)):
        alone = attend(
            q[token_index : token_index + 1], cache, meta[token_index : token_index + 1], segments
        )
        assert_same_bits(alone, together[token_index : token_index + 1])
    assert_close(together, expected_of(q, cache, meta, segments), slack=2)


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [[0, 0, 0, 0]] * 40,
        [[1, 0, 200, 0]],
        [[2, 80, 50, 0], [1, 0, 80, 0], [3, 130, 1, 0]],
        [
            [1, -7, 3, 0],
            [99, 2**31 - 1, -4, 0],
            [2, 3, 2**31 - 1, 0],
            [1, -(2**31), 9, 0],
            [2, 100, 1, 0],
        ],
        [[1, token_index, 1, 0] for token_index in range(131)],
    ],
    ids=["none", "unused", "one", "unsorted", "garbage", "token by token"],
)
@pytest.mark.parametrize("context", [20, WHOLE_KEYS - 30], ids=["whole", "some cut"])
def test_segments_change_no_bit(device: str, segments: list[list[int]], context: int) -> None:
    spans = [(1, context, 80), (2, 0, 50), (3, 60, 1)]
    meta, right = tokens_and_segments(spans, device, dead_after=2)
    cache, q = filled_rows(spans, 1, 64, device), queries(len(meta), 4, 64, device)
    assert_same_bits(
        attend(q, cache, meta, ints(segments, device).reshape(-1, 4)), attend(q, cache, meta, right)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_what_a_later_position_holds_reaches_no_earlier_token(
    device: str, fp8: bool, head_dim: int, bad: float
) -> None:
    spans, later = [(1, 40, 60)], 75
    cache, q = filled_rows(spans, 2, head_dim, device, fp8=fp8), queries(60, 6, head_dim, device)
    step = tokens_and_segments(spans, device)
    before = attend(q, cache, *step)
    spoil(cache, 1, later, bad)
    after = attend(q, cache, *step)
    assert_same_bits(after[: later - 40], before[: later - 40])
    assert not after[later - 40 :].isfinite().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("later", [3, 480, 1112, 1176])
@FP8
def test_what_is_not_finite_in_a_part_reaches_no_token_before_it(
    device: str, fp8: bool, later: int, bad: float
) -> None:
    """In the first part, at the border of two that differs among the tokens, and in the last,
    where tokens end.
    """
    first, column = 1100, 13
    spans = [(1, first, 80)]
    cache, q = filled_rows(spans, 1, 64, device, fp8=fp8), queries(80, 3, 64, device)
    step = tokens_and_segments(spans, device)
    before = attend(q, cache, *step)
    spoil(cache, 1, later, bad, column)
    after, begin = attend(q, cache, *step), max(later - first, 0)
    spoiled = slice(None) if fp8 else column
    assert not after[begin:, :, spoiled].isfinite().any()
    after[begin:, :, spoiled] = before[begin:, :, spoiled]
    assert_same_bits(after, before)
    spoil(cache, 1, later, bad)
    after = attend(q, cache, *step)
    assert_same_bits(after[:begin], before[:begin])
    assert not after[begin:].isfinite().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_column(device: str, bad: float) -> None:
    spans, later, column = [(1, 0, 90)], 33, 13
    cache, q = filled_rows(spans, 1, 64, device), queries(90, 2, 64, device)
    step = tokens_and_segments(spans, device)
    before = attend(q, cache, *step)
    spoil(cache, 1, later, bad, column)
    after = attend(q, cache, *step)
    assert not after[later:, :, column].isfinite().any()
    after[later:, :, column] = before[later:, :, column]
    assert_same_bits(after, before)


# --- how keys and values are copied ---------------------------------------------------------------


@pytest.mark.parametrize("page_size", [8, 16, 64, 128, 700])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_pages_of_every_size_have_the_same_bits(
    device: str, fp8: bool, head_dim: int, page_size: int
) -> None:
    """Contexts end inside of pages, behind which there is NaN."""
    spans = [(1, 1060, 70), (2, 3, 20), (3, 99, 1)]
    q, step = queries(91, 4, head_dim, device), tokens_and_segments(spans, device)
    by_size = [
        attend(q, filled_rows(spans, 2, head_dim, device, size, fp8), *step)
        for size in (23, page_size)
    ]
    assert by_size[0].isfinite().all()
    assert_same_bits(by_size[1], by_size[0])


@pytest.mark.emulated_later(head_dim=(96, 128))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_pages_of_every_layout_have_the_same_bits(device: str, fp8: bool, head_dim: int) -> None:
    """Heads outside of a page's tokens, inside of them, and keys other than values. A page in the
    middle of a context is none.
    """
    spans = [(1, 1060, 70), (2, 3, 20)]
    q, step = queries(90, 6, head_dim, device), tokens_and_segments(spans, device)
    cache = filled_rows(spans, 3, head_dim, device, fp8=fp8)
    assert cache.page_table is not None
    cache.page_table[1, 2] = -1
    inside = replace(cache, k=cache.k.contiguous(), v=cache.v.contiguous())
    outside = attend(q, cache, *step)
    assert outside.isfinite().all()
    for other in (inside, replace(cache, v=inside.v)):
        assert_same_bits(attend(q, other, *step), outside)


# --- where it does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@FP8
def test_fast_is_another_kernel(device: str, fp8: bool, head_dim: int) -> None:
    if device == "cpu" and "PHOTON_OPS_LIBRARY" not in os.environ:
        pytest.skip("the CPU has one kernel")
    cache = filled_rows([(1, 0, 64)], 1, head_dim, device, fp8=fp8)
    q, step = queries(64, 4, head_dim, device), tokens_and_segments([(1, 0, 64)], device)
    is_same = torch.equal(attend(q, cache, *step), attend(q, cache, *step, hopper=False))
    assert is_same == (fp8 and head_dim == 256)  # which the portable kernel alone takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_run_the_portable_kernel(device: str, dtype: torch.dtype) -> None:
    cache = paged_cache(2, 2, 16, 1, 64, dtype, device)
    cache.fill(1, 20, seed=1)
    q, step = (
        randn(20, 2, 64, dtype=dtype, device=device),
        tokens_and_segments([(1, 0, 20)], device),
    )
    assert_same_bits(attend(q, cache, *step), attend(q, cache, *step, hopper=False))


@pytest.mark.parametrize("head_dim", [2, 32, 80, 192])
def test_other_head_dims_run_the_portable_kernel(device: str, head_dim: int) -> None:
    cache, q = filled_rows([(1, 0, 20)], 1, head_dim, device), queries(20, 2, head_dim, device)
    step = tokens_and_segments([(1, 0, 20)], device)
    assert_same_bits(attend(q, cache, *step), attend(q, cache, *step, hopper=False))


def test_unaligned_tensors_and_odd_scales_run_the_portable_kernel(device: str) -> None:
    cache, q = filled_rows([(1, 0, 20)], 1, 64, device), queries(20, 2, 64, device)
    step = tokens_and_segments([(1, 0, 20)], device)
    portable = attend(q, cache, *step, hopper=False)
    shifted_q = torch.empty(20, 2, 65, dtype=BF16, device=device)[:, :, 1:].copy_(q)
    assert_same_bits(attend(shifted_q, cache, *step), portable)
    out = torch.empty(20, 2, 68, dtype=BF16, device=device)[:, :, :64]
    ops.paged_attention_into(out, q, cache.k, cache.v, *step, cache.page_table, 0.125, hopper=True)
    assert_same_bits(out, portable)
    wide = torch.empty(*cache.k.shape[:3], 66, dtype=BF16, device=device)[..., :64].copy_(cache.k)
    assert_same_bits(attend(q, Cache(wide, cache.v, cache.page_table, 16), *step), portable)
    for scale in (-0.3, 0.0):
        arguments = q, cache.k, cache.v, *step, cache.page_table, scale
        assert_same_bits(
            ops.paged_attention(*arguments, hopper=True), ops.paged_attention(*arguments)
        )


def test_codes_that_are_not_whole_vectors_run_the_portable_kernel(device: str) -> None:
    cache = filled_rows([(1, 0, 20)], 1, 64, device, fp8=True)
    q, step = queries(20, 2, 64, device), tokens_and_segments([(1, 0, 20)], device)
    wide = torch.nn.functional.pad(cache.k.view(torch.uint8), (0, 8))[..., :64]
    other = replace(cache, k=wide.view(torch.float8_e4m3fn))
    assert_same_bits(attend(q, other, *step), attend(q, cache, *step, hopper=False))


def test_strided_outputs_and_nothing_between(device: str) -> None:
    spans = [(1, 3, 40), (2, 5, 1)]
    cache, q, step = (
        filled_rows(spans, 2, 64, device),
        queries(41, 4, 64, device),
        tokens_and_segments(spans, device),
    )
    buffer = poisoned(41, 4, 80, dtype=BF16, device=device)
    ops.paged_attention_into(
        buffer[:, :, 8:72], q, cache.k, cache.v, *step, cache.page_table, 0.125, hopper=True
    )
    assert_same_bits(buffer[:, :, 8:72], attend(q, cache, *step))
    assert buffer[:, :, :8].isnan().all()
    assert buffer[:, :, 72:].isnan().all()


# --- garbage in the tables ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token_index",
    [
        [7, 3, 4, 99],
        [7, 3, 4, -1],
        [7, 500, 501, 1],
        [7, 3, -4, 1],
        [7, 2**31 - 1, 2**31 - 1, 1],
        [7, 3, 2**31 - 1, 2],
    ],
)
@pytest.mark.parametrize("paged", [True, False])
@FP8
def test_garbage_in_decode_meta_touches_no_other_token(
    device: str, fp8: bool, token_index: list[int], paged: bool
) -> None:
    cache = (
        paged_cache(3, 5, 4, 1, 64, BF16, device)
        if paged
        else contiguous_cache(3, 20, 1, 64, BF16, device)
    )
    cache.fill(1, 20, seed=1)
    cache = Fp8Cache.of(cache) if fp8 else cache
    meta, segments = tokens_and_segments([(1, 2, 18)], device)
    q = queries(18, 3, 64, device)
    right = attend(q, cache, meta, segments)
    meta[7] = ints(token_index, device)
    others = [index for index in range(18) if index != 7]
    assert_same_bits(attend(q, cache, meta, segments)[others], right[others])


@pytest.mark.parametrize("page", [-1, 99, 2**31 - 1])
@FP8
def test_garbage_in_the_page_table_touches_no_other_row(device: str, fp8: bool, page: int) -> None:
    spans = [(1, 0, 40), (2, 10, 30)]
    cache, q, step = (
        filled_rows(spans, 1, 64, device, fp8=fp8),
        queries(70, 2, 64, device),
        tokens_and_segments(spans, device),
    )
    right = attend(q, cache, *step)
    assert cache.page_table is not None
    cache.page_table[1, 1] = page
    out = attend(q, cache, *step)
    assert_same_bits(out[:16], right[:16])
    assert_same_bits(out[40:], right[40:])
    assert out.isfinite().all()

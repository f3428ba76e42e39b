"""fused_attention_decode_into with `hopper`: splits of a row's context over CTAs, merged through
the workspace; keys and values in bfloat16, and in fp8.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from tests.ops.caches import (
    Cache,
    Fp8Cache,
    assert_same_cache,
    contiguous_cache,
    heads_first,
    paged_cache,
    rotary_tables,
    tokens_and_segments,
)
from tests.ops.numeric import assert_close, assert_same_bits, ints, poisoned
from tests.ops.test_attention import GARBAGE_TOKENS, qk_norms, qkv
from tests.ops.test_chunk_attention import set_sms

BF16 = torch.bfloat16
FP8 = pytest.mark.parametrize("fp8", [False, True])  # keys and values
# words beside a workspace; a multiple of the 16 bytes that the kernel wants it aligned to
GUARD = 64


@dataclass
class Decode:
    """One step's arguments: a token per length, each of a row of its own that holds all earlier
    positions; length 0 is a dead token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cache: Cache
    meta: Tensor
    tables: tuple[Tensor, Tensor]
    norms: tuple[Tensor | None, Tensor | None]
    scale: float

    def run(
        self,
        num_tokens: Tensor | None = None,
        hopper: bool = True,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The output of these tokens, or of all; `options` of the op besides."""
        meta, q, k, v = (
            x if num_tokens is None else x[num_tokens.to(x.device)]
            for x in (self.meta, self.q, self.k, self.v)
        )
        workspace = workspace_of(q, self.cache) if workspace is None else workspace
        # last: decode_meta is not written by the kernel right before the op
        if out is None:
            out = poisoned(*q.shape, dtype=q.dtype, device=str(q.device))
        ops.fused_attention_decode_into(
            *(out, q, k, v, self.cache.k, self.cache.v, meta, self.cache.page_table),
            *(*self.tables, self.scale, *self.norms, 1e-6, workspace, hopper),
            **self.cache.scaled(),
            **options,
        )
        return out

    def expected(self) -> tuple[Tensor, Cache]:
        """What the reference computes in float64 from q and k rotated and rounded, as they are
        in the cache; and that cache.
        """
        cache, q = self.cache.clone(), self.q.clone()
        parts = q, self.k, self.v, cache.k, cache.v, self.meta, cache.page_table
        ops.rope_append_kv_(*parts, *self.tables, *self.norms, **cache.scaled())
        exact = cache.double()
        segments = self.meta.new_empty(0, 4)
        return reference.paged_attention(
            q.double(), exact.k, exact.v, self.meta, segments, cache.page_table, self.scale
        ), cache


def workspace_of(q: Tensor, cache: Cache) -> Tensor:
    words = ops.attention_workspace_words(len(q), q.shape[1], cache.k.shape[2], q.shape[2])
    return torch.zeros(words, device=q.device)


def decode(
    device: str,
    lengths: list[int],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = BF16,
    page_size: int = 16,
    paged: bool = True,
    normed: bool = False,
    contiguous: bool = False,
    fp8: bool = False,
    seed: int = 0,
) -> Decode:
    longest, rows = max([1, *lengths]), len(lengths) + 1
    if paged:
        cache = paged_cache(
            *(rows, -(-longest // page_size), page_size, kv_heads, head_dim, dtype, device),
            [0, *lengths],
        )
    else:
        cache = contiguous_cache(rows, longest, kv_heads, head_dim, dtype, device)
    for row, length in enumerate(lengths, start=1):
        cache.fill(row, max(length - 1, 0), seed=seed + row)
    if fp8:
        cache = Fp8Cache.of(cache)
    spans = [
        (row if length else 0, max(length - 1, 0), 1) for row, length in enumerate(lengths, start=1)
    ]
    meta, _ = tokens_and_segments(spans, device)
    q, k, v = qkv(len(lengths), q_heads, kv_heads, head_dim, dtype, device)
    if contiguous:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    tables, norms = rotary_tables(longest, head_dim, device), qk_norms(head_dim, dtype, device)
    norms = norms if normed else (None, None)
    return Decode(q, k, v, cache, meta, tables, norms, head_dim**-0.5)


def check(step: Decode, workspace: Tensor | None = None) -> None:
    """The output is near the reference's, and the cache holds the new keys and values and is
    otherwise as it was, bit for bit.
    """
    exact, cache = step.expected()
    out = step.run(workspace=workspace)
    assert_close(out, exact, slack=0.5)
    assert_same_cache(step.cache, cache)
    dead = step.meta[:, 2] == 0
    assert_same_bits(out[dead], torch.zeros_like(out[dead]))


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 24])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@FP8
def test_fast_decode_is_near_the_float64_reference(
    device: str, fp8: bool, head_dim: int, group: int
) -> None:
    kv_heads = 2 if group < 8 else 1
    lengths, q_heads = [1, 2, 17, 0, 65, 130], group * kv_heads
    check(decode(device, lengths, q_heads, kv_heads, head_dim, normed=group % 2 == 0, fp8=fp8))


@pytest.mark.parametrize(
    "lengths", [[15, 16, 17], [63, 64, 65], [127, 0, 128, 129], [1, 500, 2, 0], [2000], []], ids=str
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (2, 1, 128)]
)
@FP8
def test_fast_decode_of_any_length(
    device: str, fp8: bool, lengths: list[int], q_heads: int, kv_heads: int, head_dim: int
) -> None:
    check(decode(device, lengths, q_heads, kv_heads, head_dim, normed=True, fp8=fp8))


@pytest.mark.parametrize(
    ("length", "q_heads", "kv_heads", "head_dim"),
    [
        (8000, 4, 1, 64),
        (4500, 8, 8, 64),
        (4000, 16, 16, 64),
        (1000, 32, 32, 128),
        (3000, 16, 16, 128),
    ],
)
@FP8
def test_fast_decode_of_a_very_long_context(
    device: str, fp8: bool, length: int, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    """As many splits as there are, each of one to six tiles a warp."""
    check(decode(device, [length, 3], q_heads, kv_heads, head_dim, fp8=fp8))


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(2, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize("sms", [3, 7])
@FP8
def test_fast_decode_of_splits_of_any_number_of_work_items(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    fp8: bool,
    sms: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Splits of up to two work items with heads of 64 and four with 128; tokens end within a work
    item, at its end and behind it, in any CTA range.
    """
    lengths = [1, 64, 65, 449, 512, 513, 1023, 1025, 1300, 1537, 2047, 2049, 2561, 5]
    step = decode(device, lengths, q_heads, kv_heads, head_dim, fp8=fp8)
    check(step)
    together = step.run()
    set_sms(monkeypatch, device, sms)
    assert_same_bits(step.run(), together)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, None])
@FP8
def test_fast_decode_over_pages_of_any_size(device: str, fp8: bool, page_size: int | None) -> None:
    lengths = [1, 66, 0, 200]
    paged = page_size is not None
    step = decode(device, lengths, 6, 2, 128, page_size=page_size or 1, paged=paged, fp8=fp8)
    check(step)
    # the same values elsewhere, heads side by side as an engine has them: the same bits
    other = decode(device, lengths, 6, 2, 128, page_size=32, fp8=fp8)
    other.cache.k, other.cache.v = other.cache.k.contiguous(), other.cache.v.contiguous()
    assert_same_bits(step.run(), other.run())


@pytest.mark.parametrize("contiguous", [False, True])
def test_fast_decode_writes_strided_outputs_and_nothing_between(
    device: str, contiguous: bool
) -> None:
    step = decode(device, [5, 100, 0], 6, 2, 64, contiguous=contiguous)
    buffer = poisoned(3, 6, 96, dtype=BF16, device=device)
    step.run(out=buffer[:, :, 8:72])
    assert_same_bits(buffer[:, :, 8:72], step.run())
    assert buffer[:, :, :8].isnan().all()
    assert buffer[:, :, 72:].isnan().all()


@FP8
def test_fast_decode_of_large_scores(device: str, fp8: bool) -> None:
    """Scores up to some hundreds, of both signs: a softmax that does not subtract the maximum of
    each split overflows.
    """
    step = decode(device, [300, 70], 4, 2, 64, fp8=fp8)
    step.q.mul_(12)
    step.scale = 1.0
    check(step)
    step.scale = -1.0
    check(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [34, 80, 64])
def test_what_the_fast_kernel_cannot_do_the_portable_one_does(
    device: str, dtype: torch.dtype, head_dim: int
) -> None:
    step = decode(device, [3, 70], 4, 2, head_dim, dtype=dtype)
    if dtype == BF16 and head_dim == 64:  # keys that are not aligned to 16 bytes
        wider = torch.full(
            (*step.cache.k.shape[:3], head_dim + 1), float("nan"), dtype=dtype, device=device
        )
        wider[..., 1:] = step.cache.k
        step.cache.k = wider[..., 1:]
    assert_same_bits(step.run(hopper=True), step.run(hopper=False))


# --- the same bits at every batch -----------------------------------------------------------------


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 64), (12, 1, 128)])
@FP8
def test_a_token_has_the_same_bits_in_every_batch(
    device: str, fp8: bool, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    lengths = [1 + 37 * i % 200 for i in range(64)]
    lengths[5], lengths[40] = 0, 600
    step = decode(device, lengths, q_heads, kv_heads, head_dim, fp8=fp8)
    together = step.run()
    assert_same_bits(step.run(), together)  # and from run to run
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert_same_bits(step.run(order), together[order.to(device)])
    for num_tokens in ([40], [5], [63], [40, 2], [7, 9, 40], [*range(30, 62)]):
        at = torch.tensor(num_tokens)
        assert_same_bits(step.run(at), together[at.to(device)])


@pytest.mark.emulated_later(fp8=(True,), q_heads=(24,), head_dim=(64, 96, 256))
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(4, 2, 128), (10, 2, 64), (3, 1, 96), (24, 2, 128), (4, 2, 256)],
)
@FP8
def test_a_token_has_the_same_bits_in_one_run_and_in_several(
    device: str, fp8: bool, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    """Alone a token has a run for each of its splits; the more tokens there are beside it, the
    fewer and longer its runs, at last one.
    """
    lengths = [900, 1, 128, 129, 385, 640, 0, 700] + [500 + i for i in range(56)]
    step = decode(device, lengths, q_heads, kv_heads, head_dim, normed=True, fp8=fp8)
    step.q.mul_(4)  # weights of many sizes: a split's highest score is not the next one's
    together = step.run()
    for count in (1, 2, 3, 5, 8, 16, 33):
        for first in (0, 2, 4, 5) if count < 16 else (0, 5):  # many are nearly the same ones
            num_tokens = torch.tensor([*range(first, min(first + count, 64))])
            assert_same_bits(step.run(num_tokens), together[num_tokens.to(device)])


@pytest.mark.emulated_later(fp8=(True,), q_heads=(12,), head_dim=(96, 128, 256))
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(8, 4, 128), (8, 2, 64), (8, 1, 96), (12, 1, 64), (24, 2, 128), (4, 1, 256)],
)
@FP8
def test_a_token_has_the_same_bits_however_many_blocks_it_meets_in(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    fp8: bool,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Splits meet in clusters of two to eight blocks, in global memory or in one block, by the
    number of tokens and by how long they are.
    """
    lengths = [512, 500, 449, 512, 64, 65, 0, 2048, 2049, 300, 400, 1, 350, 512, 400, 300]
    step = decode(device, lengths, q_heads, kv_heads, head_dim, normed=True, fp8=fp8)
    step.q.mul_(4)
    set_sms(monkeypatch, device, 1)
    together = step.run()
    check(step)
    for count in (4, 8, 32, 128):
        set_sms(monkeypatch, device, count)
        ends = (0, 1), (0, 2), (0, 4), (3, 6), (4, 7), (6, 8), (7, 9), (9, 16), (0, 16)
        for first, end in ends:
            num_tokens = torch.tensor([*range(first, end)])
            assert_same_bits(step.run(num_tokens), together[num_tokens.to(device)])


# --- more tokens than a warp has lanes ------------------------------------------------------------


MIDDLE_LENGTHS = {
    "equal": [200] * 72,
    "equal, some dead": [0, *[200] * 70, 0],
    "nearly equal": [120 + i for i in range(72)],
    "apart": [1 + 53 * i % 390 for i in range(72)],
    "one long": [*[1 + 37 * i % 150 for i in range(71)], 2100],
    "dead": [0] * 72,
}


@pytest.mark.emulated_later(
    fp8=(True,),
    kind=("equal, some dead", "nearly equal", "apart", "one long"),
    q_heads=(2, 4, 10),
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(4, 2, 128), (6, 2, 64), (2, 1, 96), (10, 1, 256)]
)
@pytest.mark.parametrize("kind", MIDDLE_LENGTHS)
@FP8
def test_more_tokens_than_lanes_have_the_bits_of_few_however_work_is_dealt_out(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    fp8: bool,
    kind: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Whole split-KV groups in the order of tokens or by length, parts of them, and clusters: with
    160 multiprocessors a split-KV group has two CTAs.
    """
    lengths = MIDDLE_LENGTHS[kind]
    step, few = (
        decode(device, lengths, q_heads, kv_heads, head_dim, normed=True, fp8=fp8) for _ in range(2)
    )
    for each in (step, few):
        each.q.mul_(4)  # weights of many sizes: a split's highest score is not the next one's
    together = step.run()
    assert_close(together, step.expected()[0], slack=0.5)
    for first in range(0, 72, 24):
        tokens = torch.arange(first, first + 24)
        assert_same_bits(few.run(tokens), together[tokens.to(device)])
    assert_same_cache(step.cache, few.cache)
    for sms in (1, 5, 40, 160):
        set_sms(monkeypatch, device, sms)
        assert_same_bits(step.run(), together)
        some = torch.arange(71, 30, -1)
        assert_same_bits(step.run(some), together[some.to(device)])


@pytest.mark.parametrize("lengths", [[40] * 460, [1 + i % 70 for i in range(460)]])
def test_more_tokens_than_an_order_has_room_for(
    monkeypatch: pytest.MonkeyPatch, device: str, lengths: list[int]
) -> None:
    step = decode(device, lengths, 2, 1, 64)
    set_sms(monkeypatch, device, 10)
    together = step.run()
    assert_close(together, step.expected()[0], slack=0.5)
    for first in (0, 12, 430):
        tokens = torch.arange(first, first + 30)
        assert_same_bits(step.run(tokens), together[tokens.to(device)])


# --- many tokens, which one-warp CTAs take --------------------------------------------------------


def many(device: str, kind: str, group: int, seed: int = 0) -> Decode:
    """100 tokens of two KV heads. Contexts are short, one is dead; of kind "long" one is so long
    that no CTA range has it whole.
    """
    lengths = [1 + 53 * i % 130 for i in range(100)]
    lengths[3], lengths[6], lengths[7], lengths[99] = 0, 64, 65, 320
    if kind == "long":
        lengths[40] = 2100
    page_size = {"wide pages": 48, "rows": None}.get(kind, 16)
    step = decode(
        *(device, lengths, 2 * group, 2, 128),
        page_size=page_size or 1,
        paged=page_size is not None,
        normed=group % 2 == 0,
        seed=seed,
    )
    if kind == "heads side by side":  # as an engine's pages have them
        step.cache.k, step.cache.v = step.cache.k.contiguous(), step.cache.v.contiguous()
    if kind == "heads first":  # which a tensor copy does not take
        step.cache = heads_first(step.cache)
    step.q.mul_(4)  # weights of many sizes
    return step


@pytest.mark.emulated_later(kind=("heads side by side", "wide pages", "rows"))
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["short", "long", "heads side by side", "wide pages", "rows"])
def test_many_tokens_are_near_the_reference_and_have_the_bits_of_few(
    monkeypatch: pytest.MonkeyPatch, device: str, kind: str, group: int
) -> None:
    """Few tokens at a time are another kernel's; and so the work is dealt out in other ways."""
    step, few = many(device, kind, group), many(device, kind, group)
    exact, _ = step.expected()
    together = step.run()
    assert_close(together, exact, slack=0.5)
    assert_same_bits(together[3], torch.zeros_like(together[3]))
    for first in range(0, 100, 25):
        num_tokens = torch.arange(first, first + 25)
        assert_same_bits(few.run(num_tokens), together[num_tokens.to(device)])
    assert_same_bits(step.cache.k, few.cache.k)
    assert_same_bits(step.cache.v, few.cache.v)
    for sms in (1, 2, 5, 40):
        set_sms(monkeypatch, device, sms)
        assert_same_bits(step.run(), together)
        assert_same_bits(step.run(torch.arange(99, 1, -1)), together[2:].flip(0))


@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1])
def test_of_many_tokens_a_page_that_cannot_be_is_not_read(device: str, page: int) -> None:
    step = many(device, "short", 2)
    assert step.cache.page_table is not None
    right = step.run()
    step.cache.page_table[100, 1] = page  # of the context: its positions are left out
    step.cache.page_table[100, 19] = page  # of the new position: the token has no place
    step.cache.page_table[96, 0] = page
    few = step.run(torch.tensor([95, 99]))
    out = step.run()
    assert_same_bits(out[[95, 99]], few)
    assert_same_bits(out[99], torch.zeros_like(out[99]))
    others = [*range(95), 96, 97, 98]
    assert_same_bits(out[others], right[others])


def test_many_tokens_leave_the_workspace_as_it_was(device: str) -> None:
    step = many(device, "long", 2)
    workspace = workspace_of(step.q, step.cache)
    right = step.run()
    for _ in range(2):
        assert_same_bits(step.run(workspace=workspace), right)
    assert (workspace[: len(workspace) // 512 * 4] == 0).all()  # the counters


# --- the workspace --------------------------------------------------------------------------------


def test_one_workspace_serves_calls_of_all_sizes(device: str) -> None:
    """Larger and smaller calls, and other heads, one after another; what lies beside the
    workspace stays.
    """
    steps = [
        decode(device, [70, 300, 0, 129], 16, 1, 64, seed=10),
        decode(device, [500], 2, 2, 128, seed=20),
        decode(device, [65, 1] * 20, 4, 4, 64, seed=30),
        decode(device, [1], 3, 1, 256, seed=40),
    ]
    words = max(len(workspace_of(step.q, step.cache)) for step in steps) + 300
    buffer = torch.full((words + 2 * GUARD,), float("nan"), device=device)
    workspace = buffer[GUARD:-GUARD]
    workspace.zero_()
    for step in [*steps, *reversed(steps), *steps]:
        assert_same_bits(step.run(workspace=workspace), step.run())
    assert buffer[:GUARD].isnan().all()
    assert buffer[-GUARD:].isnan().all()
    assert (workspace[: words // 512 * 4] == 0).all()  # the counters


@pytest.mark.parametrize(
    ("num_tokens", "q_heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (33, 7, 1, 64), (2, 9, 3, 96), (1, 64, 64, 256), (5, 200, 200, 2)],
)
def test_the_workspace_is_as_large_as_python_says(
    device: str, num_tokens: int, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    step = decode(device, [1] * num_tokens, q_heads, kv_heads, head_dim)
    words = ops.attention_workspace_words(num_tokens, q_heads, kv_heads, head_dim)
    step.run(workspace=torch.zeros(words, device=device))
    message = (
        f"workspace has shape [{words - 1}], expected dimension 0 to be at least {words} "
        "(attention_workspace_words"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        step.run(workspace=torch.zeros(words - 1, device=device))


def test_fast_needs_a_workspace(device: str) -> None:
    step = decode(device, [1], 4, 2, 64)
    cache = step.cache
    inputs = step.q, step.k, step.v, cache.k, cache.v, step.meta, cache.page_table
    arguments = torch.empty_like(step.q), *inputs, *step.tables, step.scale
    words = ops.attention_workspace_words(1, 4, 2, 64)
    message = re.escape(f"workspace is not given, expected float32 zeros [{words}]")
    with pytest.raises(RuntimeError, match=message):
        ops.fused_attention_decode_into(*arguments, hopper=True)
    ops.fused_attention_decode_into(*arguments)


# --- tokens that cannot be ------------------------------------------------------------------------


@pytest.mark.parametrize("token_index", GARBAGE_TOKENS)
@pytest.mark.parametrize("paged", [True, False])
@FP8
def test_a_token_that_cannot_be_is_zeros_and_touches_nothing(
    device: str, fp8: bool, token_index: list[int], paged: bool
) -> None:
    step = decode(device, [70, 70], 4, 2, 64, paged=paged, fp8=fp8)
    step.meta[1] = ints(token_index, device)
    untouched = step.cache.clone()
    alone = step.run(torch.tensor([0]))
    out = step.run()
    assert_same_bits(out[0], alone[0])
    assert_same_bits(out[1], torch.zeros_like(out[1]))
    page, token = step.cache.place(1, 69)
    untouched.k[page, token] = step.cache.k[page, token]
    untouched.v[page, token] = step.cache.v[page, token]
    for now, then in zip(step.cache.scaled().values(), untouched.scaled().values(), strict=True):
        then[page, ..., token] = now[page, ..., token]
    assert_same_cache(step.cache, untouched)


@pytest.mark.parametrize("length", [3, 200, 2**31 - 1])
def test_a_length_beside_its_position_touches_no_foreign_memory(device: str, length: int) -> None:
    """Such a token's own output may be anything, but the counters come to rest: the next step is
    right.
    """
    step = decode(device, [150, 70], 4, 2, 64)
    workspace = workspace_of(step.q, step.cache)
    right = step.run()
    step.meta[1, 2] = length
    assert_same_bits(step.run(workspace=workspace)[0], right[0])
    step.meta[1, 2] = 70
    assert_same_bits(step.run(workspace=workspace), right)


@pytest.mark.parametrize("page", [-1, 99, 2**31 - 1])
@FP8
def test_a_page_that_cannot_be_is_not_read(device: str, fp8: bool, page: int) -> None:
    step = decode(device, [100, 80, 80], 4, 2, 64, fp8=fp8)
    assert step.cache.page_table is not None
    step.cache.page_table[2, 1] = page  # of the context: its positions are left out
    step.cache.page_table[3, 79 // 16] = page  # of the new position: the token has no place
    before = step.cache.clone()
    out = step.run()
    assert torch.isfinite(out).all()
    assert_same_bits(out[2], torch.zeros_like(out[2]))
    untouched = [int(p) for p in step.cache.page_table[3] if p != page]
    for now, then in zip(step.cache.parts(), before.parts(), strict=True):
        assert_same_bits(now[untouched], then[untouched])


def test_words_grow_with_the_tokens() -> None:
    words = [ops.attention_workspace_words(num_tokens, 32, 8, 128) for num_tokens in (0, 1, 2, 32)]
    assert words[0] == 0
    assert words == sorted(words)
    assert math.isclose(words[3], 32 * 32 * 16 * 130, rel_tol=0.02)

"""paged_attention_into with a workspace and exact=True: contexts cut at positions that are always
the same, near the float64 reference, and a token's bits free of what else is in the step. What
holds with and without exact is in test_balanced_attention.

On the CPU neither changes anything, and these tests hold for the portable kernel; they are written
for the CUDA one, on a GPU or emulated.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from photon_ext import ops
from photon_ext._library import hopper_runs
from tests.ops import test_balanced_attention as balanced_attention
from tests.ops import test_chunk_attention as chunk_attention
from tests.ops.caches import tokens_and_segments
from tests.ops.numeric import assert_same_bits, poisoned
from tests.ops.test_chunk_attention import Span, filled_rows, make_plan, queries, set_sms
from tests.ops.test_chunk_plan import (
    CTA_WORDS,
    KV_TILE,
    ROWS_OF_TILE,
    SIZES_WORDS,
    TILE_WORDS,
    query_tiles_of,
)

FIRST_PART = 8 * KV_TILE  # positions
SPREAD_SLOTS = 8  # of a CTA

make_workspace = partial(balanced_attention.make_workspace, exact=True)
attend = partial(balanced_attention.attend, exact=True)
check_near_the_reference = partial(balanced_attention.check_near_the_reference, exact=True)


# --- right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [1, 3, 8, 40])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_contexts_in_parts_are_near_the_float64_reference(
    device: str, head_dim: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens of a query tile see a part more than others. Of few SMs each adds up the parts of
    a query tile by itself; of 40 each has one part.
    """
    set_sms(monkeypatch, device, sms)
    spans = [(1, FIRST_PART - 20, 40), (2, 1, 1), (0, 0, 1), (3, 2 * FIRST_PART + 50, 3)]
    check_near_the_reference(spans, 4, 2, head_dim, device, sms)


@pytest.mark.emulated_later(sms=(40,))
@pytest.mark.parametrize("sms", [3, 40])
def test_long_contexts_are_near_the_float64_reference(
    device: str, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind 8,192 positions parts are longer."""
    set_sms(monkeypatch, device, sms)
    check_near_the_reference([(1, 10 * FIRST_PART + 100, 3)], 2, 1, 64, device, sms)


# --- the same bits, whatever else is in the step --------------------------------------------------


@pytest.mark.emulated_later(head_dim=(128,))
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 2)])
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    device: str, head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk, several, single tokens, among other rows and alone; on few SMs and on many, which
    take the parts of a context one after the other, or each one; behind a prefix or not.
    """
    set_sms(monkeypatch, device, 3)
    first, end = FIRST_PART - 130, FIRST_PART + 60
    cache = filled_rows([(1, 0, end)], 1, head_dim, device)
    q = queries(end, group, head_dim, device)

    def of_chunk(begin: int, end: int, ctas: int = 40) -> Tensor:
        step = tokens_and_segments([(1, begin, end - begin)], device)
        return attend(q[begin:end], cache, *step, make_workspace(head_dim, device, ctas))

    together = of_chunk(first, end)
    cuts = [0, 64, 128, 190], [0, 100, 190], [0, 1, 2, 23, 190], [0, 131, 132, 149, 150, 190]
    for sms in (3, 8, 40):
        set_sms(monkeypatch, device, sms)
        for begin, stop in pairwise(cuts[sms % 3]):
            part = of_chunk(first + begin, first + stop)
            assert_same_bits(part, together[begin:stop])
    assert_same_bits(of_chunk(first, end, ctas=2), together)
    assert_same_bits(of_chunk(first - 30, end)[30:], together)

    spans = [(3, 0, 5), (1, first, end - first), (2, 90, 1), (4, 9, 70)]
    crowd = filled_rows(spans, 1, head_dim, device)
    others = queries(76, group, head_dim, device, 1)
    all_q = torch.cat([others[:5], q[first:], others[5:]])
    step = (*tokens_and_segments(spans, device), make_workspace(head_dim, device))
    assert_same_bits(attend(all_q, crowd, *step)[5 : 5 + end - first], together)


@pytest.mark.emulated_later(context=(3 * FIRST_PART,))
@pytest.mark.parametrize("context", [FIRST_PART - 10, 3 * FIRST_PART])
def test_a_chunk_has_the_same_bits_whatever_rides_along(
    device: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among other chunks, after many decode tokens, in a bucket, in a table that has room
    for longer contexts; by CTAs of any number.
    """
    chunk, most = (1, context, 23), 60
    decode = [(2, 500 + i, 1) for i in range(40)]
    q, crowd_q = queries(23, 8, 64, device), queries(3 * most, 8, 64, device, seed=1)

    def in_step(sms: int, before: list[Span], after: list[Span], dead: int = 0) -> Tensor:
        set_sms(monkeypatch, device, sms)
        spans = [*before, chunk, *after]
        cache = filled_rows(spans, 2, 64, device)
        first = sum(span[2] for span in before)
        meta, segments = tokens_and_segments(spans, device, dead_after=dead)
        step_q = torch.cat([crowd_q[:first], q, crowd_q[: len(meta) - first - 23]])
        return attend(step_q, cache, meta, segments, make_workspace(64, device))[first:][:23]

    alone = in_step(40, [], [])
    assert_same_bits(in_step(1, [], []), alone)
    assert_same_bits(in_step(5, [], []), alone)  # parts by more CTAs than one, fewer than parts
    assert_same_bits(in_step(8, [(3, 0, 5)], [(0, 0, 1), (4, 9, most)]), alone)
    assert_same_bits(in_step(40, [(4, 9, most)], [(2, 2300, 3)]), alone)
    assert_same_bits(in_step(3, decode, []), alone)
    assert_same_bits(in_step(8, [], [], dead=most), alone)


def test_it_sums_in_an_order_of_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hopper_runs():
        pytest.skip("the CPU has one kernel")
    set_sms(monkeypatch, device, 8)
    spans = [(1, FIRST_PART, 64)]
    cache, q = filled_rows(spans, 1, 64, device), queries(64, 4, 64, device)
    step = tokens_and_segments(spans, device)
    exact = attend(q, cache, *step, make_workspace(64, device))
    assert not torch.equal(exact, chunk_attention.attend(q, cache, *step))


# --- again and again ------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [3, 5, 40])
def test_a_workspace_serves_steps_of_all_sizes(
    device: str, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever CTA comes last, and whoever takes which item; counters are zero behind each. Of 5
    CTAs some take several parts that are spread.
    """
    set_sms(monkeypatch, device, sms)
    workspace = make_workspace(64, device, sms)
    steps = [[(1, FIRST_PART, 40)], [(1, 0, 9), (2, 700, 33)], [(1, 2 * FIRST_PART, 1)]]
    expected: list[Tensor] = []
    for turn in range(3):
        for index, spans in enumerate(steps):
            cache = filled_rows(spans, 2, 64, device)
            step = tokens_and_segments(spans, device)
            q = queries(len(step[0]), 8, 64, device, seed=index)
            out = attend(q, cache, *step, workspace)
            if turn == 0:
                expected.append(out)
            assert_same_bits(out, expected[index])
            slot = ops.chunk_workspace_words(64, 1, exact=True) // (SPREAD_SLOTS + 1)
            assert not workspace.view(-1, slot)[:, : slot - 128 * 66].any()


# --- values that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sms", [1, 40])
def test_what_is_not_finite_reaches_those_that_attend_to_it_alone(
    device: str, sms: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last position of a part, and in the first of the next one, which other tokens of the
    query tile do not see; those that do have the same bits without them.
    """
    set_sms(monkeypatch, device, sms)
    first, column = FIRST_PART - 20, 13
    spans = [(1, first, 40)]
    for position in (FIRST_PART - 1, FIRST_PART):
        cache, q = filled_rows(spans, 1, 64, device), queries(40, 2, 64, device)
        step = (*tokens_and_segments(spans, device), make_workspace(64, device, sms))
        begin = position - first
        before = attend(q, cache, *step)
        cache.v[(*cache.place(1, position), 0, column)] = bad
        after = attend(q, cache, *step)
        assert not after[begin:, :, column].isfinite().any()
        later = tokens_and_segments([(1, position, 40 - begin)], device)
        assert_same_bits(attend(q[begin:], cache, *later, step[-1]), after[begin:])
        after[begin:, :, column] = before[begin:, :, column]
        assert_same_bits(after, before)
        cache.k[cache.place(1, position)] = float("nan")
        after = attend(q, cache, *step)
        assert_same_bits(after[:begin], before[:begin])
        assert not after[begin:].isfinite().any()


# --- the plan -------------------------------------------------------------------------------------


def parts_of(kv_tiles: int) -> list[tuple[int, int]]:
    """Each 8 tiles up to 64, then four for each doubling."""
    cuts, doubling = [*range(0, 64, 8)], 64
    while doubling < kv_tiles:
        cuts += range(doubling, 2 * doubling, doubling // 4)
        doubling *= 2
    return [*pairwise([*(cut for cut in cuts if cut < kv_tiles), kv_tiles])]


def test_parts_are_an_eighth_to_a_quarter_of_long_contexts() -> None:
    assert parts_of(3) == [(0, 3)]
    assert parts_of(9) == [(0, 8), (8, 9)]
    assert parts_of(130)[7:] == [(56, 64), (64, 80), (80, 96), (96, 112), (112, 128), (128, 130)]


@pytest.mark.parametrize(
    ("spans", "sms", "spreads"),
    [
        ([(1, 0, 250), (2, 1100, 40), (0, 0, 1), (3, 450, 3)], 3, False),
        ([(1, 2000, 33)], 40, True),
        ([(1, 2000, 33)], 3, False),  # enough query tiles for half of the CTAs
        ([(1, 9000, 3), (2, 0, 5), (3, 1020, 7)], 40, True),
        ([(1, 40000, 1)], 4, False),  # more parts than there are slots
        ([(1, 16000, 1)], 4, True),
        ([(0, 0, 1)], 8, True),
    ],
)
def test_query_tiles_are_spread_where_they_are_few(
    device: str, spans: list[Span], sms: int, spreads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hopper_runs():
        pytest.skip("no kernel here reads a plan")
    set_sms(monkeypatch, device, sms)
    group, kv_heads = 4, 2
    meta, _ = tokens_and_segments(spans, device, dead_after=3)
    cache = filled_rows(spans, kv_heads, 64, device)
    q = queries(len(meta), group * kv_heads, 64, device)
    plan = make_plan(q, cache, meta, make_workspace(64, device, sms), exact=True).tolist()
    assert plan[:4] == [len(meta), sms, kv_heads, 2**16 + group]
    entries, places = [], 0
    for tile in query_tiles_of(meta.cpu(), cache, 0, ROWS_OF_TILE // group):
        parts = parts_of(tile.kv_tiles) if spreads else [(0, tile.kv_tiles)]
        place = places if spreads else 0
        entries += [(tile, begin, end, place, len(parts)) for begin, end in parts]
        places += len(parts)
    entries.reverse()
    if spreads:
        entries.sort(key=lambda entry: entry[1] - entry[2])  # the longest first
    at = SIZES_WORDS + sms * CTA_WORDS
    for index, (tile, *own, place, _) in enumerate(entries):
        tokens = 2**16 * tile.tokens + tile.first
        words = [tokens, tile.row, tile.least, tile.most, *own, place]
        assert plan[at + index * TILE_WORDS :][:7] == words
    for cta in range(sms):
        words = plan[SIZES_WORDS + cta * CTA_WORDS :][:CTA_WORDS]
        assert words[12:] == [0, 0, len(entries) * kv_heads, 0]
        if cta >= len(entries) * kv_heads:
            assert words[1] == 0
            continue
        head = cta % kv_heads
        tile, begin, end, place, count = entries[cta // kv_heads]
        expected = [tile.first, tile.tokens, head, begin, end, place * kv_heads + head, count]
        assert words[:10] == [*expected, tile.row, tile.least, tile.most]


# --- where it does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_of_the_other_kind_is_no_use(
    device: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hopper_runs():
        pytest.skip("no kernel here reads a plan")
    set_sms(monkeypatch, device, 8)
    spans = [(1, 60, 64)]
    cache, q = filled_rows(spans, 1, 64, device), queries(64, 4, 64, device)
    meta, segments = tokens_and_segments(spans, device)
    workspace = make_workspace(64, device)  # without exact, for more CTAs: all that there are
    out = poisoned(*q.shape, dtype=q.dtype, device=device)
    words = max(ops.chunk_plan_words(64, 132 * 5, either) for either in (False, True))
    plan = torch.zeros(words, dtype=torch.int32, device=device)
    pages, table = (cache.k, cache.v), cache.page_table
    ops.chunk_plan_into(plan, q, *pages, meta, table, workspace, exact=not exact)
    step = q, *pages, meta, segments, table, 64**-0.5, True
    ops.paged_attention_into(out, *step, workspace=workspace, plan=plan, exact=exact)
    assert out.isnan().all()


def test_a_step_of_too_many_tokens_runs_chunk_attention(device: str) -> None:
    spans = [(1, 0, 5)]
    cache, q = filled_rows(spans, 1, 64, device), queries(4097, 1, 64, device)
    step = tokens_and_segments(spans, device, dead_after=4092)
    exact = attend(q, cache, *step, make_workspace(64, device))
    assert_same_bits(exact, chunk_attention.attend(q, cache, *step))


def test_a_workspace_without_room_for_one_cta_is_refused() -> None:
    cache, q = filled_rows([(1, 0, 5)], 1, 64, "cpu"), queries(5, 1, 64, "cpu")
    workspace = torch.zeros(ops.chunk_workspace_words(64, 1))
    with pytest.raises(RuntimeError, match="expected dimension 0 to be at least 76320"):
        attend(q, cache, *tokens_and_segments([(1, 0, 5)], "cpu"), workspace)

"""chunk_plan_into: how attention with a workspace deals out a step, by a plain reference of it; and
attention with plans that are right, or none of its own.

Where that kernel does not run, on a CPU for one, nothing is written.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import ops
from photon_ext._library import hopper_runs
from photon_ext.layout import Meta
from tests.ops.caches import Cache, tokens_and_segments
from tests.ops.numeric import assert_same_bits, ints, poisoned
from tests.ops.test_chunk_attention import (
    Span,
    attend,
    expected_of,
    filled_rows,
    make_plan,
    queries,
    set_sms,
)

ROWS_OF_TILE, KV_TILE, COST = 128, 128, 2
LEAST_KV_TILES, MERGE_COST, LANES = 4, 4, 32
SIZES_WORDS, CTA_WORDS, TILE_WORDS = 16, 16, 8
KV_HEADS, HEAD_DIM = 2, 64


class QueryTile(NamedTuple):
    """Tokens of one row, and the smallest and the largest of their lengths."""

    first: int
    tokens: int
    row: int
    least: int
    most: int

    @property
    def kv_tiles(self) -> int:
        return -(-self.most // KV_TILE)


class Partial(NamedTuple):
    """KV tiles [begin, end) of a query tile and a KV head; which CTAs share these two."""

    query_tile: int
    kv_head: int
    begin: int
    end: int
    first_cta: int = 0
    count: int = 1


class Place(NamedTuple):
    """Of the line of all KV tiles: those below 0 stand for what a partial tile costs."""

    query_tile: int
    kv_head: int
    kv_tile: int


def query_tiles_of(meta: Tensor, cache: Cache, first: int, of_tile: int) -> list[QueryTile]:
    assert cache.page_table is not None
    rows, pages = cache.page_table.shape
    found: list[QueryTile] = []
    before = -1
    for token in range(first, len(meta)):
        row, length = int(meta[token, Meta.ROW]), int(meta[token, Meta.LENGTH])
        if length <= 0 or not 0 <= row < rows:
            before = -1
            continue
        length = min(length, pages * cache.page_size)
        if row != before or (token - first) % of_tile == 0:
            found.append(QueryTile(token, 1, row, length, length))
        else:
            last = found[-1]
            lengths = min(last.least, length), max(last.most, length)
            found[-1] = QueryTile(last.first, last.tokens + 1, row, *lengths)
        before = row
    return found


def line_of(tiles: list[QueryTile], kv_heads: int) -> list[Place]:
    return [
        Place(index, head, kv_tile)
        for index, tile in enumerate(tiles)
        for head in range(kv_heads)
        for kv_tile in range(-COST, tile.kv_tiles)
    ]


def range_size(line: list[Place], ctas: int) -> int:
    return max(-(-len(line) // ctas), 1 + COST)


def partials_within(line: list[Place], begin: int, end: int, size: int) -> list[Partial]:
    """What of the line's places [begin, end) is KV tiles, where each CTA has `size` places."""
    owners: dict[tuple[int, int], list[int]] = {}
    for at, place in enumerate(line):
        if place.kv_tile >= 0:
            owners.setdefault(place[:2], []).append(at // size)
    found = []
    for (query_tile, head), places in groupby(line[begin:end], lambda place: place[:2]):
        own = [place.kv_tile for place in places if place.kv_tile >= 0]
        if own:
            first, last = owners[query_tile, head][0], owners[query_tile, head][-1]
            shared = first, last - first + 1
            found.append(Partial(query_tile, head, own[0], own[-1] + 1, *shared))
    return found


def single_partials(
    tiles: list[QueryTile], kv_heads: int, ctas: int, size: int
) -> list[Partial] | None:
    """One for each CTA, in order, as many as there are; None: CTAs have ranges of the line."""
    slots, work = ctas // kv_heads, [tile.kv_tiles for tile in tiles]
    if len(work) > min(slots, LANES):
        return None
    most = LEAST_KV_TILES
    while sum(-(-each // most) for each in work) > slots:
        most += 1
    if most > size - COST + MERGE_COST:
        return None
    found: list[Partial] = []
    for head in range(kv_heads):
        for index, kv_tiles in enumerate(work):
            length = -(-kv_tiles // -(-kv_tiles // most))
            begins, first = range(0, kv_tiles, length), len(found)
            found += [
                Partial(index, head, begin, min(begin + length, kv_tiles), first, len(begins))
                for begin in begins
            ]
    return found


def check_plan(
    plan: list[int], tiles: list[QueryTile], sizes: tuple[int, int, int, int]
) -> list[list[Partial]]:
    """Whether a plan is that of these query tiles; returns what each CTA computes. `sizes`: tokens,
    CTAs, KV heads, query heads of each.
    """
    _, ctas, kv_heads, _ = sizes
    line = line_of(tiles, kv_heads)
    size = range_size(line, ctas)
    singles = single_partials(tiles, kv_heads, ctas, size)
    work = []
    assert tuple(plan[:4]) == sizes
    for cta in range(ctas):
        first, rest = read_cta(plan[SIZES_WORDS + cta * CTA_WORDS :][:CTA_WORDS], tiles)
        if singles is not None:
            expected = singles[cta : cta + 1]
            assert rest == (0, 0, 0, 0)
            later = []
        else:
            expected = partials_within(line, cta * size, (cta + 1) * size, size)
            assert rest[0] == size
            later = partials_within(line, rest[1], rest[2], size)
            assert not later or rest[3] <= later[0].query_tile
        work.append([first, *later] if first is not None else later)
        assert work[-1] == expected, cta
    at = SIZES_WORDS + ctas * CTA_WORDS
    before = 0
    for tile in tiles:
        upto = before + tile.kv_tiles + COST
        packed = tile.tokens * 2**16 + tile.first
        assert plan[at : at + 6] == [packed, tile.row, tile.least, tile.most, before, upto]
        at, before = at + TILE_WORDS, upto
    return work


def read_cta(words: list[int], tiles: list[QueryTile]) -> tuple[Partial | None, tuple[int, ...]]:
    """Its first partial tile, and what is left: places of a CTA, first, end, query tile."""
    token, tokens, head, begin, end, first_cta, count, *lengths = words[:10]
    rest = tuple(words[12:])
    if tokens == 0:
        return None, rest
    tile = QueryTile(token, tokens, *lengths)
    return Partial(tiles.index(tile), head, begin, end, first_cta, count), rest


def plan_of_step(
    spans: list[Span], group: int, device: str, sms: int, decodes: int = 0, dead_after: int = 3
) -> tuple[list[int], list[QueryTile], tuple[int, int, int, int]]:
    """A plan, the query tiles of its step, and its sizes."""
    if not hopper_runs():
        pytest.skip("no kernel here reads a plan")
    meta, _ = tokens_and_segments(spans, device, dead_after=dead_after)
    cache = filled_rows(spans, KV_HEADS, HEAD_DIM, device)
    q = queries(len(meta), group * KV_HEADS, HEAD_DIM, device)
    workspace = torch.zeros(ops.chunk_workspace_words(HEAD_DIM, sms), device=device)
    counts = ints([decodes, len(meta), len(spans)], device) if decodes else None
    plan = make_plan(q, cache, meta, workspace, counts)
    tiles = query_tiles_of(meta.cpu(), cache, decodes, ROWS_OF_TILE // group)
    return plan.tolist(), tiles, (len(meta), sms, KV_HEADS, group)


# --- right ----------------------------------------------------------------------------------------

FRESH, CUT = [(1, 0, 250)], [(1, 3000, 130)]
PROMPTS = [(row, 0, 64) for row in range(1, 20)]
SINGLES = [(row, 5 * row % 400, 1) for row in range(1, 40)]
MIXED = [(1, 1100, 40), (2, 1, 1), (0, 0, 1), (3, 450, 3), (4, 0, 64)]
NONE = [(0, 0, 1)]


@pytest.mark.parametrize("sms", [1, 3, 8, 40])
@pytest.mark.parametrize("spans", [FRESH, CUT, PROMPTS, SINGLES, MIXED, NONE])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_work_is_dealt_as_the_reference_has_it(
    device: str, group: int, spans: list[Span], sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each KV tile of each head is computed once."""
    set_sms(monkeypatch, device, sms)
    plan, tiles, sizes = plan_of_step(spans, group, device, sms)
    work = [partial for own in check_plan(plan, tiles, sizes) for partial in own]
    found = [
        (part.query_tile, part.kv_head, kv_tile)
        for part in work
        for kv_tile in range(part.begin, part.end)
    ]
    places = line_of(tiles, KV_HEADS)
    assert sorted(found) == [tuple(place) for place in places if place.kv_tile >= 0]


@pytest.mark.parametrize("decodes", [1, 3, 105, 200])
def test_decode_tokens_are_left_out(
    device: str, decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of them, of a step's 108 tokens and dead ones."""
    set_sms(monkeypatch, device, 8)
    plan, tiles, sizes = plan_of_step(MIXED, 2, device, 8, decodes)
    check_plan(plan, tiles, sizes)


@pytest.mark.parametrize("chunk", [1000, 1030, 2100, 4096])
def test_steps_of_many_tokens(device: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have several groups of tokens; query tiles go on from one to the next."""
    set_sms(monkeypatch, device, 40)
    spans = [(1, 0, 5), *((row, row, 33) for row in range(2, 20)), (20, 0, chunk - 599)]
    plan, tiles, sizes = plan_of_step(spans, 1, device, 40, dead_after=0)
    assert sizes[0] == chunk
    check_plan(plan, tiles, sizes)


@pytest.mark.parametrize("token", [[7, 3, 4, 99], [7, 3, 4, -1], [7, 3, -4, 1], [7, 3, 2**30, 2]])
def test_garbage_in_decode_meta_is_dead_or_cut_off(device: str, token: list[int]) -> None:
    if not hopper_runs():
        pytest.skip("no kernel here reads a plan")
    meta, _ = tokens_and_segments([(1, 2, 18), (2, 0, 9)], device)
    cache, q = filled_rows([(1, 2, 18), (2, 0, 9)], 1, 64, device), queries(27, 3, 64, device)
    meta[7] = ints(token, device)
    workspace = torch.zeros(ops.chunk_workspace_words(64, 2), device=device)
    plan = make_plan(q, cache, meta, workspace).tolist()
    check_plan(plan, query_tiles_of(meta.cpu(), cache, 0, 42), (27, 2, 1, 3))


def test_layers_share_a_plan(device: str) -> None:
    """It does not depend on what queries, keys and values are."""
    spans = [(1, 300, 70), (2, 0, 33)]
    meta, segments = tokens_and_segments(spans, device)
    workspace = torch.zeros(ops.chunk_workspace_words(HEAD_DIM, 132), device=device)
    cache = filled_rows(spans, KV_HEADS, HEAD_DIM, device)
    q = queries(len(meta), 4, HEAD_DIM, device)
    plan = make_plan(q, cache, meta, workspace)
    for seed in range(2):
        q = queries(len(meta), 4, HEAD_DIM, device, seed=seed)
        for row, first, count in spans:
            cache.fill(row, first + count, seed=row + 10 * seed)
        out = poisoned(*q.shape, dtype=q.dtype, device=device)
        step = q, cache.k, cache.v, meta, segments, cache.page_table, HEAD_DIM**-0.5, True
        ops.paged_attention_into(out, *step, workspace=workspace, pdl=True, plan=plan)
        assert_same_bits(out, attend(q, cache, meta, segments, workspace=workspace))


# --- where it does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [96, 64])
def test_where_no_kernel_reads_it_nothing_is_written(device: str, head_dim: int) -> None:
    """Of head_dim 64 a CPU, and pages of 8 positions."""
    spans = [(1, 0, 20)]
    cache, q = filled_rows(spans, 1, head_dim, device, 8), queries(20, 2, head_dim, device)
    meta, _ = tokens_and_segments(spans, device)
    plan = make_plan(q, cache, meta, torch.zeros(40000, device=device))
    assert_same_bits(plan, poisoned(*plan.shape, dtype=plan.dtype, device=device))


@pytest.mark.parametrize("made_for", ["nothing", "fewer tokens", "fewer heads", "fewer CTAs"])
def test_with_the_plan_of_another_call_live_tokens_stay_as_they_are(
    device: str, made_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are zeros; the right plan serves then."""
    if not hopper_runs():
        pytest.skip("no kernel here reads a plan")
    set_sms(monkeypatch, device, 8)
    spans = [(1, 60, 64), (2, 0, 33)]
    cache, q = filled_rows(spans, 2, 64, device), queries(99, 4, 64, device)
    meta, segments = tokens_and_segments(spans, device, dead_after=2)
    large, small = (
        torch.zeros(ops.chunk_workspace_words(64, ctas), device=device) for ctas in (8, 3)
    )
    plan = torch.zeros(ops.chunk_plan_words(99, 8), dtype=torch.int32, device=device)
    others = {
        "nothing": None,
        "fewer tokens": (q[:98], meta[:98], large),
        "fewer heads": (q[:, :2], meta, large),
        "fewer CTAs": (q, meta, small),
    }
    if (given := others[made_for]) is not None:
        own, tokens, workspace = given
        ops.chunk_plan_into(plan, own, cache.k, cache.v, tokens, cache.page_table, workspace)
    out = poisoned(*q.shape, dtype=q.dtype, device=device)
    step = q, cache.k, cache.v, meta, segments, cache.page_table, 64**-0.5, True
    ops.paged_attention_into(out, *step, workspace=large, plan=plan)
    assert out[:97].isnan().all()
    assert not out[97:].any()
    ops.chunk_plan_into(plan, q, cache.k, cache.v, meta, cache.page_table, large)
    ops.paged_attention_into(out, *step, workspace=large, plan=plan)
    assert torch.allclose(out.double(), expected_of(q, cache, meta, segments), atol=0.02)


def test_a_plan_that_is_not_aligned_runs_chunk_attention(device: str) -> None:
    spans = [(1, 60, 64)]
    cache, q = filled_rows(spans, 1, 64, device), queries(64, 4, 64, device)
    meta, segments = tokens_and_segments(spans, device)
    workspace = torch.zeros(ops.chunk_workspace_words(64, 1), device=device)
    plan = torch.zeros(ops.chunk_plan_words(64, 1) + 1, dtype=torch.int32, device=device)[1:]
    ops.chunk_plan_into(plan, q, cache.k, cache.v, meta, cache.page_table, workspace)
    assert not plan.any()
    out = poisoned(*q.shape, dtype=q.dtype, device=device)
    step = q, cache.k, cache.v, meta, segments, cache.page_table, 64**-0.5, True
    ops.paged_attention_into(out, *step, workspace=workspace, plan=plan)
    assert_same_bits(out, attend(q, cache, meta, segments))


@pytest.mark.parametrize("written", ["plan", "workspace"])
def test_a_plan_lies_apart_from_what_is_read_beside_it(written: str) -> None:
    cache, q = filled_rows([(1, 0, 3)], 1, 64, "cpu"), queries(3, 2, 64, "cpu")
    memory = torch.zeros(ops.chunk_workspace_words(64, 1))
    plan, workspace = memory.view(torch.int32), memory.clone()
    meta, segments = tokens_and_segments([(1, 0, 3)], "cpu")
    if written == "plan":
        meta = plan[8:20].view(3, 4)
        with pytest.raises(RuntimeError, match="plan shares memory with decode_meta"):
            ops.chunk_plan_into(plan, q, cache.k, cache.v, meta, cache.page_table, workspace)
        return
    step = q, cache.k, cache.v, meta, segments, cache.page_table, 0.1, True
    with pytest.raises(RuntimeError, match="workspace shares memory with plan"):
        ops.paged_attention_into(torch.zeros_like(q), *step, workspace=memory, plan=plan)


@pytest.mark.parametrize(("tokens", "ctas"), [(-1, 1), (5, 0)])
def test_a_plan_of_no_size_is_refused(tokens: int, ctas: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {tokens}, ctas {ctas}; tokens must not be"):
        ops.chunk_plan_words(tokens, ctas)


def test_steps_that_have_no_plan_need_no_room() -> None:
    assert ops.chunk_plan_words(4097, 3) == ops.chunk_plan_words(4096, 3)

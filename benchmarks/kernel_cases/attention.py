"""Attention of decode steps (fused with rotation and append) and of prompt chunks, over paged KV;
torch's gets the same KV contiguous."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.common.replay import Run
from benchmarks.common.session import PAGE_SIZE
from benchmarks.kernel_cases.case import (
    Baseline,
    Case,
    Plan,
    Setting,
    bind,
    check_finite,
    compare,
    rotated_case,
)
from photon_ext import ops, reference
from photon_ext.layout import NO_PAGE, SegmentFlag
from photon_ext.models.rope import rope_tables

DECODE, CHUNK, APPEND = "fused_attention_decode_into", "paged_attention_into", "rope_append_kv_"
PLAN = "chunk_plan_into"
WAYS = ("portable", "hopper")
BALANCED = "balanced"  # Hopper's with a workspace: dealt evenly to all SMs
EXACT = "exact"  # the same, with cuts that do not depend on the step
FP8 = "fp8"  # Hopper's of keys and values in fp8
CHUNK_WAYS = (*WAYS, BALANCED, EXACT, FP8)
MOST_CTAS = 256  # at least as many as a GPU has SMs
APPEND_RUNS = 16
CHECKED_TOKENS = 4  # the reference takes tokens one by one


class Pages(NamedTuple):
    """KV of several batches: k and v [pages, page size, kv heads, head_dim], for each batch a page
    table [1 + rows, pages per row], and in fp8 scales [pages, 2, kv heads, page size]."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    scale: torch.Tensor | None = None


def decode_groups(
    setting: Setting, batches: list[int], contexts: list[int]
) -> Iterator[list[Plan]]:
    """Decode tokens of rows of equal length, a group per context and batch."""
    for context in contexts:
        for batch in batches:
            sizes = [setting._replace(batch=batch, context=context, way=way) for way in WAYS]
            yield [Plan((DECODE,), "attention", at, _decode, _memory(at)) for at in sizes]
    appends = [setting._replace(batch=batch) for batch in batches]
    yield [Plan((APPEND,), "append", at, _append) for at in appends]


def chunk_groups(setting: Setting, chunks: list[int], contexts: list[int]) -> Iterator[list[Plan]]:
    """Chunks of one row at the end of a context, a group per context; and plans of chunks."""
    for context in contexts:
        sizes = [
            setting._replace(context=context, chunk=chunk, way=way)
            for chunk in chunks
            for way in CHUNK_WAYS
            if chunk <= context
        ]
        yield [Plan((CHUNK,), "chunk", at, _chunk, _memory(at)) for at in sizes]
    plans = [setting._replace(context=chunk, chunk=chunk, way=BALANCED) for chunk in chunks]
    yield [Plan((PLAN,), "plan", at, _plan, 2 * _memory(at)) for at in plans]


def _kv_bytes(at: Setting) -> int:
    """Bytes of one layer's KV."""
    if at.way == FP8:
        return 2 * at.batch * at.context * at.config.kv_heads * (at.config.head_dim + 4)
    return 2 * at.nbytes(at.batch, at.context, at.config.kv_size)


def _memory(at: Setting) -> int:
    """Pages for us, and contiguous KV for torch; numbers in fp8 are made of wider ones."""
    return (8 if at.way == FP8 else 2) * at.rotation.copies(_kv_bytes(at)) * _kv_bytes(at)


def _pages(at: Setting) -> Pages:
    """Pages in random order. Row 0 is nobody's and has none."""
    copies, per_row = at.rotation.copies(_kv_bytes(at)), -(-at.context // PAGE_SIZE)
    count = copies * at.batch * per_row
    shape = (count, PAGE_SIZE, at.config.kv_heads, at.config.head_dim)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.full((copies, at.batch + 1, per_row), NO_PAGE, dtype=torch.int32)
    tables[:, 1:] = order.view(copies, at.batch, per_row)
    pages = Pages(at.normal(*shape), at.normal(*shape, seed=1), tables.to(at.device))
    return _in_fp8(pages) if at.way == FP8 else pages


def _in_fp8(pages: Pages) -> Pages:
    (k, of_k), (v, of_v) = map(reference.quantize_heads, (pages.k, pages.v))
    scale = torch.stack([of_k.transpose(1, 2), of_v.transpose(1, 2)], dim=1)
    return Pages(k, v, pages.tables, scale.contiguous())


def _sdpa(at: Setting, name: str, query: torch.Tensor, mask: Any = None) -> Baseline:
    """torch's attention on contiguous KV: k and v [copies, batch, kv heads, context, head_dim]."""
    config, copies = at.config, at.rotation.copies(_kv_bytes(at))
    shape = (copies, at.batch, config.kv_heads, at.context, config.head_dim)
    pairs = zip(at.normal(*shape), at.normal(*shape, seed=1), strict=True)
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    return Baseline(name, [partial(attend, query, key, value) for key, value in pairs])


def _by_flash(run: Run) -> Run:
    """With torch's FLASH_ATTENTION backend and no other."""

    def attend() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return run()

    return attend


def _heads(at: Setting) -> list[torch.Tensor]:
    """q, k and v of a batch."""
    counts = (at.config.q_heads, at.config.kv_heads, at.config.kv_heads)
    return [at.normal(at.batch, heads, at.config.head_dim) for heads in counts]


def _gains(at: Setting) -> list[torch.Tensor | None]:
    return [at.gain(at.config.head_dim) if at.config.qk_norm else None for _ in range(2)]


def _decode(at: Setting) -> Case:
    pages, (q, k, v), length = _pages(at), _heads(at), at.context
    out = at.unwritten(*q.shape)
    meta = at.ints([[7, length - 1, length, 1 + row] for row in range(at.batch)])
    tables = rope_tables(at.config, length, at.device)
    rest = (*tables, at.config.head_dim**-0.5, *_gains(at), at.config.rms_eps)
    options: dict[str, Any] = {"way": at.way, "pdl": at.pdl}
    if at.way == "hopper":
        options["workspace"] = _workspace(at)
    given = (out, q, k, v, pages.k, pages.v, meta)
    runs = [bind(DECODE, *given, table, *rest, **options) for table in pages.tables]

    def verify() -> float:
        runs[0]()
        some, table = min(at.batch, CHECKED_TOKENS), pages.tables[0]
        last = table[1 : 1 + some, (length - 1) // PAGE_SIZE].long(), (length - 1) % PAGE_SIZE
        appended, expected = pages.k[last].clone(), torch.empty_like(out[:some])
        few = (expected, *(each[:some] for each in (q, k, v)), pages.k, pages.v, meta[:some])
        arguments: tuple[Any, ...] = (*few, table, *rest)
        reference.fused_attention_decode_into(*arguments)
        check_finite("attention", out)
        compare("appended keys", appended, pages.k[last])
        return compare("attention", out[:some], expected)

    name = "SDPA on contiguous KV, without norm, rotation and append"
    baseline = partial(_sdpa, at, name, q[:, :, None])
    kv, flops = _kv_bytes(at), 4 * at.batch * length * at.config.q_size
    nbytes = kv + sum(tensor.nbytes for tensor in (q, k, v, out))
    return Case(runs, nbytes, verify, baseline, at.rotation.cold(kv), flops)


def _workspace(at: Setting) -> torch.Tensor:
    """Scratch memory in which Hopper's attention adds up its splits; zeroed once by its owner."""
    config = at.config
    words = ops.attention_workspace_words(
        at.batch, config.q_heads, config.kv_heads, config.head_dim
    )
    return torch.zeros(words, dtype=torch.float32, device=at.device)


def _balanced(at: Setting, q: torch.Tensor, pages: Pages, meta: torch.Tensor) -> dict[str, Any]:
    """Scratch memory, zeroed once, and the plan of a step, which is written once, not timed."""
    exact = at.way == EXACT
    words = ops.chunk_workspace_words(at.config.head_dim, MOST_CTAS, exact)
    workspace = torch.zeros(words, dtype=torch.float32, device=at.device)
    words = ops.chunk_plan_words(len(q), MOST_CTAS, exact)
    plan = torch.zeros(words, dtype=torch.int32, device=at.device)
    step = meta, pages.tables[0], workspace
    ops.chunk_plan_into(plan, q, pages.k, pages.v, *step, exact=exact)
    return {"workspace": workspace, "plan": plan, "exact": exact}


def _append(at: Setting) -> Case:
    """Rotation of queries, and keys and values into their pages; all of it stays in the cache."""
    heads, shape = _heads(at), (1 + at.batch, PAGE_SIZE, at.config.kv_heads, at.config.head_dim)
    caches = at.normal(*shape), at.normal(*shape, seed=1)
    meta = at.ints([[7, PAGE_SIZE - 1, PAGE_SIZE, 1 + row] for row in range(at.batch)])
    table = at.ints([[row] for row in range(at.batch + 1)])
    norms = (*_gains(at), at.config.rms_eps)
    args = (*heads, *caches, meta, table, *rope_tables(at.config, PAGE_SIZE, at.device), *norms)
    nbytes = 2 * sum(each.nbytes for each in heads)
    return rotated_case(at, APPEND, [None] * APPEND_RUNS, lambda _: args, (0, 3, 4), nbytes)


def _plan(at: Setting) -> Case:
    """How a chunk is dealt out; it is right where attention by such a plan is."""
    pages, (q, meta) = _pages(at), _chunk_tokens(at)
    memory = _balanced(at, q, pages, meta)
    plan, workspace = memory["plan"], memory["workspace"]
    run = bind(PLAN, plan, q, pages.k, pages.v, meta, pages.tables[0], workspace)
    return Case([run], meta.nbytes + plan.nbytes, _chunk(at).verify, None, cold=False)


def _chunk_tokens(at: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and decode_meta of a chunk of row 1."""
    first = at.context - at.chunk
    meta = at.ints([[7, first + i, first + i + 1, 1] for i in range(at.chunk)])
    return at.normal(at.chunk, at.config.q_heads, at.config.head_dim), meta


def _chunk(at: Setting) -> Case:
    pages, chunk, first = _pages(at), at.chunk, at.context - at.chunk
    q, meta = _chunk_tokens(at)
    out, scale = at.unwritten(*q.shape), at.config.head_dim**-0.5
    segments = at.ints([[1, 0, chunk, int(SegmentFlag.SAMPLE | SegmentFlag.STAGED)]])
    given = (out, q, pages.k, pages.v, meta, segments)
    options: dict[str, Any] = {"way": at.way if at.way in WAYS else "hopper"}
    options |= {"kv_scale": pages.scale, "pdl": at.pdl}
    if at.way in (BALANCED, EXACT):
        options |= _balanced(at, q, pages, meta)
    runs = [bind(CHUNK, *given, table, scale, **options) for table in pages.tables]

    def verify() -> float:
        runs[0]()
        some = torch.tensor(sorted({0, chunk // 3, chunk // 2, chunk - 1}), device=at.device)
        tables = meta[some], segments, pages.tables[0]
        caches = pages.k, pages.v
        expected = reference.paged_attention(q[some], *caches, *tables, scale, kv_scale=pages.scale)
        check_finite("chunk attention", out)
        return compare("chunk attention", out[some], expected)

    query, mask = q.transpose(0, 1)[None], causal_lower_right(chunk, at.context)

    def baseline() -> Baseline:
        made = _sdpa(at, "SDPA on contiguous KV", query, mask)
        if at.device.type != "cuda":
            return made
        return Baseline("FLASH_ATTENTION on contiguous KV", [*map(_by_flash, made.runs)])

    seen = chunk * first + chunk * (chunk + 1) // 2  # pairs of a query and a key it may see
    kv, flops = _kv_bytes(at), 4 * seen * at.config.q_size
    nbytes = kv + q.nbytes + out.nbytes
    return Case(runs, nbytes, verify, baseline, at.rotation.cold(kv), flops)

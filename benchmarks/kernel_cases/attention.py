"""Attention of decode steps (fused with rotation and append) and of prompt chunks, over paged
KV; torch's gets the same KV contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.common.session import PAGE_SIZE
from benchmarks.kernel_cases.case import (
    Baseline,
    Case,
    Plan,
    Setting,
    argument_names,
    bind,
    check_finite,
    compare,
    ints,
    normal,
    unwritten,
    verify_call,
    way_arguments,
)
from photon_ext import ops, reference
from photon_ext.layout import SegmentFlag
from photon_ext.models.config import ModelConfig
from photon_ext.models.rope import rope_tables

WAYS = ("portable", "hopper")
APPEND_RUNS = 16
CHECKED_TOKENS = 4  # the reference takes tokens one by one


class Pages(NamedTuple):
    """KV of `copies` batches: k and v [pages, page size, kv heads, head_dim], and a page table
    [1 + rows, pages per row] for each copy.
    """

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor


def decode_groups(
    config: ModelConfig, setting: Setting, batches: list[int], contexts: list[int]
) -> Iterator[list[Plan]]:
    """Decode tokens of equal length, a group per context and batch."""
    for context in contexts:
        for batch in batches:
            labels = {"batch": batch, "context": context}
            memory = (
                2
                * _kv_copies(config, setting, batch, context)
                * _kv_bytes(config, setting, batch, context)
            )
            make = partial(_decode, config, setting, batch, context)
            yield [
                Plan(
                    ("fused_attention_decode_into",),
                    "attention",
                    labels,
                    way,
                    partial(make, way),
                    memory,
                )
                for way in WAYS
            ]
    yield [
        Plan(
            ("rope_append_kv_",),
            "append",
            {"batch": batch},
            "plain",
            partial(_append, config, setting, batch),
        )
        for batch in batches
    ]


def chunk_groups(
    config: ModelConfig, setting: Setting, chunks: list[int], contexts: list[int]
) -> Iterator[list[Plan]]:
    """Chunks of one row at the end of a context, a group per context."""
    for context in contexts:
        plans = []
        for chunk in (chunk for chunk in chunks if chunk <= context):
            labels = {"batch": 1, "context": context, "chunk": chunk}
            memory = (
                2 * _kv_copies(config, setting, 1, context) * _kv_bytes(config, setting, 1, context)
            )
            make = partial(_chunk, config, setting, chunk, context)
            plans += [
                Plan(("paged_attention_into",), "chunk", labels, way, partial(make, way), memory)
                for way in WAYS
            ]
        yield plans


def _kv_bytes(config: ModelConfig, setting: Setting, batch: int, context: int) -> int:
    """Bytes of one layer's KV."""
    return 2 * batch * context * config.kv_size * setting.dtype.itemsize


def _kv_copies(config: ModelConfig, setting: Setting, batch: int, context: int) -> int:
    return setting.rotation.copies(_kv_bytes(config, setting, batch, context))


def _pages(config: ModelConfig, setting: Setting, batch: int, context: int) -> Pages:
    """Pages in random order; page 0 is nobody's."""
    copies, pages_per_row = _kv_copies(config, setting, batch, context), -(-context // PAGE_SIZE)
    pages = copies * batch * pages_per_row
    shape = (1 + pages, PAGE_SIZE, config.kv_heads, config.head_dim)
    order = 1 + torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.zeros(copies, batch + 1, pages_per_row, dtype=torch.int32)
    tables[:, 1:] = order.view(copies, batch, pages_per_row)
    return Pages(
        normal(setting, *shape), normal(setting, *shape, seed=1), tables.to(setting.device)
    )


def _contiguous(
    config: ModelConfig, setting: Setting, batch: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [copies, batch, kv heads, context, head_dim]."""
    shape = (
        _kv_copies(config, setting, batch, context),
        batch,
        config.kv_heads,
        context,
        config.head_dim,
    )
    return normal(setting, *shape), normal(setting, *shape, seed=1)


def _decode(config: ModelConfig, setting: Setting, batch: int, context: int, way: str) -> Case:
    pages = _pages(config, setting, batch, context)
    q, k, v = (
        normal(setting, batch, heads, config.head_dim)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    )
    out = unwritten(setting, batch, config.q_heads, config.head_dim)
    meta = ints(setting, [[7, context - 1, context, 1 + row] for row in range(batch)])
    cos, sin = rope_tables(config, context, setting.device)
    gains = [
        1 + normal(setting, config.head_dim, deviation=0.1) if config.qk_norm else None
        for _ in range(2)
    ]
    scale = config.head_dim**-0.5
    workspace = _workspace(config, setting, batch) if way == "hopper" else {}
    call = torch.ops.photon_ext.fused_attention_decode_into.default
    options: dict[str, Any] = {**way_arguments("fused_attention_decode_into", way), **workspace}
    rest = (cos, sin, scale, *gains, config.rms_eps)

    def verify() -> float:
        num_tokens = min(batch, CHECKED_TOKENS)
        table = pages.tables[0]
        call(out, q, k, v, pages.k, pages.v, meta, table, *rest, **options)
        last = (
            table[1 : 1 + num_tokens, (context - 1) // PAGE_SIZE].long(),
            (context - 1) % PAGE_SIZE,
        )
        appended = pages.k[last].clone()
        expected = torch.empty_like(out[:num_tokens])
        reference.fused_attention_decode_into(
            expected,
            q[:num_tokens],
            k[:num_tokens],
            v[:num_tokens],
            pages.k,
            pages.v,
            meta[:num_tokens],
            table,
            *rest,
        )
        errors = (
            compare("attention", out[:num_tokens], expected),
            compare("appended keys", appended, pages.k[last]),
        )
        check_finite("attention", out)
        return max(errors)

    def baseline() -> Baseline:
        keys, values = _contiguous(config, setting, batch, context)
        query = q[:, :, None]
        calls = [
            partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True)
            for key, value in zip(keys, values, strict=True)
        ]
        return Baseline("SDPA on contiguous KV, without norm, rotation and append", calls)

    kv = _kv_bytes(config, setting, batch, context)
    runs = [
        partial(call, out, q, k, v, pages.k, pages.v, meta, table, *rest, **options)
        for table in pages.tables
    ]
    nbytes = kv + sum(tensor.nbytes for tensor in (q, k, v, out))
    return Case(
        runs,
        nbytes,
        verify,
        baseline,
        setting.rotation.cold(kv),
        flops=4 * batch * context * config.q_size,
    )


def _append(config: ModelConfig, setting: Setting, batch: int) -> Case:
    """Rotation of queries, and keys and values into their pages; all of it stays in the cache."""
    q, k, v = (
        normal(setting, batch, heads, config.head_dim)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    )
    caches = [
        normal(setting, 1 + batch, PAGE_SIZE, config.kv_heads, config.head_dim) for _ in range(2)
    ]
    meta = ints(setting, [[7, PAGE_SIZE - 1, PAGE_SIZE, 1 + row] for row in range(batch)])
    table = ints(setting, [[row] for row in range(batch + 1)])
    gains = [
        1 + normal(setting, config.head_dim, deviation=0.1) if config.qk_norm else None
        for _ in range(2)
    ]
    args = (
        q,
        k,
        v,
        *caches,
        meta,
        table,
        *rope_tables(config, PAGE_SIZE, setting.device),
        *gains,
        config.rms_eps,
    )
    verify = partial(verify_call, "rope_append_kv_", args, (0, 3, 4), "plain")
    return Case(
        [bind("rope_append_kv_", *args)] * APPEND_RUNS,
        2 * (q.nbytes + k.nbytes + v.nbytes),
        verify,
        None,
        cold=False,
    )


def _workspace(config: ModelConfig, setting: Setting, batch: int) -> dict[str, Any]:
    """The scratch memory in which the splits of the fast way meet; zeroed once, as its owner
    must.
    """
    if "workspace" not in argument_names("fused_attention_decode_into"):
        return {}
    words = ops.attention_workspace_words(batch, config.q_heads, config.kv_heads, config.head_dim)
    return {"workspace": torch.zeros(words, dtype=torch.float32, device=setting.device)}


def _chunk(config: ModelConfig, setting: Setting, chunk: int, context: int, way: str) -> Case:
    pages = _pages(config, setting, 1, context)
    q, out = (
        normal(setting, chunk, config.q_heads, config.head_dim),
        unwritten(setting, chunk, config.q_heads, config.head_dim),
    )
    first = context - chunk
    meta = ints(setting, [[7, first + i, first + i + 1, 1] for i in range(chunk)])
    segments = ints(setting, [[1, 0, chunk, int(SegmentFlag.SAMPLE | SegmentFlag.STAGED)]])
    scale = config.head_dim**-0.5

    runs = [
        bind(
            "paged_attention_into", out, q, pages.k, pages.v, meta, segments, table, scale, way=way
        )
        for table in pages.tables
    ]

    def verify() -> float:
        runs[0]()
        some = torch.tensor(sorted({0, chunk // 3, chunk // 2, chunk - 1}), device=setting.device)
        expected = reference.paged_attention(
            q[some], pages.k, pages.v, meta[some], segments, pages.tables[0], scale
        )
        check_finite("chunk attention", out)
        return compare("chunk attention", out[some], expected)

    def baseline() -> Baseline:
        keys, values = _contiguous(config, setting, 1, context)
        query, mask = q.transpose(0, 1)[None], causal_lower_right(chunk, context)
        calls = [
            partial(
                F.scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=True
            )
            for key, value in zip(keys, values, strict=True)
        ]
        return Baseline("SDPA on contiguous KV", calls)

    seen = chunk * first + chunk * (chunk + 1) // 2  # pairs of a query and a key it may see
    kv = _kv_bytes(config, setting, 1, context)
    return Case(
        runs,
        kv + q.nbytes + out.nbytes,
        verify,
        baseline,
        setting.rotation.cold(kv),
        flops=4 * seen * config.q_size,
    )

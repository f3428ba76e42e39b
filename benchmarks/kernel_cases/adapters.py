"""The two halves of adapters beside the projections of a layer, and the links behind them: all
tokens with one adapter, and each with its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernel_cases.case import Case, Plan, Setting, rotated_case
from benchmarks.kernel_cases.linears import Projection, projections
from photon_ext import ops
from photon_ext.layout import META_COLUMNS, ROW_COLUMNS, Meta, RowColumn
from photon_ext.models.projections import layer_projections

RANK = 16


def adapter_groups(setting: Setting, batches: list[int]) -> Iterator[list[Plan]]:
    """One group per projection of a layer."""
    halves = {"lora_shrink_into": _shrink, "lora_expand_": _expand, "lora_link_": _link}
    for each in projections(setting.config)[:-1]:
        yield [
            Plan((op,), f"{each.what}, {adapters}", setting._replace(batch=batch), make)
            for batch in batches
            for adapters, count in (("one adapter", 1), ("own adapters", batch))
            if count == 1 or batch > 1
            for op, half in halves.items()
            for make in (partial(half, each, count),)
        ]


def _tokens(at: Setting, adapters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """decode_meta and row_state: token t is row t + 1, whose slot is one of the first."""
    meta = torch.zeros(at.batch, META_COLUMNS, dtype=torch.int32)
    meta[:, Meta.LENGTH] = 1
    meta[:, Meta.ROW] = torch.arange(1, at.batch + 1)
    rows = torch.zeros(at.batch + 1, ROW_COLUMNS, dtype=torch.int32)
    rows[1:, RowColumn.LORA_SLOT] = 1 + torch.arange(at.batch) % adapters
    return meta.to(at.device), rows.to(at.device)


def _shrink(each: Projection, adapters: int, at: Setting) -> Case:
    rows = len(layer_projections(at.config)[each.what].rows) * RANK
    every = at.stack(adapters, rows, each.k, deviation=each.k**-0.5)
    x, out = at.normal(at.batch, each.k), at.unwritten(at.batch, rows)
    nbytes, tokens = every[0].nbytes + x.nbytes + out.nbytes, _tokens(at, adapters)
    return rotated_case(at, "lora_shrink_into", every, lambda a: (out, x, a, *tokens), (0,), nbytes)


def _expand(each: Projection, adapters: int, at: Setting) -> Case:
    rows = layer_projections(at.config)[each.what].rows
    parts, first = len(rows), rows[0]
    every = at.stack(adapters, each.n, RANK, deviation=RANK**-0.5)
    h, out = at.normal(at.batch, parts * RANK), at.normal(at.batch, each.n, seed=1)
    nbytes, tokens = every[0].nbytes + h.nbytes + 2 * out.nbytes, _tokens(at, adapters)
    return rotated_case(
        at, "lora_expand_", every, lambda b: (out, h, b, *tokens, first), (0,), nbytes
    )


def _link(each: Projection, adapters: int, at: Setting) -> Case:
    """Behind a projection of a fused layer, in bfloat16."""
    at = at._replace(dtype=torch.bfloat16)
    ours, dtype = layer_projections(at.config), torch.float32
    following = {"o": "gate_up", "gate_up": "down", "down": "qkv"}.get(each.what)
    rows, own = ours[each.what].n, ours[each.what]
    a_rows = RANK * len(ours[following].rows) if following else 0
    width = ours[following].k if following else 0
    every = at.stack(adapters, rows * RANK + a_rows * width, deviation=RANK**-0.5)
    x, act = at.normal(at.batch, rows), at.unwritten(at.batch, rows // 2)
    normalizes = following and ours[following].normed
    norm = at.gain(width) if normalizes else None
    before = at.normal(*ops.lora_link_sums(at.batch, RANK * len(own.rows), each.k)).to(dtype).abs()
    shape = ops.lora_link_sums(at.batch, a_rows, width)
    after = torch.empty(shape, dtype=dtype, device=at.device) if following else None
    act_or_none = act if each.what == "gate_up" else None
    eps, tokens = (1e-6 if own.normed else None), _tokens(at, adapters)

    def arguments(memory: torch.Tensor) -> tuple[object, ...]:
        b = memory[:, : rows * RANK].view(adapters, rows, RANK)
        a = memory[:, rows * RANK :].view(adapters, a_rows, width) if following else None
        ended, begun = (before, b, own.rows[0], eps), (after, a, norm)
        return x, *tokens, *ended, act_or_none, *begun

    nbytes = every[0].nbytes + before.nbytes + (after.nbytes if after is not None else 0)
    nbytes += x.nbytes + (x if act_or_none is None else act).nbytes
    written = (0,) if act_or_none is None else (7,)
    return rotated_case(at, "lora_link_", every, arguments, written, nbytes)

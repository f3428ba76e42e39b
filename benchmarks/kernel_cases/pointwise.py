"""The small ops of a decode step: embedding, norms, activation, masks, sampling, and the head
and tail that keep the row table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import (
    Baseline,
    Case,
    Plan,
    Setting,
    bind,
    compare,
    ints,
    normal,
    unwritten,
    verify_call,
)
from photon_ext import reference
from photon_ext.layout import (
    COUNTS_SIZE,
    NO_TOKEN,
    RECORD_WIDTH,
    ROW_COLUMNS,
    RowColumn,
    SegmentFlag,
)
from photon_ext.models.config import ModelConfig

POSITION, REMAINING = 511, 1 << 30  # rows that no replay brings to their end
PAGES_PER_ROW, STOP_IDS = 256, 16
STATE_RUNS = 16  # ops on tables of a few KiB: nothing to rotate
SAMPLE_WAYS = ("portable", "hopper")


def pointwise_groups(
    config: ModelConfig, setting: Setting, batches: list[int]
) -> Iterator[list[Plan]]:
    """One group per op."""
    for op, (make, what) in _MAKERS.items():
        memory = (
            config.vocab * config.hidden * setting.dtype.itemsize if op == "embedding_into" else 0
        )
        yield [
            Plan(
                (op,),
                what,
                {"batch": batch},
                "plain",
                partial(make, config, setting, batch),
                memory,
            )
            for batch in batches
        ]
    yield [
        Plan(
            ("sample_into",),
            "greedy",
            {"batch": batch},
            way,
            partial(_sample, config, setting, batch, way),
        )
        for batch in batches
        for way in SAMPLE_WAYS
    ]


def _embedding(config: ModelConfig, setting: Setting, batch: int) -> Case:
    table, out = (
        normal(setting, config.vocab, config.hidden),
        unwritten(setting, batch, config.hidden),
    )
    copies = setting.rotation.copies(out.nbytes)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab, (copies, batch), generator=generator, dtype=torch.int32).to(
        setting.device
    )
    metas = torch.zeros(copies, batch, 4, dtype=torch.int32, device=setting.device)
    metas[..., 0], metas[..., 1], metas[..., 2], metas[..., 3] = ids, POSITION, POSITION + 1, 1
    runs = [bind("embedding_into", out, meta, table) for meta in metas]

    def baseline() -> Baseline:
        return Baseline(
            "torch.index_select",
            [partial(torch.index_select, table, 0, each, out=out) for each in ids],
        )

    verify = partial(verify_call, "embedding_into", (out, metas[0], table), (0,), "plain")
    return Case(runs, 2 * out.nbytes, verify, baseline, setting.rotation.cold(out.nbytes))


def _rms_norm(config: ModelConfig, setting: Setting, batch: int) -> Case:
    gain, out = (
        1 + normal(setting, config.hidden, deviation=0.1),
        unwritten(setting, batch, config.hidden),
    )
    xs = normal(setting, setting.rotation.copies(out.nbytes), batch, config.hidden)
    runs = [bind("rms_norm_into", out, x, gain, config.rms_eps) for x in xs]

    def baseline() -> Baseline:
        return Baseline(
            "F.rms_norm",
            [partial(F.rms_norm, x, (config.hidden,), gain, config.rms_eps) for x in xs],
        )

    verify = partial(
        verify_call, "rms_norm_into", (out, xs[0], gain, config.rms_eps), (0,), "plain"
    )
    return Case(
        runs, 2 * out.nbytes + gain.nbytes, verify, baseline, setting.rotation.cold(out.nbytes)
    )


def _add_rms_norm(config: ModelConfig, setting: Setting, batch: int) -> Case:
    gain, out = (
        1 + normal(setting, config.hidden, deviation=0.1),
        unwritten(setting, batch, config.hidden),
    )
    residual = normal(setting, batch, config.hidden)
    xs = normal(setting, setting.rotation.copies(out.nbytes), batch, config.hidden)
    runs = [bind("add_rms_norm_into", out, residual, x, gain, config.rms_eps) for x in xs]

    def composed(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), (config.hidden,), gain, config.rms_eps)

    def baseline() -> Baseline:
        return Baseline("add_, F.rms_norm", [partial(composed, x) for x in xs])

    verify = partial(
        verify_call,
        "add_rms_norm_into",
        (out, residual, xs[0], gain, config.rms_eps),
        (0, 1),
        "plain",
    )
    return Case(
        runs, 4 * out.nbytes + gain.nbytes, verify, baseline, setting.rotation.cold(out.nbytes)
    )


def _silu_mul(config: ModelConfig, setting: Setting, batch: int) -> Case:
    out = unwritten(setting, batch, config.intermediate)
    both = normal(setting, setting.rotation.copies(2 * out.nbytes), batch, 2 * config.intermediate)
    runs = [bind("silu_mul_into", out, each) for each in both]

    def composed(each: torch.Tensor) -> torch.Tensor:
        gate, up = each.chunk(2, dim=-1)
        return torch.mul(F.silu(gate), up, out=out)

    def baseline() -> Baseline:
        return Baseline("F.silu, torch.mul", [partial(composed, each) for each in both])

    verify = partial(verify_call, "silu_mul_into", (out, both[0]), (0,), "plain")
    return Case(runs, 3 * out.nbytes, verify, baseline, setting.rotation.cold(2 * out.nbytes))


def _select_tokens(config: ModelConfig, setting: Setting, batch: int) -> Case:
    _, segments = _table(setting, batch)
    out = unwritten(setting, batch, config.hidden)
    xs = normal(setting, setting.rotation.copies(out.nbytes), batch, config.hidden)
    runs = [bind("select_tokens_into", out, x, segments) for x in xs]
    verify = partial(verify_call, "select_tokens_into", (out, xs[0], segments), (0,), "plain")
    return Case(runs, 2 * out.nbytes, verify, None, setting.rotation.cold(out.nbytes))


def _apply_token_mask(config: ModelConfig, setting: Setting, batch: int) -> Case:
    """Masks that allow every other id."""
    state, segments = _table(setting, batch)
    mask = torch.full(
        (batch, -(-config.vocab // 32)), 0x55555555, dtype=torch.int32, device=setting.device
    )
    keys, errors = (
        ints(setting, [[1 + i, POSITION] for i in range(batch)]),
        ints(setting, [0] * batch),
    )
    nbytes = batch * config.vocab * setting.dtype.itemsize
    logits = normal(setting, setting.rotation.copies(nbytes), batch, config.vocab)
    rest = (mask, keys, segments, state, errors)

    def verify() -> float:
        actual, expected = logits[0].clone(), logits[0].clone()
        bind("apply_token_mask_", actual, *rest)()
        reference.apply_token_mask_(expected, *rest)
        return compare("masked", actual.isneginf().int(), expected.isneginf().int())

    return Case(
        [bind("apply_token_mask_", each, *rest) for each in logits],
        mask.nbytes + nbytes // 2,
        verify,
        None,
        setting.rotation.cold(nbytes),
    )


def _sample(config: ModelConfig, setting: Setting, batch: int, way: str) -> Case:
    state, segments = _table(setting, batch)
    out = torch.empty(batch, dtype=torch.int32, device=setting.device)
    nbytes = batch * config.vocab * setting.dtype.itemsize
    logits = normal(setting, setting.rotation.copies(nbytes), batch, config.vocab)
    runs = [bind("sample_into", out, each, segments, state, way=way) for each in logits]

    def baseline() -> Baseline:
        return Baseline("torch.argmax", [partial(torch.argmax, each, dim=-1) for each in logits])

    verify = partial(verify_call, "sample_into", (out, logits[0], segments, state), (0,), way)
    return Case(runs, nbytes, verify, baseline, setting.rotation.cold(nbytes))


def _begin_step(config: ModelConfig, setting: Setting, batch: int) -> Case:
    state, segments = _table(setting, batch)
    pages, stops = _side_tables(setting, batch)
    deltas = torch.zeros(64, dtype=torch.int32, device=setting.device)
    staged = torch.full((batch,), NO_TOKEN, dtype=torch.int32, device=setting.device)
    meta, counts = ints(setting, [[-1] * 4] * batch), ints(setting, [-1] * COUNTS_SIZE)
    args = ([state, pages, stops], deltas, segments, staged, meta, counts)
    verify = partial(verify_call, "begin_step_", args, (0, 1, 3, 4, 5), "plain")
    nbytes = segments.nbytes + meta.nbytes + batch * state[0].nbytes
    return Case([bind("begin_step_", *args)] * STATE_RUNS, nbytes, verify, None, cold=False)


def _publish(config: ModelConfig, setting: Setting, batch: int) -> Case:
    state, segments = _table(setting, batch)
    pages, stops = _side_tables(setting, batch)
    record = torch.full((batch, RECORD_WIDTH), -7, dtype=torch.int32, device=setting.device)
    sampled = ints(setting, [i % config.vocab for i in range(batch)])
    args = ([state, pages, stops], record, sampled, segments)
    verify = partial(verify_call, "publish_", args, (0, 1), "plain")
    nbytes = segments.nbytes + record.nbytes + 2 * batch * state[0].nbytes
    return Case([bind("publish_", *args)] * STATE_RUNS, nbytes, verify, None, cold=False)


def _carry_over_ids(config: ModelConfig, setting: Setting, batch: int) -> Case:
    next_ids, prev, index = (ints(setting, list(range(batch))) for _ in range(3))
    args = (next_ids, prev, index)
    verify = partial(verify_call, "carry_over_ids_", args, (0,), "plain")
    return Case(
        [bind("carry_over_ids_", *args)] * STATE_RUNS, 3 * next_ids.nbytes, verify, None, cold=False
    )


def _decode_meta_set(config: ModelConfig, setting: Setting, batch: int) -> Case:
    meta, tokens, positions = (
        ints(setting, [[-1] * 4] * batch),
        ints(setting, [7] * batch),
        ints(setting, [POSITION] * batch),
    )
    args = (meta, tokens, positions)
    verify = partial(verify_call, "decode_meta_set_", args, (0,), "plain")
    return Case(
        [bind("decode_meta_set_", *args)] * STATE_RUNS,
        meta.nbytes + 2 * tokens.nbytes,
        verify,
        None,
        cold=False,
    )


def _table(setting: Setting, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """row_state of `batch` live greedy rows (row 0 is nobody's), and one decode segment for
    each.
    """
    state = torch.zeros(batch + 1, ROW_COLUMNS, dtype=torch.int32)
    state[1:, RowColumn.ALIVE] = 1
    state[1:, RowColumn.POSITION] = POSITION
    state[1:, RowColumn.REMAINING] = REMAINING
    segments = [[1 + i, i, 1, int(SegmentFlag.SAMPLE)] for i in range(batch)]
    return state.to(setting.device), ints(setting, segments)


def _side_tables(setting: Setting, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A page table, and stop ids that no row has."""
    pages = torch.full((batch + 1, PAGES_PER_ROW), -1, dtype=torch.int32, device=setting.device)
    return pages, torch.full((batch + 1, STOP_IDS), -1, dtype=torch.int32, device=setting.device)


_MAKERS = {
    "embedding_into": (_embedding, "embedding"),
    "rms_norm_into": (_rms_norm, "norm"),
    "add_rms_norm_into": (_add_rms_norm, "norm"),
    "silu_mul_into": (_silu_mul, "activation"),
    "select_tokens_into": (_select_tokens, "select"),
    "apply_token_mask_": (_apply_token_mask, "mask"),
    "begin_step_": (_begin_step, "head"),
    "carry_over_ids_": (_carry_over_ids, "head"),
    "decode_meta_set_": (_decode_meta_set, "head"),
    "publish_": (_publish, "tail"),
}

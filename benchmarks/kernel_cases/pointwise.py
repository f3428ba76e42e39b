"""The small ops of a decode step: embedding, norms, activation, masks, sampling, and the head and
tail that keep the row table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import Case, Plan, Setting, bind, compare, rotated_case
from photon_ext import ops, reference
from photon_ext.layout import (
    COUNTS_SIZE,
    LOGPROB_WIDTH,
    NO_TOKEN,
    RECORD_WIDTH,
    ROW_COLUMNS,
    RowColumn,
    SegmentFlag,
)
from photon_ext.row_params import RowParams
from photon_ext.row_words import bias_words, prompt_bits, row_words

POSITION, REMAINING = 511, 1 << 30  # rows that no replay brings to their end
PAGES_PER_ROW, STOP_IDS = 256, 16
STATE_RUNS = 16  # ops on tables of a few KiB: nothing to rotate


def pointwise_groups(setting: Setting, batches: list[int]) -> Iterator[list[Plan]]:
    """One group per op and kind of input."""
    table = setting.nbytes(setting.config.vocab, setting.config.hidden)
    for op, make, what in _MAKERS:
        ways = ("portable", "hopper") if op == "sample_into" else ("plain",)
        memory = table if op == "embedding_into" else 0
        sizes = (setting._replace(batch=batch, way=way) for batch in batches for way in ways)
        yield [Plan((op,), what, at, make, memory) for at in sizes]


def _embedding(at: Setting) -> Case:
    table = at.normal(at.config.vocab, at.config.hidden)
    out = at.unwritten(at.batch, at.config.hidden)
    copies, random = at.rotation.copies(out.nbytes), torch.Generator().manual_seed(0)
    metas = torch.zeros(copies, at.batch, 4, dtype=torch.int32)
    metas[..., 0] = torch.randint(at.config.vocab, (copies, at.batch), generator=random)
    metas[..., 1], metas[..., 2], metas[..., 3] = POSITION, POSITION + 1, 1
    metas = metas.to(at.device)
    calls = "torch.index_select", lambda m: torch.index_select(table, 0, m[:, 0], out=out)
    nbytes, op = 2 * out.nbytes, "embedding_into"
    case = rotated_case(at, op, metas, lambda m: (out, m, table), (0,), nbytes, calls)
    return replace(case, cold=at.rotation.cold(out.nbytes))


def _rms_norm(at: Setting) -> Case:
    hidden, eps = at.config.hidden, at.config.rms_eps
    gain, out, xs = at.gain(hidden), at.unwritten(at.batch, hidden), at.stack(at.batch, hidden)
    calls = "F.rms_norm", lambda x: F.rms_norm(x, (hidden,), gain, eps)
    nbytes, op = 2 * out.nbytes + gain.nbytes, "rms_norm_into"
    return rotated_case(at, op, xs, lambda x: (out, x, gain, eps), (0,), nbytes, calls)


def _add_rms_norm(at: Setting) -> Case:
    hidden, eps = at.config.hidden, at.config.rms_eps
    gain, out, xs = at.gain(hidden), at.unwritten(at.batch, hidden), at.stack(at.batch, hidden)
    residual, nbytes, op = (
        at.normal(at.batch, hidden),
        4 * out.nbytes + gain.nbytes,
        "add_rms_norm_into",
    )

    def composed(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), (hidden,), gain, eps)

    def arguments(x: torch.Tensor) -> tuple[Any, ...]:
        return out, residual, x, gain, eps

    return rotated_case(at, op, xs, arguments, (0, 1), nbytes, ("add_, F.rms_norm", composed))


def _silu_mul(at: Setting) -> Case:
    size = at.config.intermediate
    out, both = at.unwritten(at.batch, size), at.stack(at.batch, 2 * size)

    def composed(each: torch.Tensor) -> torch.Tensor:
        gate, up = each.chunk(2, dim=-1)
        return torch.mul(F.silu(gate), up, out=out)

    calls, nbytes, op = ("F.silu, torch.mul", composed), 3 * out.nbytes, "silu_mul_into"
    return rotated_case(at, op, both, lambda each: (out, each), (0,), nbytes, calls)


def _quantize_fp8(at: Setting) -> Case:
    """What down reads."""
    size, op = at.config.intermediate, "quantize_fp8_into"
    xs, (out, expected) = at.stack(at.batch, size), (at.unwritten_fp8(size) for _ in range(2))

    def verify() -> float:
        ops.quantize_fp8_into(out, xs[0])
        reference.quantize_fp8_into(expected, xs[0])
        pairs = zip(out, expected, strict=True)
        return max(compare(op, one.float(), other.float()) for one, other in pairs)

    nbytes = xs[0].nbytes + sum(part.nbytes for part in out)
    runs = [bind(op, *out, x) for x in xs]
    return Case(runs, nbytes, verify, None, at.rotation.cold(xs[0].nbytes))


def _select_tokens(at: Setting) -> Case:
    _, segments = table(at)
    out, xs = at.unwritten(at.batch, at.config.hidden), at.stack(at.batch, at.config.hidden)
    nbytes, op = 2 * out.nbytes, "select_tokens_into"
    return rotated_case(at, op, xs, lambda x: (out, x, segments), (0,), nbytes)


def _apply_token_mask(at: Setting) -> Case:
    """Masks that allow every other id."""
    state, segments = table(at)
    words = at.batch, -(-at.config.vocab // 32)
    mask = torch.full(words, 0x55555555, dtype=torch.int32, device=at.device)
    keys = at.ints([[1 + i, POSITION, i] for i in range(at.batch)])
    rest = mask, keys, segments, state, at.ints([0] * at.batch)
    logits, op = at.stack(at.batch, at.config.vocab), "apply_token_mask_"

    def verify() -> float:
        actual, expected = logits[0].clone(), logits[0].clone()
        bind(op, actual, *rest)()
        reference.apply_token_mask_(expected, *rest)
        return compare("masked", actual.isneginf().int(), expected.isneginf().int())

    nbytes = mask.nbytes + logits[0].nbytes // 2
    case = rotated_case(at, op, logits, lambda each: (each, *rest), (0,), nbytes)
    return replace(case, verify=verify)


_FILTERS = RowParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.05)
_TOP_P = RowParams(temperature=0.2, top_p=0.9)
_PENALTIES = replace(
    _FILTERS,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    logit_bias={5: -1.0, 900: 2.0},
)


def _sample(at: Setting, params: RowParams | None = None) -> Case:
    """Of greedy rows, or of rows with these parameters."""
    state, segments = table(at)
    out, logits = at.ints([0] * at.batch), at.stack(at.batch, at.config.vocab)
    calls, nbytes = ("torch.argmax", partial(torch.argmax, dim=-1)), logits[0].nbytes
    more: tuple[Any, ...] = ()
    if params is not None:
        words = row_words(params, 1)
        for column in range(RowColumn.TEMPERATURE, RowColumn.LOGPROBS + 1):
            state[1:, column] = words[column]
        more = None, False, [state, *side_tables(at), *_own_tables(at, params)]
    if params is not None and params.logprobs is not None:
        more = *more, at.ints([[0] * LOGPROB_WIDTH] * at.batch)

    def arguments(each: torch.Tensor) -> tuple[Any, ...]:
        return out, each, segments, state, *more

    return rotated_case(at, "sample_into", logits, arguments, (0,), nbytes, calls)


def _own_tables(at: Setting, params: RowParams) -> list[torch.Tensor]:
    """Biases, counts and seen bits of rows whose prompt and answer have some hundred ids."""
    rows, vocab, random = at.batch + 1, at.config.vocab, torch.Generator().manual_seed(0)
    counts = torch.zeros(rows, vocab, dtype=torch.int32)
    answer = torch.randint(vocab, (rows, min(vocab, 300)), generator=random)
    counts.scatter_add_(1, answer, torch.ones_like(answer, dtype=torch.int32))
    prompt = range(0, vocab, 97)
    bits = [prompt_bits([*prompt, *own.nonzero().flatten().tolist()], vocab) for own in counts]
    return [at.ints([bias_words(params)] * rows), counts.to(at.device), at.ints(bits)]


def _state_case(at: Setting, op: str, written: tuple[int, ...], nbytes: int, *args: Any) -> Case:
    """An op on small tables, which stay in the cache."""
    return rotated_case(at, op, [None] * STATE_RUNS, lambda _: args, written, nbytes)


def _begin_step(at: Setting) -> Case:
    state, segments = table(at)
    meta, counts, deltas = (
        at.ints([[-1] * 4] * at.batch),
        at.ints([-1] * COUNTS_SIZE),
        at.ints([0] * 64),
    )
    staged, nbytes = at.ints([NO_TOKEN] * at.batch), segments.nbytes + meta.nbytes
    args = ([state, *side_tables(at)], deltas, segments, staged, meta, counts)
    written, rows = (0, 1, 3, 4, 5), at.batch * state[0].nbytes
    return _state_case(at, "begin_step_", written, nbytes + rows, *args)


def _publish(at: Setting) -> Case:
    state, segments = table(at)
    record = at.ints([[-7] * RECORD_WIDTH] * at.batch)
    tables = [state, *side_tables(at)]
    sampled = at.ints([i % at.config.vocab for i in range(at.batch)])
    nbytes = segments.nbytes + record.nbytes + 2 * at.batch * state[0].nbytes
    return _state_case(at, "publish_", (0, 1), nbytes, tables, record, sampled, segments)


def _carry_over_ids(at: Setting) -> Case:
    args = [at.ints(list(range(at.batch))) for _ in range(3)]
    return _state_case(at, "carry_over_ids_", (0,), 3 * args[0].nbytes, *args)


def _decode_meta_set(at: Setting) -> Case:
    meta = at.ints([[-1] * 4] * at.batch)
    tokens, positions = (at.ints([value] * at.batch) for value in (7, POSITION))
    nbytes = meta.nbytes + 2 * tokens.nbytes
    return _state_case(at, "decode_meta_set_", (0,), nbytes, meta, tokens, positions)


def table(at: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """row_state of live greedy rows (row 0 is nobody's), and a decode segment for each."""
    state = torch.zeros(at.batch + 1, ROW_COLUMNS, dtype=torch.int32)
    state[1:, RowColumn.ALIVE] = 1
    state[1:, RowColumn.POSITION] = POSITION
    state[1:, RowColumn.REMAINING] = REMAINING
    segments = [[1 + i, i, 1, int(SegmentFlag.SAMPLE)] for i in range(at.batch)]
    return state.to(at.device), at.ints(segments)


def side_tables(at: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """A page table, and stop ids that no row has."""
    pages, stops = ([[value] * n] for value, n in ((0, PAGES_PER_ROW), (-1, STOP_IDS)))
    return at.ints(pages * (at.batch + 1)), at.ints(stops * (at.batch + 1))


_MAKERS = (
    ("embedding_into", _embedding, "embedding"),
    ("rms_norm_into", _rms_norm, "norm"),
    ("add_rms_norm_into", _add_rms_norm, "norm"),
    ("silu_mul_into", _silu_mul, "activation"),
    ("quantize_fp8_into", _quantize_fp8, "activation in fp8"),
    ("select_tokens_into", _select_tokens, "select"),
    ("apply_token_mask_", _apply_token_mask, "mask"),
    ("begin_step_", _begin_step, "head"),
    ("carry_over_ids_", _carry_over_ids, "head"),
    ("decode_meta_set_", _decode_meta_set, "head"),
    ("publish_", _publish, "tail"),
    ("sample_into", _sample, "greedy"),
    ("sample_into", partial(_sample, params=RowParams(temperature=1.0)), "temperature"),
    ("sample_into", partial(_sample, params=_FILTERS), "top k + top p + min p"),
    ("sample_into", partial(_sample, params=_TOP_P), "top p"),
    ("sample_into", partial(_sample, params=_PENALTIES), "penalties + top k + top p + min p"),
    ("sample_into", partial(_sample, params=RowParams(logprobs=5)), "5 log-probabilities"),
    ("sample_into", partial(_sample, params=RowParams(logprobs=20)), "20 log-probabilities"),
)

"""The two ops of steps whose answers are objects: features of values, and the choice of the next
value."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernel_cases.case import Case, Plan, Setting, rotated_case
from benchmarks.kernel_cases.pointwise import POSITION, STATE_RUNS, side_tables, table
from photon_ext.layout import META_COLUMNS, Meta, RowColumn

BINS, COORDINATES, SIZES = 1024, 128, 256  # of region heads as they are published


def spatial_groups(setting: Setting, batches: list[int]) -> Iterator[list[Plan]]:
    """One group per op."""
    makers = {"spatial_features_into": _features, "choose_value_": _choose_value}
    for op, make in makers.items():
        yield [Plan((op,), "objects", setting._replace(batch=batch), make) for batch in batches]


def _features(at: Setting) -> Case:
    """Of tokens that are coordinates."""
    meta = torch.zeros(at.batch, META_COLUMNS, dtype=torch.int32)
    meta[:, Meta.TOKEN] = at.config.vocab + torch.arange(at.batch) % BINS
    meta[:, Meta.LENGTH] = 1
    meta[:, Meta.ROW] = torch.arange(1, at.batch + 1)
    meta = meta.to(at.device)
    waves = [torch.ones(shape, device=at.device) for shape in ((COORDINATES,), (2, SIZES))]
    out = at.unwritten(at.batch, 2 * (COORDINATES + SIZES + 1))
    nbytes = out.nbytes + meta.nbytes + sum(each.nbytes for each in waves)
    args = (out, meta, *waves, at.config.vocab, BINS)
    return rotated_case(
        at, "spatial_features_into", [None] * STATE_RUNS, lambda _: args, (0,), nbytes
    )


def _choose_value(at: Setting) -> Case:
    """Of boxes whose x is there."""
    state, segments = table(at)
    state[1:, RowColumn.OBJECT_VALUES] = 3
    state[1:, RowColumn.ANSWER_BEGIN] = POSITION
    tables = [state, *side_tables(at)]
    sampled, logits = at.ints([0] * at.batch), at.stack(at.batch, 3 * BINS)

    def arguments(each: torch.Tensor) -> tuple[object, ...]:
        return sampled, each, segments, tables, at.config.vocab

    return rotated_case(at, "choose_value_", logits, arguments, (0,), logits[0].nbytes // 3)

"""Row tables for tests: small, with rows in every state."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from photon_ext.layout import (
    COUNTS_SIZE,
    DELTA_ZEROS,
    NO_TOKEN,
    ROW_COLUMNS,
    RowColumn,
    SegmentFlag,
)
from tests.ops.numeric import ints, poisoned

SAMPLE, STAGED = int(SegmentFlag.SAMPLE), int(SegmentFlag.STAGED)
# of a row, in the tables behind the three that every step has
EXTENSIONS = {"biases": 4, "token_counts": 40, "seen_bits": 2, "extension": 5}


def float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def row_state(device: str, rows: dict[int, dict[RowColumn, int]], count: int) -> Tensor:
    """A table of `count` rows; the rows given are alive unless they say otherwise."""
    table = torch.zeros(count, ROW_COLUMNS, dtype=torch.int32)
    for row, columns in rows.items():
        table[row, RowColumn.ALIVE] = 1
        for column, value in columns.items():
            table[row, column] = value
    return table.to(device)


@dataclass
class Step:
    """The tensors of one step, in the order begin_step_ takes them; the first seven are tables."""

    row_state: Tensor
    page_table: Tensor
    stop_ids: Tensor
    biases: Tensor
    token_counts: Tensor
    seen_bits: Tensor
    extension: Tensor
    deltas: Tensor
    segments: Tensor
    staged_ids: Tensor
    decode_meta: Tensor
    counts: Tensor

    @property
    def tables(self) -> list[Tensor]:
        return self.tensors()[: 3 + len(EXTENSIONS)]

    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())

    def arguments(self) -> tuple[Any, ...]:
        """Those of begin_step_."""
        tensors = self.tensors()
        return self.tables, *tensors[len(self.tables) :]

    def clone(self) -> Step:
        return Step(*[tensor.clone() for tensor in self.tensors()])


def empty_step(
    device: str,
    state: Tensor,
    segments: list[list[int]],
    num_tokens: int,
    pages: int = 3,
    stops: int = 2,
) -> Step:
    rows = len(state)
    return Step(
        row_state=state,
        page_table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
        stop_ids=torch.zeros(rows, stops, dtype=torch.int32, device=device),
        **{
            name: torch.zeros(rows, width, dtype=torch.int32, device=device)
            for name, width in EXTENSIONS.items()
        },
        deltas=torch.zeros(4, dtype=torch.int32, device=device),
        segments=ints(segments, device).reshape(-1, 4),
        staged_ids=torch.full((num_tokens,), NO_TOKEN, dtype=torch.int32, device=device),
        decode_meta=poisoned(num_tokens, 4, dtype=torch.int32, device=device),
        counts=poisoned(COUNTS_SIZE, dtype=torch.int32, device=device),
    )


def random_step(device: str, seed: int) -> Step:
    """Rows alive and dead, segments of every kind, rows and tokens outside the tables, deltas
    that fit and deltas that do not.
    """
    rng = random.Random(seed)
    rows, num_tokens = rng.choice([2, 5, 40]), rng.choice([0, 1, 6, 33])
    state = torch.tensor(
        [[rng.randrange(50) for _ in range(ROW_COLUMNS)] for _ in range(rows)], dtype=torch.int32
    )
    state[:, RowColumn.ALIVE] = torch.tensor([0] + [rng.randrange(2) for _ in range(rows - 1)])
    state[:, RowColumn.STOP_COUNT] = torch.tensor([rng.randrange(-1, 4) for _ in range(rows)])
    owners = [*range(1, rows), 0, 0, -3, rows, 2**31 - 1]
    rng.shuffle(owners)
    segments, first = [], rng.choice([0, 0, -2])
    for row in owners[: rng.choice([0, 1, 4, len(owners)])]:
        count = rng.choice([1, 1, 1, 0, 3, 40])
        flags = rng.choice([0, SAMPLE, STAGED, SAMPLE | STAGED])
        segments.append([row, first, count, flags])
        first += count
    step = empty_step(device, state.to(device), segments, num_tokens)
    missing = rng.choice([0.0, 0.0, 0.2])
    for token_index in range(num_tokens):
        step.staged_ids[token_index] = NO_TOKEN if rng.random() < missing else rng.randrange(-2, 50)
    step.deltas = ints(_random_deltas(rng, rows), device)
    return step


def _random_deltas(rng: random.Random, rows: int) -> list[int]:
    """Runs over separate thirds of the tables, so that their order does not matter, among runs
    that are out of bounds.
    """
    payload = [1000 + i for i in range(8)]
    sizes = [rows * width for width in (ROW_COLUMNS, 3, 2, *EXTENSIONS.values())]
    runs = []
    for table, size in enumerate(sizes):
        for third in range(3):
            offset = size // 3 * third
            source = DELTA_ZEROS if table and rng.random() < 0.2 else None
            runs.append([table, offset, min(rng.randrange(5), size // 3), source])
    runs += [
        [len(sizes), 0, 1, None],
        [2**31 - 1, 0, 1, None],
        [3, sizes[3], 1, None],
        [4, sizes[4], 1, DELTA_ZEROS],
        [-1, 0, 1, None],
        [0, -1, 1, None],
        [0, 0, -5, None],
        [1, sizes[1] - 1, 2, None],
        [0, 0, 2, 10**6],
        [0, 0, 2, -4],
    ]
    rng.shuffle(runs)
    runs = runs[: rng.randrange(len(runs) + 1)]
    start = 4 + 4 * len(runs)
    words = [len(runs), 0, 0, 0]
    for table, offset, count, source in runs:
        words += [table, offset, count, start + rng.randrange(3) if source is None else source]
    return words + payload

"""The simulated device against the real one: the same words from the ops, the same tokens and
counts from the runtime.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

from photon_ext import ops
from photon_ext.errors import PipelineError
from photon_ext.layout import (
    COUNTS_SIZE,
    DELTA_HEADER,
    MASK_KEY_COLUMNS,
    META_COLUMNS,
    NO_TOKEN,
    RECORD_WIDTH,
    ROW_COLUMNS,
    SEGMENT_COLUMNS,
    InputLayout,
    MaskLayout,
    RecordFlag,
    RowColumn,
    SegmentFlag,
)
from photon_ext.runtime import Runtime
from photon_ext.runtime.ports import RuntimePort
from photon_ext.runtime.step import StepKey, StepKind, StepTensors
from photon_ext.testing import Driver, Request, SimRuntime, ToyModel
from photon_ext.testing.clock import Actor
from photon_ext.testing.kernels import StepKernels
from photon_ext.testing.memory import Access, Memory
from photon_ext.testing.state import DeviceState, SlotState

ROWS, SEGMENTS, TOKENS, VOCAB, STOPS, PAGES = 6, 4, 7, 40, 3, 2
INPUTS = InputLayout(SEGMENTS, TOKENS, 80)
MASKS = MaskLayout(SEGMENTS, VOCAB)
KEY = StepKey(StepKind.PREFILL, TOKENS, SEGMENTS, True)


class World:
    """One random state of tables and slot, with garbage where the kernels have to stand it, held
    twice: as lists and as tensors.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.device = DeviceState(ROWS, PAGES, STOPS, 8)
        self.slot = SlotState(INPUTS, MASKS)
        self.device.row_state[:] = [self.row(row) for row in range(ROWS)]
        self.device.page_table[:] = [[rng.randrange(9) for _ in range(PAGES)] for _ in range(ROWS)]
        self.device.stop_ids[:] = [
            [rng.randrange(VOCAB) for _ in range(STOPS)] for _ in range(ROWS)
        ]
        self.slot.input[:] = self.segments() + self.staged() + self.deltas()
        self.slot.mask[:] = self.keys() + [
            rng.getrandbits(32) - (1 << 31) for _ in range(SEGMENTS * MASKS.row_words)
        ]
        self.device.logits = [
            [rng.randrange(1 << 12) / 256.0 for _ in range(VOCAB)] for _ in range(SEGMENTS)
        ]
        if rng.random() < 0.3:
            self.device.logits[0] = [float("nan")] * VOCAB
        if rng.random() < 0.3:
            self.device.logits[1][rng.randrange(VOCAB)] = float("inf")
        self.device.logits_of = 0
        self.kernels = StepKernels(0, self.device, self.slot, INPUTS, MASKS, ToyModel(VOCAB), None)
        self.access = Access(Memory(check=False), Actor.COMPUTE, (0, 1, 0, 0), "test")
        self.tensors()

    def tensors(self) -> None:
        def words(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        self.row_state, self.page_table = (
            words(self.device.row_state),
            words(self.device.page_table),
        )
        self.stop_ids, self.input, self.mask = (
            words(self.device.stop_ids),
            words(self.slot.input),
            words(self.slot.mask),
        )
        self.logits = torch.tensor(self.device.logits)
        self.decode_meta, self.counts = (
            torch.full((TOKENS, META_COLUMNS), 77, dtype=torch.int32),
            words([5] * COUNTS_SIZE),
        )
        self.errors, self.sampled = words([9] * SEGMENTS), words([9] * SEGMENTS)
        self.records = torch.full((SEGMENTS, RECORD_WIDTH), 77, dtype=torch.int32)

    def row(self, row: int) -> list[int]:
        rng, words = self.rng, [0] * ROW_COLUMNS
        words[RowColumn.LAST_TOKEN] = rng.choice([*[NO_TOKEN] * 5, *range(VOCAB)])
        words[RowColumn.POSITION] = rng.randrange(5)
        words[RowColumn.REMAINING] = rng.randint(1, 3)
        words[RowColumn.ALIVE] = int(row > 0 and rng.random() < 0.75)
        words[RowColumn.GENERATION] = rng.randrange(9)
        words[RowColumn.STOP_COUNT] = rng.randint(0, STOPS)
        words[RowColumn.TEMPERATURE] = struct.unpack(
            "<i", struct.pack("<f", rng.choice([0.0, 0.5, 2.0]))
        )[0]
        words[RowColumn.SEED_LOW], words[RowColumn.SEED_HIGH] = (
            rng.randint(-(2**31), 2**31 - 1),
            rng.randrange(2**31),
        )
        words[RowColumn.CONSTRAINT] = rng.randint(0, 1)
        return words

    def segments(self) -> list[int]:
        rng, words, entry = self.rng, [], 0
        rows = rng.sample([*range(1, ROWS), ROWS + 3, -2], SEGMENTS)
        for row in rows:
            staged = rng.random() < 0.5
            entries = rng.choice([0, 1, 1, 2, 2, 2] if staged else [1, 1, 1, 1, 1, 2])
            flags = rng.choice([0, SegmentFlag.SAMPLE]) | (SegmentFlag.STAGED if staged else 0)
            words += [row, entry, entries, int(flags)]
            entry += entries
        return words

    def staged(self) -> list[int]:
        width = INPUTS.delta_offset - INPUTS.staged_offset
        return [self.rng.choice([*[NO_TOKEN] * 5, *range(VOCAB)]) for _ in range(width)]

    def deltas(self) -> list[int]:
        """A few good runs, and some that point outside a table or the packet."""
        rng = self.rng
        runs = [
            (
                0,
                rng.randrange(1, ROWS) * ROW_COLUMNS
                + rng.choice([RowColumn.POSITION, RowColumn.REMAINING]),
                1,
            ),
            (1, rng.randrange(PAGES, ROWS * PAGES - 2), 2),
            (2, rng.randrange(ROWS * STOPS - 3), 3),
            *rng.sample(
                [
                    (3, 0, 1),
                    (-1, 0, 1),
                    (0, ROWS * ROW_COLUMNS, 1),
                    (1, -1, 1),
                    (2, 0, 99),
                    (0, 0, -1),
                ],
                2,
            ),
        ]
        rng.shuffle(runs)
        base = DELTA_HEADER + 4 * len(runs)
        words = [len(runs), base + 8, 0, 0]
        for table, offset, count in runs:
            words += (table, offset, count, base + rng.randrange(4))
        words += [rng.randint(1, 4) for _ in range(INPUTS.delta_words - len(words))]
        return words

    def keys(self) -> list[int]:
        words = []
        for index in range(SEGMENTS):
            row, _, entries, _ = self.slot.input[index * SEGMENT_COLUMNS :][:SEGMENT_COLUMNS]
            position = (
                self.device.row_state[row][RowColumn.POSITION] + entries - 1
                if 0 < row < ROWS
                else 0
            )
            words += self.rng.choice(
                [(0, 0), (row, position), (row, position), (row, position + 1), (row + 1, position)]
            )
        return words

    @property
    def segment_tensor(self) -> torch.Tensor:
        return self.input[: INPUTS.staged_offset].view(-1, SEGMENT_COLUMNS)

    @property
    def tables(self) -> list[torch.Tensor]:
        return [self.row_state, self.page_table, self.stop_ids]

    def same_tables(self) -> None:
        assert self.row_state.tolist() == self.device.row_state
        assert self.page_table.tolist() == self.device.page_table
        assert self.stop_ids.tolist() == self.device.stop_ids
        assert self.input.tolist() == self.slot.input


@pytest.mark.parametrize("seed", range(60))
def test_begin_step_is_the_ops(seed: int) -> None:
    world = World(seed)
    staged = world.input[INPUTS.staged_offset : INPUTS.staged_offset + TOKENS]
    deltas = world.input[INPUTS.delta_offset :]
    ops.begin_step_(
        world.tables,
        deltas,
        world.segment_tensor,
        staged,
        world.decode_meta,
        world.counts,
    )
    world.kernels.begin_step(KEY, world.access)
    world.same_tables()
    assert world.decode_meta.tolist() == [list(entry) for entry in world.device.decode_meta]
    assert world.counts.tolist() == world.device.counts


@pytest.mark.parametrize("seed", range(60))
def test_masks_sampling_and_publish_are_the_ops(seed: int) -> None:
    world = World(seed)
    rows, keys = (
        world.mask[MASKS.mask_offset :].view(SEGMENTS, -1),
        world.mask[: MASKS.mask_offset].view(-1, MASK_KEY_COLUMNS),
    )
    ops.apply_token_mask_(
        world.logits, rows, keys, world.segment_tensor, world.row_state, world.errors
    )
    ops.sample_into(
        world.sampled, world.logits, world.segment_tensor, world.row_state, world.errors
    )
    ops.publish_(world.tables, world.records, world.sampled, world.segment_tensor, world.errors)
    world.kernels.sampling(KEY, 0, world.access)
    world.same_tables()
    assert world.errors.tolist() == world.device.row_errors
    assert world.sampled.tolist() == world.device.sampled
    assert world.records.flatten().tolist() == world.slot.records


@pytest.mark.parametrize("simulated", [False, True])
def test_a_step_without_its_tokens_is_an_error_and_no_token(
    monkeypatch: pytest.MonkeyPatch, simulated: bool
) -> None:
    runtime: RuntimePort
    if simulated:
        runtime = SimRuntime(2, 32, 2, page_size=4, max_stop_ids=2)
    else:
        runtime = Runtime(
            max_rows=2, max_len=32, depth=2, device="cpu", page_size=4, max_stop_ids=2
        )
    driver = Driver(
        runtime, forward=TorchToy(VOCAB, 4), pages=20, vocab_size=VOCAB, chunk=4, graph=False
    )
    kind: type[Any] = type(driver.pipeline._slots[0])
    launch = kind.launch

    def launch_with_consumed_ids(
        slot: object, key: StepKey, segments: object, staged: list[int], *rest: object
    ) -> object:
        return launch(slot, key, segments, [NO_TOKEN] * len(staged), *rest)

    monkeypatch.setattr(kind, "launch", launch_with_consumed_ids)
    with pytest.raises(PipelineError, match=f"flags {int(RecordFlag.DEAD)};"):
        driver.run(Request((1, 2, 3), 4))
    assert [outcome.tokens for outcome in driver.outcomes] == [[]]


class TorchToy:
    """The toy model as a ``forward`` for the real runtime."""

    def __init__(self, vocab_size: int, page_size: int) -> None:
        self._model = ToyModel(vocab_size)
        self._page_size = page_size
        self._kv: dict[tuple[int, int], int] = {}

    def __call__(self, step: StepTensors) -> None:
        pages = step.page_table.tolist()
        entries = step.decode_meta.tolist()
        for token, position, length, row in entries:
            if length:
                self._kv[pages[row][position // self._page_size], position % self._page_size] = (
                    token
                )
        logits = torch.zeros(len(step.segments), self._model.vocab_size)
        for index, (_, first, count, flags) in enumerate(step.segments.tolist()):
            _, _, length, row = entries[first + count - 1] if count else (0, 0, 0, 0)
            if flags & SegmentFlag.SAMPLE and length:
                context = [
                    self._kv[pages[row][at // self._page_size], at % self._page_size]
                    for at in range(length)
                ]
                logits[index] = torch.tensor(self._model.logits(context))
        step.logits = logits


def follow(tokens: tuple[int, ...]) -> set[int]:
    return {len(tokens), 16 + len(tokens)}


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_driver_gives_the_same_on_the_real_runtime(depth: int, constrained: bool) -> None:
    model = ToyModel(VOCAB)
    asked = [
        Request((1, 2, 3), 9, stop_ids=(model.generate(Request((1, 2, 3), 4))[3],)),
        Request((5,) * 11, 6, temperature=0.9, seed=123456789012),
        Request((4,), 12, allowed=follow if constrained else None),
        Request((9, 8), 1),
    ]

    def serve(runtime: RuntimePort) -> tuple[list[tuple[int, ...]], list[object], tuple[int, ...]]:
        driver = Driver(
            runtime, forward=TorchToy(VOCAB, 4), pages=20, vocab_size=VOCAB, chunk=4, graph=False
        )
        tokens = driver.run(*asked)
        stats = driver.pipeline.stats
        counts = (stats.steps, stats.decode_steps, stats.quiet_steps, stats.zombie_rows)
        return tokens, [outcome.finish for outcome in driver.outcomes], counts

    real = serve(
        Runtime(max_rows=2, max_len=32, depth=depth, device="cpu", page_size=4, max_stop_ids=2)
    )
    simulated = serve(SimRuntime(2, 32, depth, page_size=4, max_stop_ids=2))
    assert real == simulated
    assert real[0] == [model.generate(request) for request in asked]

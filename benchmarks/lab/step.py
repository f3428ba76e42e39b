"""One decode step of a model as a graph, without the runtime, so that kernels can be left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common.result import BenchmarkError
from benchmarks.common.session import PAGE_SIZE
from photon_ext import ops
from photon_ext.layout import ROW_COLUMNS, InputLayout, MaskLayout, RowColumn, SegmentFlag
from photon_ext.models.config import ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import plan_for
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import StepKey
from photon_ext.runtime.step_keys import StepKeys
from photon_ext.runtime.step_program import SharedMemory, SlotMemory, StepProgram, Tables

BLOCKS, BLOCK, WARM_UP = 5, 20, 4  # replays of a turn: so many of so many, behind some more
TAIL = ("sample_into", "publish_")


class LabStep:
    """A decode step of `batch` rows at `context`, from the token before to the published one.

    `without`: kernels that are left out, "o" (O of every layer) or "tail" (sampling and publishing;
    positions then stand still). What is computed is wrong then; how long it takes is a bound.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        batch: int,
        context: int = 512,
        without: str = "",
    ) -> None:
        self.device, self._replays = weights.device, WARM_UP + BLOCKS * BLOCK
        pages = -(-(context + self._replays) // PAGE_SIZE)
        self._decoder = Decoder(
            config,
            weights,
            max_step_tokens=batch,
            max_segments=batch,
            max_len=pages * PAGE_SIZE,
            page_size=PAGE_SIZE,
            num_pages=batch * pages,
            plan=plan_for(config, weights, "hopper"),
        )
        numbers = torch.Generator(self.device).manual_seed(0)
        for each in (*self._decoder._kv.keys, *self._decoder._kv.values):
            each.normal_(generator=numbers)
        table = RowTable(batch, pages, 1)
        self._tables = Tables.zeros(table, self.device)
        inputs = InputLayout(batch, batch, table.delta_capacity)
        masks = MaskLayout(batch, config.vocab)
        slot = SlotMemory.zeros(inputs, masks, self.device)
        rows = torch.arange(1, batch + 1, dtype=torch.int32)
        segments = torch.ones(batch, 4, dtype=torch.int32)
        segments[:, 0], segments[:, 1], segments[:, 3] = rows, rows - 1, int(SegmentFlag.SAMPLE)
        slot.input[: inputs.staged_offset] = segments.view(-1).to(self.device)
        self._tables.page_table[1:] = torch.arange(
            batch * pages, dtype=torch.int32, device=self.device
        ).view(batch, pages)
        begin = context - 1 if without == "tail" else context - 1 - self._replays // 2
        self._state = self._first_state(batch, begin).to(self.device)
        keys, most = StepKeys((batch,)), pages * PAGE_SIZE
        spec = StepSpec(self._decoder.forward, None, config.vocab, keys, 1, True, most)
        shared = SharedMemory.zeros(batch, batch, self.device)
        # a graph does not keep its memory alive
        self._program = StepProgram(spec, self._tables, shared, slot, inputs, masks, hopper=True)
        self.run = self._captured(StepKey(batch, 0, 0, False), weights, without)

    @staticmethod
    def _first_state(batch: int, position: int) -> torch.Tensor:
        state = torch.zeros(batch + 1, ROW_COLUMNS, dtype=torch.int32)
        state[1:, RowColumn.ALIVE] = state[1:, RowColumn.GENERATION] = 1
        state[1:, RowColumn.LAST_TOKEN] = torch.arange(batch, dtype=torch.int32)
        state[1:, RowColumn.POSITION], state[1:, RowColumn.REMAINING] = position, 1 << 30
        return state

    def _captured(
        self, key: StepKey, weights: DecoderWeights, without: str
    ) -> Callable[[], object]:
        def body() -> None:
            with left_out(without, weights):
                self._program.sample(self._program.forward(key), masked=False)

        self.reset()
        if self.device.type != "cuda":
            return body
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph.replay

    def reset(self) -> None:
        """All rows stand at their first position again."""
        self._tables.row_state.copy_(self._state)

    def turn(self) -> float:
        """Milliseconds a step: the median of some blocks of steps, around `context`."""
        self.reset()
        for _ in range(WARM_UP):
            self.run()
        return median(self._block() for _ in range(BLOCKS))

    def tokens(self) -> list[int]:
        """The last one of each row. BenchmarkError: a row has ended, so nothing was measured."""
        state = self._tables.row_state[1:].cpu()
        if not bool((state[:, RowColumn.ALIVE] == 1).all()):
            raise BenchmarkError("rows have ended")
        column: list[int] = state[:, RowColumn.LAST_TOKEN].tolist()
        return column

    def _block(self) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(BLOCK):
                self.run()
            return (time.perf_counter() - begin) * 1e3 / BLOCK
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        for _ in range(BLOCK):
            self.run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / BLOCK


@contextmanager
def left_out(what: str, weights: DecoderWeights) -> Iterator[None]:
    """Calls of these kernels do nothing meanwhile."""
    with ExitStack() as stack:
        if what == "tail":
            for name in TAIL:
                stack.enter_context(patch.object(ops, name, lambda *given, **named: None))
        elif what == "o":
            outputs = {layer.attention.o.weight.data.data_ptr() for layer in weights.layers}
            op = ops.linear_residual_

            def others(residual: Any, x: Any, weight: Any, *given: Any, **named: Any) -> None:
                if weight.data_ptr() not in outputs:
                    op(residual, x, weight, *given, **named)

            stack.enter_context(patch.object(ops, "linear_residual_", others))
        elif what:
            raise ValueError(f"{what!r} cannot be left out; o and tail can")
        yield

"""One slot's steps on the simulated device: the real StepProgram over CPU tensors, with every
access declared and poison looked for where a device would read it in silence.

Ranges: those of Tables ("row_state", "page_table", ...), "decode_meta", "counts", "sampled",
"row_errors" and "logits" are shared by all steps; ("input", s), ("mask", s), ("records", s) are
slot s's; ("page", p) is a KV page; ("lease", r) is the right to use row r, which its release takes
away; ("adapter", s) is adapter slot s.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from photon_ext import ops
from photon_ext.layout import (
    COUNTS_SIZE,
    LOGPROB_WIDTH,
    RECORD_TOKENS,
    RECORD_WIDTH,
    SEGMENT_COLUMNS,
    InputLayout,
    MaskLayout,
    RecordFlag,
    SegmentFlag,
)
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.step import StepKey, StepTensors
from photon_ext.runtime.step_program import StepProgram
from photon_ext.testing.errors import Fault, SimOverwrite, SimPoison
from photon_ext.testing.footprint import Footprint
from photon_ext.testing.memory import Access
from photon_ext.testing.poison import POISON, clean
from photon_ext.testing.state import DeviceState, SlotState


class _Segment(NamedTuple):
    row: int
    first: int
    num_tokens: int
    flags: int


class SimStep:
    """Runs the forward part and the sampling part of a slot's steps."""

    def __init__(
        self,
        index: int,
        spec: StepSpec,
        device: DeviceState,
        slot: SlotState,
        inputs: InputLayout,
        masks: MaskLayout,
        fault: Fault | None,
    ) -> None:
        assert device.shared is not None
        self._index = index
        self._device = device
        self._slot = slot
        self._inputs = inputs
        self._fault = fault
        self._user_forward = spec.forward
        self._program = StepProgram(
            replace(spec, forward=self._forward),
            device.tables,
            device.shared,
            slot.memory,
            inputs,
            masks,
            hopper=False,
        )
        self._footprint = Footprint({**device.names, **slot.names}, device)
        self._step: StepTensors | None = None
        self._unconsumed: list[tuple[int, memoryview]] = []

    def forward(self, key: StepKey, launch: int, access: Access) -> None:
        """Head and forward of launch number ``launch``."""
        self._check_deltas()
        self._check_staged(key)
        self._unconsumed = self._to_leave(key)
        with self._footprint.of(access):
            self._step = self._program.forward(key)
        access.write("logits")
        self._device.logits_of = launch

    def sampling(self, key: StepKey, launch: int, access: Access) -> None:
        """Masks (of a split step), sampling and publish of launch number ``launch``."""
        access.read("logits")
        if self._device.logits_of != launch:
            raise SimOverwrite(
                f"{access.label!r} finds the logits of launch {self._device.logits_of} (I11)"
            )
        assert self._step is not None
        self._use_leases(key.segments, access)
        rows = [s.row for s in self._segments(key.segments) if self._device.alive(s.row)]
        for row in rows:
            self._device.read_automaton(row, access)
        states = [self._device.automaton_state(row) for row in rows]
        aside = self._lay_aside(key, launch, 0)
        with self._footprint.of(access):
            self._program.sample(self._step, masked=key.split)
        self._take_back(key, aside)
        if self._fault is Fault.STATE_KEPT:
            for row, state in zip(rows, states, strict=True):
                self._device.put_back_state(row, state)

    def go_on(self, key: StepKey, launch: int, access: Access) -> None:
        """More tokens for the decode rows of the same step, up to those that a segment may get: as
        a device would give them that drafts and verifies. A row that ends has no more.
        """
        outputs = self._inputs.outputs
        records, width = self._slot.records, RECORD_WIDTH
        logprobs, block = outputs.logprob_offset, key.segments * LOGPROB_WIDTH
        for number in range(1, outputs.segment_tokens):
            aside = self._lay_aside(key, launch, number)
            before = array("i", records[: key.segments * width])
            scores = array("i", records[logprobs : logprobs + block])
            self.forward(key, launch, access)
            self.sampling(key, launch, access)
            self._device.take_back(aside)
            begin = logprobs + number * block
            records[begin : begin + block] = records[logprobs : logprobs + block]
            records[logprobs : logprobs + block] = scores
            for at in range(0, key.segments * width, width):
                _, _, more, flags, token, *_ = records[at : at + width].tolist()
                if flags & RecordFlag.DEAD:
                    flags = before[at + 3]
                elif more:
                    before[at + RECORD_TOKENS + number] = token
                before[at + 2] += more
                before[at + 3] = flags
            records[: key.segments * width] = before

    def _lay_aside(self, key: StepKey, launch: int, tokens: int) -> list[int]:
        """The decode rows that get no more than ``tokens`` tokens, and take no part in the next."""
        decode = [segment.row for segment in self._segments(key.decode_rows)]
        return self._device.lay_aside(launch, decode, tokens)

    def _take_back(self, key: StepKey, rows: list[int]) -> None:
        """They got no token, and live on: their records say so."""
        self._device.take_back(rows)
        records = self._slot.records
        for at in range(0, key.decode_rows * RECORD_WIDTH, RECORD_WIDTH):
            if records[at] in rows:
                records[at + RECORD_TOKENS - 1] = 0  # its flags

    def apply_deltas(self, access: Access) -> None:
        """Applies the slot's deltas outside any step, as Fault.DELTAS_OFF_STREAM has it."""
        self._check_deltas()
        tables, deltas = self._device.tables, self._slot.memory.input[self._inputs.delta_offset :]
        none = deltas.new_empty(0)
        with self._footprint.of(access):
            ops.begin_step_(
                list(tables),
                deltas,
                none.view(0, 4),
                none,
                none.view(0, 4),
                deltas.new_empty(COUNTS_SIZE),
            )

    def _forward(self, step: StepTensors) -> None:
        """What follows the head: the step's rows and pages are known now."""
        for start, words in self._unconsumed:
            self._slot.input[start : start + len(words)] = words
        footprint, num_tokens = self._footprint, step.decode_meta.shape[0]
        assert footprint.access is not None
        self._use_leases(step.segments.shape[0], footprint.access)
        footprint.written_pages, footprint.read_pages = self._device.pages_of_step(num_tokens)
        self._user_forward(step)

    # --- segments ---------------------------------------------------------------------------------

    def _segments(self, count: int) -> Iterator[_Segment]:
        """The segments of rows that the tables have."""
        words = self._slot.input[: count * SEGMENT_COLUMNS].tolist()
        for at in range(0, len(words), SEGMENT_COLUMNS):
            if 0 < words[at] < self._device.rows:
                yield _Segment(*words[at : at + SEGMENT_COLUMNS])

    def _use_leases(self, count: int, access: Access) -> None:
        """Live rows are used, and their adapters read: a release, or a copy into a slot, that is
        not ordered after this is a race.
        """
        for segment in self._segments(count):
            if self._device.alive(segment.row):
                access.write("lease", segment.row)
                if slot := self._device.slot_of(segment.row):
                    access.read("adapter", slot)

    def _staged_places(self, segment: _Segment) -> slice:
        start = self._inputs.staged_offset + segment.first
        return slice(start, start + segment.num_tokens)

    # --- poison -----------------------------------------------------------------------------------

    def _check_deltas(self) -> None:
        start = self._inputs.delta_offset
        if clean(self._slot.input[start], "the number of delta runs") > 0:
            words = self._slot.input[start : start + self._slot.input[start + 1]].tolist()
            if POISON in words:
                raise SimPoison(
                    f"word {words.index(POISON)} of the deltas of slot {self._index} was read, and "
                    "it was consumed or never written"
                )

    def _check_staged(self, key: StepKey) -> None:
        for segment in self._segments(key.segments):
            if (
                segment.flags & SegmentFlag.STAGED
                and POISON in self._slot.input[self._staged_places(segment)].tolist()
            ):
                raise SimPoison(
                    f"a staged id of tokens {segment.first}+ of slot {self._index} was read, and "
                    "it was consumed or never written"
                )

    # --- faults -----------------------------------------------------------------------------------

    def _to_leave(self, key: StepKey) -> list[tuple[int, memoryview]]:
        """Where and what the head leaves in the slot's input though it consumes it, for a fault."""
        if self._fault is Fault.STALE_DELTAS:
            places = [slice(self._inputs.delta_offset, self._inputs.delta_offset + 1)]
        elif self._fault is Fault.STAGED_REUSED:
            places = [
                self._staged_places(segment)
                for segment in self._segments(key.segments)
                if segment.flags & SegmentFlag.STAGED
            ]
        else:
            return []
        return [(at.start, memoryview(self._slot.input[at].tobytes()).cast("i")) for at in places]

"""One ping-pong slot: staging, records, masks, and the one native call that launches a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from photon_ext.layout import MASK_KEY_COLUMNS, NO_TOKEN, InputLayout, MaskLayout
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Fill, Span, StepKey

if TYPE_CHECKING:
    from photon_ext import _C
    from photon_ext.runtime.step_graph import StepGraph


class Slot:
    """A SlotPort. The pinned input is the host's from the commit of the slot's last step until its
    next launch; the pinned output is the out-copy stream's from launch until ``wait`` returns.
    """

    def __init__(
        self,
        index: int,
        native: _C.DecodeSlot,
        graphs: StepGraph,
        pinned: Sequence[memoryview],
        inputs: InputLayout,
        masks: MaskLayout,
        timing: bool,
    ) -> None:
        """``pinned``: int32 words of the input, the output and the masks."""
        self._index = index
        self._native = native
        self._graphs = graphs
        self._input, self._output, self._mask = pinned
        self._layout = inputs
        self._mask_layout = masks
        self._timing = timing
        self._segments: array[int] | None = None
        self._staged = range(0)  # tokens whose ids the last launch staged
        self._places: dict[int, int] = {}  # of the step's masks, by segment
        self._masks_begin = 0
        self._logprobs = False  # the latest step has some
        self._scored = 0  # its tokens that have some

    def launch(
        self,
        key: StepKey,
        segments: array[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        finish: bool,
        logprobs: bool = False,
        targets: Sequence[int] = (),
    ) -> int:
        self._logprobs, self._scored = logprobs, len(targets)
        sent = self._stage(key, segments, staged, deltas)
        if not finish:
            self._clear_keys(key.segments)
        words = self._layout.outputs.words(key.segments, logprobs, self._scored)
        graph = self._graphs.forward_graph(self._index, key)
        if graph is not None:
            self._native.launch(graph, sent, finish, words)
        else:
            if key.scored:
                self._graphs.prepare_scores(self._index, key, targets)
            self._native.begin(sent)
            self._graphs.run_eagerly(self._index, key)
            self._native.end(words, finish)
        return sent

    def write_mask(self, index: int, row: Row, position: int, fill: Fill) -> None:
        width = self._mask_layout.row_words
        # not the pinned words themselves: whoever keeps the view could write into later masks
        words = array("i", bytes(4 * width))
        fill(row, memoryview(words))
        # a mask that is written again, after an interrupt, keeps its place
        place = self._places.setdefault(index, len(self._places))
        start = self._masks_begin + place * width
        self._mask[start : start + width] = words
        key = index * MASK_KEY_COLUMNS
        self._mask[key : key + MASK_KEY_COLUMNS] = array("i", (row.index, position, place))

    def finalize(self, key: StepKey) -> None:
        graph = self._graphs.sampling_graph(self._index, key)
        words = self._mask_layout.words(key.segments, len(self._places))
        output = self._layout.outputs.words(key.segments, self._logprobs, self._scored)
        if graph is not None:
            self._native.finalize(graph, words, output)
        else:
            self._native.begin_finalize(words)
            self._graphs.sample_eagerly(self._index)
            self._native.end(output, True)

    def done(self) -> bool:
        try:
            return self._native.done()
        except RuntimeError:  # the device's, which stays: the wait for this step raises it again
            return True

    def wait(self, segments: int) -> memoryview:
        self._native.wait()
        words = self._layout.outputs.words(segments, self._logprobs, self._scored)
        return self._output[:words]

    def _clear_keys(self, segments: int) -> None:
        """A mask that is not written for this step is missing, not stale."""
        self._places.clear()
        self._masks_begin = self._mask_layout.mask_offset(segments)
        self._mask[: self._masks_begin] = array("i", bytes(4 * self._masks_begin))

    @property
    def span(self) -> Span | None:
        return Span(*self._native.span()) if self._timing else None

    def _stage(
        self, key: StepKey, segments: array[int], staged: Sequence[int], deltas: Sequence[int]
    ) -> int:
        """Writes what changed since the last launch; returns the words to send."""
        layout, words = self._layout, 0
        if segments is not self._segments:
            self._input[: len(segments)] = segments
            self._segments = segments
            words = layout.staged_offset
        if staged or self._staged:
            self._clear_staged()
            self._staged = range(key.decode_rows, key.decode_rows + len(staged))
            if staged:
                begin = layout.staged_offset + key.decode_rows
                words = begin + len(staged)
                self._input[begin:words] = array("i", staged)
        if deltas:
            words = layout.delta_offset + len(deltas)
            self._input[layout.delta_offset : words] = array("i", deltas)
        return words

    def _clear_staged(self) -> None:
        """What an earlier step staged was consumed, and may not reach the device again."""
        begin, count = self._layout.staged_offset + self._staged.start, len(self._staged)
        self._input[begin : begin + count] = array("i", [NO_TOKEN]) * count

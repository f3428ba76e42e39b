"""All graphs of a pipeline: a fixed set, captured at start-up, for every bucket and slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from photon_ext.runtime.heap_freeze import no_collection
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.step import StepKey, StepTensors
from photon_ext.runtime.step_program import StepProgram

if TYPE_CHECKING:
    import torch

    from photon_ext import _C
    from photon_ext.runtime.streams import Streams


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What start-up captured.

    Attributes:
        keys: of the steps that were captured, for every slot; see StepKeys.
        graphs: graphs captured.
        nodes: nodes of the largest graph.
        seconds: wall time of all captures.
        slot_bytes, shared_bytes: device memory that each slot owns, and that all share besides the
            forward's buffers.
        graph_bytes: device memory the graphs took, where the device tells; else 0.
    """

    keys: tuple[StepKey, ...]
    graphs: int
    nodes: int
    seconds: float
    slot_bytes: int
    shared_bytes: int
    graph_bytes: int


class StepGraph:
    """Finds the graph of (slot, key), and runs what has none eagerly on the compute stream."""

    def __init__(
        self, spec: StepSpec, programs: Sequence[StepProgram], streams: Streams, warm_up_tokens: int
    ) -> None:
        self._spec = spec
        self._warm_up_tokens = warm_up_tokens
        self._programs = programs
        self._streams = streams
        self._forward: dict[tuple[int, StepKey], _C.Graph] = {}
        self._sampling: dict[tuple[int, StepKey], _C.Graph] = {}
        self._pending: dict[int, StepTensors] = {}
        self._in_use: dict[int, list[Mapping[int, torch.Tensor]]] = {}

    def capture(self) -> CaptureReport:
        """Captures every key for every slot, largest first; nothing without ``graph``."""
        start = time.perf_counter()
        graph_bytes = self._capture_all() if self._spec.graph else 0
        _, shared, slot = self._programs[0].memory
        return CaptureReport(
            keys=self._spec.keys.all() if self._spec.graph else (),
            graphs=len(self._forward) + len(self._sampling),
            nodes=max((graph.nodes for graph in self._forward.values()), default=0),
            seconds=time.perf_counter() - start,
            slot_bytes=sum(tensor.nbytes for tensor in slot),
            shared_bytes=sum(tensor.nbytes for tensor in shared),
            graph_bytes=graph_bytes,
        )

    def _capture_all(self) -> int:
        keys = sorted(self._spec.keys.all(), key=lambda key: key.num_tokens, reverse=True)
        self._warm_up(keys)
        free_before = self._streams.free_bytes()
        # a collection inside a capture could free somebody's device objects there, which a capture
        # does not allow
        with no_collection():
            for key in keys:
                for slot, program in enumerate(self._programs):
                    self._capture_key(slot, key, program)
        return free_before - self._streams.free_bytes()

    def forward_graph(self, slot: int, key: StepKey) -> _C.Graph | None:
        """The graph to replay at launch; None: run the step eagerly."""
        return self._forward.get((slot, key))

    def sampling_graph(self, slot: int, key: StepKey) -> _C.Graph | None:
        """The graph to replay at finalize; None: the step was launched eagerly."""
        return self._sampling.get((slot, key))

    def prepare_scores(self, slot: int, key: StepKey, targets: Sequence[int]) -> None:
        """Before a scored step runs eagerly; `targets` as SlotPort has them."""
        self._programs[slot].prepare_scores(key, targets)

    def run_eagerly(self, slot: int, key: StepKey) -> None:
        """Enqueues a step that has no graph; of a split one, its forward."""
        with self._streams.on_compute() as tensors:
            # the slot is free, so what its last eager step used is not needed any more
            self._in_use[slot] = [tensors]
            step = self._programs[slot].forward(key)
            if key.split:
                self._pending[slot] = step
            else:
                self._programs[slot].sample(step, masked=False)

    def sample_eagerly(self, slot: int) -> None:
        """Enqueues the sampling of the split step that this slot launched eagerly."""
        with self._streams.on_compute() as tensors:
            self._in_use[slot].append(tensors)
            self._programs[slot].sample(self._pending.pop(slot), masked=True)

    def _capture_key(self, slot: int, key: StepKey, program: StepProgram) -> None:
        steps: list[StepTensors] = []
        if key.split:
            forward = self._capture(program, lambda: steps.append(program.forward(key)))
            sampling = self._capture(program, lambda: program.sample(steps[0], masked=True))
            sampling.keep_alive(steps[0])
            self._forward[slot, key], self._sampling[slot, key] = forward, sampling
        else:
            self._forward[slot, key] = self._capture(
                program, lambda: program.sample(program.forward(key), masked=False)
            )

    def _capture(self, program: StepProgram, body: Callable[[], None]) -> _C.Graph:
        """A graph that keeps the step's memory, as long as it may run; memory only, as the
        collector does not see through a native graph.
        """
        graph = self._streams.capture(body)
        graph.keep_alive(program.memory)
        return graph

    def _warm_up(self, keys: Sequence[StepKey]) -> None:
        """Runs eager passes over dead rows, so that no CUDA library initializes itself inside a
        capture or a served step.
        """
        if self._streams.backend != "cuda":
            return
        eager_chunk = StepKey(0, self._warm_up_tokens, self._spec.keys.max_rows, False)
        try:
            for key in (eager_chunk, *keys):
                self.run_eagerly(0, key)
                if key.split:
                    self.sample_eagerly(0)
        finally:
            # if a key fails, too: what was enqueued still uses memory that goes with the failure
            self._streams.synchronize()

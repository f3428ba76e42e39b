"""The runtime: a device with its row table, its streams, and the memory of its slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from photon_ext import _C
from photon_ext.checks import Backend, check_backend, check_capacity
from photon_ext.errors import ConfigError, DeviceError
from photon_ext.layout import NO_PAGE, RECORD_WIDTH, ROW_COLUMNS, InputLayout, MaskLayout
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.slot import Slot
from photon_ext.runtime.step_graph import CaptureReport, StepGraph
from photon_ext.runtime.step_program import (
    SharedMemory,
    SlotMemory,
    StepProgram,
    Tables,
    slot_memory,
)
from photon_ext.runtime.streams import CudaStreams, HostStreams, Streams

WORD = 4


class Runtime:
    """A device that decodes: persistent row tables, ``depth`` ping-pong slots, three streams.

    One Pipeline is made with it, which then drives it. Not thread-safe.

    Args:
        max_rows: sequences that can be live at once.
        max_len: tokens a sequence can hold, prompt included; the last one sampled takes no place.
        depth: steps in flight: 1 is the blocking loop, 2 is ping-pong.
        device: "cuda", "cuda:N" or "cpu".
        stream: a ``torch.cuda.Stream`` of the device to run on, not the default stream (else a
            ConfigError, when the Pipeline is made); None makes one.
        page_size: tokens per KV page; None is one page of ``max_len`` tokens per row (a contiguous
            cache).
        max_stop_ids: stop ids a row can have.
        timing: records events around each step, so that the pipeline can report step gaps.
        blocking: the commit's wait yields the CPU after spinning for a while (1 ms on CUDA, less on
            the host), instead of spinning on.
        backend: which kernel samples: "hopper" (where it runs) or "portable" (default); None:
            hopper where it runs. The tokens are the same. Your forward chooses its own kernels.

    Attributes:
        depth, max_len, page_size, timing: as above, settled.
        device: a torch.device, with its index on CUDA.
        table: the host's side of the device tables.
        tables: the device tables, int32: ``row_state``, ``page_table``, ``stop_ids``.
        captures_prefill: whether the Pipeline captures prefill steps where ``prefill_buckets`` is
            None: on the CPU.
        report: what start-up captured, and its bytes; None before a Pipeline is made.

    Raises:
        ConfigError: a number is out of range, or asks for more memory than there is; DeviceError:
            the device is not there.
    """

    def __init__(
        self,
        max_rows: int = 32,
        max_len: int = 4096,
        depth: int = 2,
        device: str | torch.device = "cuda",
        stream: torch.cuda.Stream | None = None,
        page_size: int | None = None,
        max_stop_ids: int = 16,
        timing: bool = False,
        blocking: bool = True,
        backend: Backend | None = "portable",
    ) -> None:
        check_backend(backend)
        capacity = check_capacity(max_rows, max_len, depth, page_size, max_stop_ids)
        self.depth = capacity.depth
        self.max_len = capacity.max_len
        self.page_size = capacity.page_size
        self.timing = timing
        self.device = checked_device(device)
        self.captures_prefill = self.device.type == "cpu"
        self.table = RowTable(capacity.max_rows, capacity.pages_per_row, capacity.max_stop_ids)
        with _memory_for(self.device, **capacity._asdict()):
            self.tables = self._make_tables()
        self.report: CaptureReport | None = None
        self._stream = stream
        self._blocking = blocking
        self._hopper = backend != "portable"
        self._streams: Streams | None = None

    @property
    def streams(self) -> Streams:
        """The runtime's streams: ``compute``, ``in_copy``, ``out_copy``.

        Raises ConfigError before a Pipeline is made.
        """
        if self._streams is None:
            raise ConfigError("the runtime has no streams yet; make a Pipeline with it first")
        return self._streams

    def open_slots(self, spec: StepSpec) -> Sequence[Slot]:
        """Allocates the slots and captures every graph of ``spec``. Called once, by the Pipeline.

        Raises:
            ConfigError: the runtime serves a Pipeline already, the memory does not suffice, the
                stream does not suit, or the forward left logits that do not fit.
            CaptureError: the forward or the sampling cannot be recorded. What else they raise
                passes through.
        """
        if self._streams is not None:
            raise ConfigError(
                "this Runtime already serves a Pipeline; make another Runtime for another Pipeline"
            )
        streams = self._make_streams(spec.graph)
        rows = spec.decode_buckets[-1]
        inputs = InputLayout(rows, rows + spec.chunk, self.table.delta_capacity)
        masks = MaskLayout(rows, spec.vocab_size)
        with _memory_for(self.device, max_rows=rows, chunk=spec.chunk, vocab_size=spec.vocab_size):
            shared = SharedMemory(inputs.max_step_tokens, rows, self.device)
            memory = [slot_memory(inputs, masks, self.device) for _ in range(self.depth)]
            pinned = [_pinned_memory(inputs, masks, streams.backend) for _ in range(self.depth)]
        if self.device.type == "cuda":
            # the zeros above were written on torch's current stream
            torch.cuda.synchronize(self.device)
        programs = [
            StepProgram(spec, self.tables, shared, slot, inputs, masks, self._hopper)
            for slot in memory
        ]
        graphs = StepGraph(spec, programs, streams, warm_up_tokens=min(spec.chunk, self.max_len))
        graphs.capture()
        self.report = CaptureReport(
            graphs=graphs.count,
            nodes=graphs.nodes,
            seconds=graphs.seconds,
            slot_bytes=sum(
                tensor.nbytes for tensor in (memory[0].input, memory[0].records, memory[0].mask)
            ),
            shared_bytes=sum(
                t.nbytes
                for t in (shared.decode_meta, shared.counts, shared.sampled, shared.row_errors)
            ),
            graph_bytes=graphs.bytes,
        )
        slots = [
            self._make_slot(streams, index, memory[index], pinned[index], graphs, inputs, masks)
            for index in range(self.depth)
        ]
        # only now: a forward that cannot be captured leaves the runtime as it was
        self._streams = streams
        return slots

    def _make_streams(self, graph: bool) -> Streams:
        if self.device.type == "cuda":
            return CudaStreams(self.device, self._stream)
        if self._stream is not None:
            raise ConfigError(
                "stream is a CUDA stream, and the runtime's device is the CPU; pass stream=None"
            )
        return HostStreams(inline=not graph)

    def _make_tables(self) -> Tables:
        def zeros(columns: int) -> torch.Tensor:
            return torch.zeros((self.table.rows, columns), dtype=torch.int32, device=self.device)

        pages = zeros(self.table.pages_per_row).fill_(NO_PAGE)
        return Tables(zeros(ROW_COLUMNS), pages, zeros(self.table.max_stop_ids))

    def _make_slot(
        self,
        streams: Streams,
        index: int,
        memory: SlotMemory,
        pinned: PinnedMemory,
        graphs: StepGraph,
        inputs: InputLayout,
        masks: MaskLayout,
    ) -> Slot:
        native = _C.DecodeSlot(
            streams.compute,
            streams.in_copy,
            streams.out_copy,
            pinned.input,
            memory.input.data_ptr(),
            pinned.output,
            memory.records.data_ptr(),
            pinned.mask,
            memory.mask.data_ptr(),
            self.timing,
            self._blocking,
        )
        views = (memoryview(pinned.input), memoryview(pinned.output), memoryview(pinned.mask))
        return Slot(index, native, graphs, *views, inputs, masks, self.timing)


class PinnedMemory(NamedTuple):
    """A slot's host memory: what it sends, and what it gets back."""

    input: _C.PinnedBuffer
    output: _C.PinnedBuffer
    mask: _C.PinnedBuffer


def _pinned_memory(inputs: InputLayout, masks: MaskLayout, backend: str) -> PinnedMemory:
    words = (inputs.words, inputs.max_segments * RECORD_WIDTH, masks.capacity)
    return PinnedMemory(*(_C.PinnedBuffer(count * WORD, backend) for count in words))


@contextmanager
def _memory_for(device: torch.device, **sizes: int) -> Iterator[None]:
    """Where there is no memory for what is allocated in here, the ConfigError names the
    arguments that ask for it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch's allocator of host memory raises a bare RuntimeError; on a GPU that could be
        # anything else
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and device.type != "cpu":
            raise
        asked = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise ConfigError(
            f"there is not enough memory on {device} for {asked}; make one of them smaller"
        ) from error


def checked_device(device: str | torch.device) -> torch.device:
    """``device`` as a torch device that exists, that this build has kernels for, and whose index
    is settled.
    """
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device {device!r} is not one torch knows; use 'cpu', 'cuda' or 'cuda:N'"
        ) from error
    if checked.type == "cpu":
        return checked
    if checked.type != "cuda":
        raise DeviceError(f"device {str(checked)!r} is not supported; use 'cpu' or 'cuda'")
    if not _C.cuda_compiled:
        raise DeviceError(
            "device 'cuda' was asked for, but this build has no CUDA kernels; install nvcc and "
            "rebuild with PHOTON_CUDA=1, or use 'cpu'"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            "device 'cuda' was asked for, but torch sees no GPU (torch.cuda.is_available() is "
            "False); "
            "use device='cpu', or install a CUDA build of torch and its driver"
        )
    if checked.index is not None and checked.index >= torch.cuda.device_count():
        raise DeviceError(
            f"device {str(checked)!r} does not exist; torch sees {torch.cuda.device_count()} GPU(s)"
        )
    return (
        checked if checked.index is not None else torch.device("cuda", torch.cuda.current_device())
    )

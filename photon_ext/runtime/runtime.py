"""The runtime: a device with its row table, its streams, and the memory of its slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from photon_ext import _C
from photon_ext.checks import Backend, check_backend, check_capacity, check_count
from photon_ext.errors import ConfigError, DeviceError
from photon_ext.layout import InputLayout, MaskLayout
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.slot import Slot
from photon_ext.runtime.step_graph import CaptureReport, StepGraph
from photon_ext.runtime.step_program import SharedMemory, SlotMemory, StepProgram, Tables
from photon_ext.runtime.streams import CudaStreams, HostStreams, Streams


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
        page_size: tokens per KV page; None: one page of ``max_len`` per row (a contiguous cache).
        max_stop_ids: stop ids a row can have.
        max_biases: logit biases a row can have.
        penalty_vocab: the vocabulary, for rows with penalties: takes 4 bytes for each of its ids
            and each row. 0: no row has any.
        automaton_words: words for the automata of all rows, 4 bytes each; 0: no row has any.
        timing: records events around each step, so that the pipeline can report step gaps.
        blocking: the commit's wait yields the CPU after spinning for a while (1 ms on CUDA, less on
            the host), instead of spinning on.
        backend: which kernel samples: "hopper" (where it runs) or "portable" (default); None:
            hopper where it runs. The tokens are the same. Your forward chooses its own kernels.

    Attributes:
        depth, max_len, page_size, automaton_words, timing, device: as above, settled.
        table: the host's side of the device tables.
        tables: the device tables, int32, in the order of layout.DeltaTable.
        captures_prefill: whether the Pipeline captures prefill steps by default: on the CPU.
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
        max_biases: int = 0,
        penalty_vocab: int = 0,
        automaton_words: int = 0,
        timing: bool = False,
        blocking: bool = True,
        backend: Backend | None = "portable",
    ) -> None:
        check_backend(backend)
        size = check_capacity(max_rows, max_len, depth, page_size, max_stop_ids)
        self.depth, self.max_len, self.page_size = size.depth, size.max_len, size.page_size
        self.timing = timing
        self.device = checked_device(device)
        self.captures_prefill = self.device.type == "cpu"
        self.step_tokens = 1  # the kernels give a row one
        biases = check_count("max_biases", max_biases, least=0)
        counted = check_count("penalty_vocab", penalty_vocab, least=0)
        self.table = RowTable(size.max_rows, size.pages_per_row, size.max_stop_ids, biases, counted)
        self.automaton_words = check_count("automaton_words", automaton_words, least=0)
        with _memory_for(self.device, **size._asdict()):
            self.tables = Tables.zeros(self.table, self.device)
        self.report: CaptureReport | None = None
        self._stream = stream
        self._blocking = blocking
        self._hopper = backend != "portable"
        self._streams: Streams | None = None
        self._automata = torch.empty(0, dtype=torch.int32)

    @property
    def streams(self) -> Streams:
        """``compute``, ``in_copy``, ``out_copy``. Raises ConfigError before a Pipeline is made."""
        if self._streams is None:
            raise ConfigError("the runtime has no streams yet; make a Pipeline with it first")
        return self._streams

    def open_slots(self, spec: StepSpec) -> Sequence[Slot]:
        """Allocates the slots, captures every graph. The Pipeline calls it once; raises as that."""
        if self._streams is not None:
            raise ConfigError("this Runtime already serves a Pipeline; make another Runtime")
        streams = self._make_streams(spec.graph)
        rows, segments = spec.keys.max_rows, spec.keys.max_segments
        inputs = InputLayout(segments, rows + spec.chunk, self.table.delta_capacity)
        masks = MaskLayout(segments, spec.vocab_size)
        with _memory_for(self.device, max_rows=rows, chunk=spec.chunk, vocab_size=spec.vocab_size):
            shared = SharedMemory.zeros(
                inputs.max_step_tokens, segments, self.device, self.automaton_words
            )
            memory = [SlotMemory.zeros(inputs, masks, self.device) for _ in range(self.depth)]
            pinned = [
                [_C.PinnedBuffer(tensor.nbytes, streams.backend) for tensor in slot]
                for slot in memory
            ]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the zeros were written on torch's current stream
        programs = [
            StepProgram(spec, self.tables, shared, slot, inputs, masks, self._hopper)
            for slot in memory
        ]
        graphs = StepGraph(spec, programs, streams, warm_up_tokens=min(spec.chunk, self.max_len))
        self.report = graphs.capture()
        slots = []
        for index, (own, buffers) in enumerate(zip(memory, pinned, strict=True)):
            native = self._native_slot(streams, own, buffers)
            views = [memoryview(buffer) for buffer in buffers]
            slots.append(Slot(index, native, graphs, views, inputs, masks, self.timing))
        # only now: a forward that cannot be captured leaves the runtime as it was
        self._streams, self._automata = streams, shared.automata
        return slots

    def write_automaton(self, offset: int, words: torch.Tensor) -> None:
        """See RuntimePort.write_automaton."""
        self.upload(self._automata[offset : offset + len(words)], words)

    def upload(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        """See RuntimePort.upload. A step with prompt tokens sends their ids, and so waits for what
        the in-copy stream does before.
        """
        with self.streams.on_in_copy():
            to.copy_(rows, non_blocking=True)

    def _make_streams(self, graph: bool) -> Streams:
        if self.device.type == "cuda":
            return CudaStreams(self.device, self._stream)
        if self._stream is not None:
            raise ConfigError(
                "stream is a CUDA stream, and the runtime's device is the CPU; pass stream=None"
            )
        return HostStreams(inline=not graph)

    def _native_slot(
        self, streams: Streams, memory: SlotMemory, pinned: Sequence[_C.PinnedBuffer]
    ) -> _C.DecodeSlot:
        pinned_input, pinned_records, pinned_mask = pinned
        return _C.DecodeSlot(
            streams.compute,
            streams.in_copy,
            streams.out_copy,
            pinned_input,
            memory.input.data_ptr(),
            pinned_records,
            memory.output.data_ptr(),
            pinned_mask,
            memory.mask.data_ptr(),
            self.timing,
            self._blocking,
        )


@contextmanager
def _memory_for(device: torch.device, **sizes: int) -> Iterator[None]:
    """Where there is no memory for what is allocated in here, the ConfigError names the sizes."""
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
    """A torch device that exists and has kernels, its index settled. Raises DeviceError."""
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
            "False); use device='cpu', or install a CUDA build of torch and its driver"
        )
    if checked.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if checked.index >= torch.cuda.device_count():
        raise DeviceError(
            f"device {str(checked)!r} does not exist; torch sees {torch.cuda.device_count()} GPU(s)"
        )
    return checked

"""Streams, events, pinned buffers, graphs and decode slots (csrc/device). Backends: "cuda", "host"
(worker threads), "inline". Besides, which kernels run on a GPU (csrc/common/linear_plan.h and
attention_plan.h): these functions need no GPU.

One thread at a time enqueues on a stream, or drives a slot; any thread may wait. Addresses and
handles are integers.

A wrong value raises ValueError. A wrong order of calls, a failure of the device or of a worker, the
cuda backend in a build or on a machine without it, and a host stream in a fork of its process raise
RuntimeError. Each message says what to do.
"""

cuda_compiled: bool

def cuda_device_count() -> int:
    """0 without a device, a driver, or CUDA in this build. Never raises."""

def bind_ops(set_host_queue_address: int) -> None:
    """Called once at import with the address of photon_ext_set_host_queue in the ops library."""

class Event:
    """A point in a stream's order.

    Methods speak of the latest record; an event that was never recorded counts as reached.
    """

    def __init__(
        self, backend: str, timing: bool = False, blocking: bool = True, device: int = 0
    ) -> None:
        """ValueError: there is no such backend.

        RuntimeError: no CUDA, or no such device; host and inline do not look at ``device``.
        """
    @property
    def backend(self) -> str: ...
    def query(self) -> bool:
        """Whether it is reached. Raises as ``synchronize``."""
    def synchronize(self) -> None:
        """Blocks without the GIL: spins, with blocking=True for at most 1 ms, then sleeps.

        RuntimeError: the error of the work before it.
        """
    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from ``since`` to this event; both were made with timing=True and are
        reached.

        ValueError: the two are of different backends. RuntimeError: one was made without timing,
        was never recorded, or is not reached yet.
        """

class Graph:
    """A recorded list of kernels and copies, replayed on one stream at a time.

    Dropping it waits for its replays in flight.
    """

    @staticmethod
    def from_cuda(raw: int, device: int = 0) -> Graph:
        """Instantiates a cudaGraph_t, such as
        torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph(), which its owner keeps.

        ValueError: the handle is 0. RuntimeError: no CUDA, no such device, or CUDA cannot
        instantiate it.
        """
    @property
    def backend(self) -> str: ...
    @property
    def nodes(self) -> int:
        """Kernels and copies that a replay runs."""
    def keep_alive(self, object: object) -> None:
        """Holds what the graph's addresses point into for as long as the graph lives."""

class Claim:
    """What ``Stream.claim`` returns.

    It is left on the thread that entered it, else a RuntimeError.
    """

    def __enter__(self) -> Stream: ...
    def __exit__(self, *args: object) -> None: ...

class Stream:
    """An ordered queue of work. Dropping a stream of one's own drains it."""

    @staticmethod
    def create(backend: str, device: int = 0) -> Stream:
        """ValueError: there is no such backend, or ``device`` is not 0 on host or inline.

        RuntimeError: no CUDA, or no such device.
        """
    @staticmethod
    def wrap(handle: int, device: int = 0) -> Stream:
        """Around a cudaStream_t that somebody else owns, such as torch.cuda.Stream().cuda_stream; 0
        is the default stream.

        RuntimeError: the build has no CUDA. Neither handle nor device is looked at: a wrong one
        fails where the stream is first used.
        """
    @property
    def backend(self) -> str: ...
    @property
    def handle(self) -> int:
        """The cudaStream_t; 0 for host and inline."""
    @property
    def device(self) -> int:
        """The index of its GPU; 0 for host and inline."""
    @property
    def id(self) -> int:
        """The number of a host or inline stream in traces, from 1 on and never used again; 0 for
        cuda.
        """
    def keep_forever(self) -> None:
        """It is not destroyed any more, not even where the process ends."""
    def record(self, event: Event) -> None:
        """ValueError: an event of another backend.

        RuntimeError: in a capture; on host, the event is in flight on another stream.
        """
    def wait(self, event: Event) -> None:
        """What is enqueued from here on runs after the event's latest record.

        Errors as of ``record``, but for the event in flight.
        """
    def synchronize(self) -> None:
        """Blocks without the GIL until everything enqueued has run.

        Raises the stream's error, again each time: RuntimeError.
        """
    def query(self) -> bool:
        """Whether everything enqueued has run. Raises as ``synchronize``."""
    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Asynchronous copy between addresses that the caller keeps alive. On cuda, host memory
        must be page-locked: ValueError.

        ValueError too: a null address, a negative ``nbytes``.
        """
    def enqueue(self, kernel: int, params: bytes) -> None:
        """Host and inline: enqueues the C function ``void kernel(const void* params)`` with a copy
        of params (at most 512 bytes).

        ValueError: a null ``kernel``, longer params, or a cuda stream. An inline stream raises the
        kernel's own error.
        """
    def begin_capture(self) -> None:
        """From here to end_capture work is recorded, not executed; events, waits, launches and a
        second begin raise RuntimeError.
        """
    def end_capture(self) -> Graph:
        """RuntimeError: the stream is not capturing, or on cuda the capture was invalid; the
        stream captures no more either way.
        """
    def launch(self, graph: Graph) -> None:
        """ValueError: a graph of another backend or device.

        RuntimeError: in a capture; on host, in flight on another stream.
        """
    def claim(self) -> Claim:
        """``with stream.claim():`` photon's CPU ops on this thread go to the stream.

        On cuda it does nothing. Claims nest.
        """

class PinnedBuffer:
    """Zeroed int32 words that asynchronous copies may use; ``memoryview(buffer)`` is writable,
    1-D, of format "i".
    """

    def __init__(self, nbytes: int, backend: str) -> None:
        """ValueError: ``nbytes`` is not a positive multiple of 4, or there is no such backend.
        RuntimeError: no CUDA, or CUDA has no page-locked memory left. MemoryError: host and inline
        have none left.
        """
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def backend(self) -> str: ...
    @property
    def ptr(self) -> int:
        """The address of its first byte."""
    @property
    def nbytes(self) -> int: ...

class DecodeSlot:
    """One ping-pong slot: a step is one call that enqueues everything in order, and one wait.
    Counts are in int32 words.

    ``input_ptr``, ``output_ptr`` and ``mask_ptr`` are device memory of the caller's, who keeps it
    alive; it is at least as large as the pinned buffer beside it.

    ValueError: streams or buffers of different backends, an address that cannot be copied to,
    counts beyond a buffer. RuntimeError: calls out of order, such as a launch before the finalize
    of the last, a wait for nothing, ``span`` without timing.
    """

    def __init__(
        self,
        compute: Stream,
        in_copy: Stream,
        out_copy: Stream,
        input: PinnedBuffer,
        input_ptr: int,
        output: PinnedBuffer,
        output_ptr: int,
        mask: PinnedBuffer | None = None,
        mask_ptr: int = 0,
        timing: bool = False,
        blocking: bool = True,
    ) -> None: ...
    def launch(self, graph: Graph, input_words: int, finish: bool, output_words: int) -> None:
        """Input copy (if input_words), replay, and with ``finish`` the copy of the outputs;
        without it ``finalize`` follows.
        """
    def begin(self, input_words: int) -> None:
        """As launch, for kernels that the caller enqueues on the compute stream up to ``end``."""
    def end(self, output_words: int, finish: bool = True) -> None:
        """Closes ``begin``, with ``finish`` as launch does; or ``begin_finalize``, then with
        finish=True.
        """
    def finalize(self, graph: Graph | None, mask_words: int, output_words: int) -> None:
        """The late sampling: mask copy (if mask_words), replay of the sampling graph (if any),
        then the copy of the outputs.
        """
    def begin_finalize(self, mask_words: int) -> None:
        """As finalize, for sampling kernels that the caller enqueues on the compute stream up to
        ``end``.
        """
    def wait(self) -> None:
        """Blocks without the GIL until the outputs are in pinned memory.

        Raises what a worker or the device reported.
        """
    def done(self) -> bool:
        """Whether ``wait`` would return at once; False where there is nothing to wait for.

        Raises as ``wait`` where the step has failed.
        """
    def span(self) -> tuple[Event, Event]:
        """First and last moment of the latest launch on the compute stream (timing=True); the
        previous launch's pair stays valid.
        """

def start_host_trace(capacity: int) -> None:
    """Starts recording what host and inline streams of the process run, up to ``capacity`` records,
    whose memory is taken at once.

    ValueError: ``capacity`` is below 1. RuntimeError: it is on already.
    """

def stop_host_trace() -> tuple[list[tuple[str, str | None, int, int, int, int, int]], int]:
    """Ends it. Records (work, name, stream id, begin, end, bytes, cpu), as they ended, and how many
    found no room; none without a start.

    Work is "kernel", "copy", "graph" or "wait"; times are nanoseconds of time.perf_counter_ns; a
    graph's bytes are its number of nodes; cpu is the processor time of the stream's thread in it,
    nanoseconds: less than end - begin where the thread slept or was taken off its core.
    """

def drain_host_streams() -> None:
    """Waits, without the GIL, until every host stream of the process has run what was enqueued."""

class Gpu:
    """A GPU that need not be there.

    ``hopper_on_10``: the build has machine code for compute capability 10.0, and the environment
    PHOTON_HOPPER_ON_10=1.
    """

    def __init__(self, major: int, minor: int, hopper_on_10: bool = False) -> None: ...

def hopper_unsupported(gpu: Gpu) -> str | None:
    """Why it runs no Hopper kernel; None: it does."""

def weight_formats() -> dict[str, tuple[int, int, int]]:
    """By name: the number that ops know it by, and columns and bytes of a block."""

def plan_linear(
    gpu: Gpu,
    op: str,
    dtype: str,
    tokens: int,
    n: int,
    k: int,
    workspace: bool = True,
    format: str = "dense",
    scale_columns: int = 128,
    scale_dtype: str = "float32",
    zeros: bool = False,
    offsets: bool = False,
    scale_rows: int = 1,
    fp8_tokens: bool = False,
) -> tuple[str, str | None]:
    """The kernel that an op ("norm_linear_into") with a weight [n, k] runs on contiguous tensors
    where ``hopper`` is asked for, as csrc/cuda names it, less "_kernel"; and why it is not the
    Hopper kernel for so many tokens, or None. `format`: one of `weight_formats`, and of int4 and
    int8 how many columns share a scale, its dtype, and whether there are zero points or offsets.
    `scale_rows`: so many rows share scales. `fp8_tokens`: x is in fp8.

    ValueError: there is no such linear, format or dtype.
    """

def plan_decode_attention(
    gpu: Gpu,
    dtype: str,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    batch: bool = False,
    fp8_kv: bool = False,
) -> tuple[str, str | None]:
    """The same of ``fused_attention_decode_into``; `fp8_kv`: keys and values have scales.
    ValueError: there is no such dtype.
    """

def plan_paged_attention(
    gpu: Gpu,
    dtype: str,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    workspace: bool = True,
    fp8_kv: bool = False,
) -> tuple[str, str | None]:
    """The same of ``paged_attention_into``. ValueError: there is no such dtype."""

def link_unsupported(dtype: str, widths: list[int]) -> str | None:
    """Why ``lora_link_`` does not take tensors of one of these widths; None: it does.

    ValueError: there is no such dtype.
    """

plan_tokens: tuple[int, ...]  # numbers of tokens above which an op may run another kernel

def linear_workspace_words(tokens: int, k: int) -> int: ...
def linear_norm_workspace_words(tokens: int, n: int) -> int: ...
def attention_workspace_words(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> int: ...
def chunk_workspace_words(head_dim: int, ctas: int, exact: bool = False) -> int: ...
def chunk_plan_words(tokens: int, ctas: int, exact: bool = False) -> int: ...

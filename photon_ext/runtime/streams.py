"""The three streams of a runtime, and how work is captured on the compute stream."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from photon_ext import _C
from photon_ext.errors import CaptureError, ConfigError

stream_names: dict[int, str] = {}
"""What each host and inline stream of this process is for, by its number, used once, in traces."""


# lasting streams without an owner, by backend and device
_idle: dict[tuple[str, int], list[_C.Stream]] = {}


def lasting_stream(owner: object, backend: str, device: int) -> _C.Stream:
    """A stream that is the owner's until the owner is garbage, and then another's. It is never
    destroyed.

    torch remembers which streams read pinned memory. When the memory is freed, it records an event
    on each of them, and where that stream is gone, the driver corrupts the memory of the process.
    A request may be kept longer than its engine, and what was sent for it with it.
    """
    idle = _idle.setdefault((backend, device), [])
    try:
        stream = idle.pop()
    except IndexError:
        stream = _C.Stream.create(backend, device)
        stream.keep_forever()
    weakref.finalize(owner, idle.append, stream).atexit = False
    return stream


class Streams(ABC):
    """One compute stream for all forwards (I1), one stream per copy direction; nothing runs on the
    default stream.
    """

    def __init__(
        self,
        backend: str,
        device: int,
        compute: _C.Stream | None = None,
        in_copy: _C.Stream | None = None,
    ) -> None:
        """None: one of its own."""
        self.backend = backend
        self.device = device
        self.compute = compute if compute is not None else _C.Stream.create(backend, device)
        self.in_copy = in_copy if in_copy is not None else _C.Stream.create(backend, device)
        self.out_copy = _C.Stream.create(backend, device)
        if self.compute.id:
            ids = self.compute.id, self.in_copy.id, self.out_copy.id
            stream_names.update(zip(ids, ("compute", "in-copy", "out-copy"), strict=True))

    def synchronize(self) -> None:
        """Blocks until everything enqueued on the three streams has run; no step needs it."""
        for stream in (self.in_copy, self.compute, self.out_copy):
            stream.synchronize()

    @abstractmethod
    def on_compute(self) -> AbstractContextManager[Mapping[int, torch.Tensor]]:
        """Ops called inside are enqueued on the compute stream. Gives the tensors to keep until
        they are done; empty where the allocator is ordered by the stream.
        """

    @abstractmethod
    def capture(self, body: Callable[[], None]) -> _C.Graph:
        """Records what ``body`` enqueues; nothing of it runs."""

    @contextmanager
    def on_in_copy(self) -> Iterator[None]:
        """Torch's copies to the device inside go before those of the next step's input."""
        yield

    def free_bytes(self) -> int:
        """Free device memory; 0 where the device is the host."""
        return torch.cuda.mem_get_info(self.device)[0] if self.backend == "cuda" else 0


class HostStreams(Streams):
    """Worker threads ("host"), or for eager torch code the caller's thread, at once ("inline")."""

    def __init__(self, inline: bool) -> None:
        super().__init__("inline" if inline else "host", 0)

    @contextmanager
    def on_compute(self) -> Iterator[Mapping[int, torch.Tensor]]:
        if self.backend == "inline":
            yield {}
            return
        with self.compute.claim(), RecordGuard() as guard:
            yield guard.tensors

    def capture(self, body: Callable[[], None]) -> _C.Graph:
        self.compute.begin_capture()
        try:
            with self.on_compute() as tensors:
                body()
        finally:
            graph = self.compute.end_capture()
        graph.keep_alive(tensors)
        return graph


class CudaStreams(Streams):
    """CUDA streams; captured code allocates from one torch graph pool."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        index, wrapped = device.index, None
        if stream is not None:
            _check_stream(stream, index)
            wrapped = _C.Stream.wrap(stream.cuda_stream, index)
        super().__init__("cuda", index, wrapped, lasting_stream(self, "cuda", index))
        if stream is None:
            stream = torch.cuda.ExternalStream(self.compute.handle, device=index)
        self._torch = stream
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def on_compute(self) -> Iterator[Mapping[int, torch.Tensor]]:
        with torch.cuda.stream(self._torch):
            yield {}

    @contextmanager
    def on_in_copy(self) -> Iterator[None]:
        stream = torch.cuda.ExternalStream(self.in_copy.handle, device=self.device)
        with torch.cuda.stream(stream):
            yield

    def capture(self, body: Callable[[], None]) -> _C.Graph:
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._torch):
            captured.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                captured.capture_end()
        graph = _C.Graph.from_cuda(captured.raw_cuda_graph(), self.device)
        graph.keep_alive(captured)
        return graph


def _check_stream(stream: torch.cuda.Stream, index: int) -> None:
    if stream.device_index != index:
        where = f"cuda:{stream.device_index}, the runtime's device is cuda:{index}"
        raise ConfigError(f"stream is on {where}; use a stream of that device")
    if stream == torch.cuda.default_stream(index):
        why = "on which everything waits for everything"
        raise ConfigError(f"stream is the default stream, {why}; pass torch.cuda.Stream(), or None")


# They return what was just made from host data, which their schemas do not tell from a view.
FRESH = ("aten::lift_fresh", "aten::lift")


# They take memory and write nothing, so that nothing of them is missing from a replay.
EMPTY = tuple(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class RecordGuard(TorchDispatchMode):
    """Lets photon_ext ops, views and empty tensors through; any other torch op would run now, once,
    and be missing from every replay. ``tensors`` are the arguments of the ops, by id: whoever
    replays keeps them alive, and with them the memory of empty ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[int, torch.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under this mode; torch would import its compiler (seconds) to say so
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "photon_ext":
            for value in (*args, *(kwargs or {}).values()):
                self._keep(value)
        elif not is_view(func) and func._schema.name not in EMPTY:
            raise CaptureError(
                f"{func} cannot be recorded into a CPU graph, which replays photon_ext ops only; "
                "use those in forward, or build the Pipeline with graph=False"
            )
        return func(*args, **(kwargs or {}))

    def _keep(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for one in value:
                self._keep(one)


def is_view(func: Any) -> bool:
    """Whether a torch op only gives another view of memory, by its schema."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    fresh = any(alias is None or alias.is_write for alias in aliases)
    return bool(aliases) and not fresh and func._schema.name not in FRESH

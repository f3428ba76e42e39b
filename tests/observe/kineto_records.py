"""Chrome traces as torch.profiler writes them on a GPU, made by hand; times in microseconds.

`Loop` writes a decode loop of ours step by step: a host thread with API calls and phases, a compute
stream whose graph replays have three kernels, and the copies. Bubbles are planted by its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from photon_ext.observe.kineto import parse
from photon_ext.observe.records import Commit, HostSpan, Launch, Records
from photon_ext.runtime.probe import Phase

BASE = 1_790_857_026_000_000_000
PID, THREAD = 4242, 4250
COMPUTE, IN, OUT = 20, 21, 22
HEAD, LINEAR, MASK, PUBLISH = (
    "photon::cuda::(anonymous namespace)::begin_step_kernel(photon::BeginStepParams)",
    "void photon::cuda::(anonymous namespace)::linear_kernel<float, 4>(photon::LinearParams)",
    "photon::cuda::(anonymous namespace)::apply_token_mask_kernel(photon::ApplyTokenMaskParams)",
    "photon::cuda::(anonymous namespace)::publish_kernel(photon::PublishParams)",
)


@dataclass
class Document:
    """A trace that grows; times are microseconds after its base."""

    events: list[dict[str, Any]] = field(default_factory=list)
    correlations: int = 0

    def add(
        self, category: str, name: str, start: float, end: float, tid: int, **args: Any
    ) -> None:
        pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else PID
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args}
        self.events.append({**event, "ts": start, "dur": round(end - start, 3)})

    def call(self, name: str, start: float, end: float, category: str = "cuda_runtime") -> int:
        self.correlations += 1
        self.add(category, name, start, end, THREAD, cbid=211, correlation=self.correlations)
        return self.correlations

    def kernel(
        self, name: str, start: float, end: float, correlation: int, stream: int = COMPUTE
    ) -> None:
        self.add("kernel", name, start, end, stream, stream=stream, correlation=correlation)

    def copy(
        self, name: str, start: float, end: float, correlation: int, stream: int, size: int
    ) -> None:
        args = {"stream": stream, "correlation": correlation, "bytes": size}
        self.add("gpu_memcpy", f"Memcpy {name}", start, end, stream, **args)

    def op(self, name: str, start: float, end: float, category: str = "cpu_op") -> None:
        self.add(category, name, start, end, THREAD, **{"External id": 7})

    def json(self) -> dict[str, Any]:
        metadata = {"ph": "M", "name": "process_name", "ts": 0, "pid": PID, "tid": 0}
        return {
            "baseTimeNanoseconds": BASE,
            "traceEvents": [metadata, *reversed(self.events)],
        }


@dataclass
class Loop:
    """A decode loop of `steps` steps, 1000 us each on the device, and 60 us of host work besides.

    Args:
        depth: 1 or 2.
        commit_us: the commit's own work.
        mask_us, pageable: a constrained loop (late sampling): time to make the masks, and whether
            they are sent from pageable memory.
        late_copy: the out-copy of a step waits for the next step.
        zombies: steps whose only row is a zombie.
    """

    depth: int = 2
    steps: int = 12
    commit_us: float = 20
    mask_us: float | None = None
    pageable: bool = False
    late_copy: bool = False
    zombies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.document = Document()
        self.host: list[HostSpan] = []
        self.launches: list[Launch] = []
        self.commits: list[Commit] = []
        self.now = 100.0  # of the host
        self.free = 0.0  # when the compute stream is idle
        self.copied: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self._run()

    def records(self) -> Records:
        """The trace read back, on a clock that begins at the trace's base."""
        return records_of(self.document)._replace(
            end=ns(self.now),
            host=sorted(self.host, key=lambda span: (span.start, span.depth)),
            launches=self.launches,
            commits=self.commits,
            threads={THREAD: "photon-engine"},
            streams={COMPUTE: "stream 20"},
        )

    def _run(self) -> None:
        for step in range(self.steps):
            for launched in (0, 1) if step == 0 and self.depth == 2 else (step + self.depth - 1,):
                if launched < self.steps:
                    self._launch(launched)
                    if launched == 0 or self.depth == 1:
                        self._finalize(launched)
            if self.late_copy:
                self._copy_out(step, after=max(self.free, self.now))
            self._commit(step)
            if self.depth == 2 and step + 1 < self.steps:
                self._finalize(step + 1)

    def _span(self, phase: Phase, start: float, step: int | None = None, depth: int = 0) -> None:
        self.host.append(HostSpan(phase, ns(start), ns(self.now), THREAD, step, depth))

    def _call(self, name: str, us: float) -> int:
        start = self.now
        self.now += us
        return self.document.call(name, start, self.now)

    def _launch(self, step: int) -> None:
        start = self.now
        self.now += 5
        self._span(Phase.PLAN, start)
        start = self.now
        self.now += 10
        correlation = self._call("cudaGraphLaunch", 12)
        split = self.mask_us is not None
        begin = max(self.free, self.now + 3)
        took = 20 if step in self.zombies else 900
        self.document.kernel(HEAD, begin, begin + 4, correlation)
        self.document.kernel(LINEAR, begin + 6, begin + took, correlation)
        self.free = begin + took + 2
        if not split:
            self._publish(step, correlation)
        what = (step, step % 2, "decode", 1, 1, split, 0)
        self.launches.append(Launch(*what, ns(start), ns(self.now), THREAD))
        self._span(Phase.LAUNCH, start, step)
        if not self.late_copy and not split:
            self._copy_out(step, after=self.ends[step])

    def _publish(self, step: int, correlation: int) -> None:
        self.document.kernel(PUBLISH, self.free, self.free + 98, correlation)
        self.free += 98
        self.ends[step] = self.free

    def _finalize(self, step: int) -> None:
        if self.mask_us is None:
            return
        start = self.now
        self.now += self.mask_us
        if self.pageable:
            begin = self.now
            correlation = self._call("cudaMemcpyAsync", 200)
            self.document.op("aten::copy_", begin - 2, self.now + 2)
            name = "HtoD (Pageable -> Device)"
            self.document.copy(name, self.now - 10, self.now - 2, correlation, IN, 19_000)
        self._span(Phase.MASK, start, step)
        start = self.now
        correlation = self._call("cudaGraphLaunch", 12)
        self._span(Phase.FINALIZE, start, step)
        self.free = max(self.free, self.now + 3)
        self.document.kernel(MASK, self.free, self.free + 5, correlation)
        self.free += 5
        self._publish(step, correlation)
        self._copy_out(step, after=self.ends[step])

    def _copy_out(self, step: int, after: float) -> None:
        correlation = self._call("cudaMemcpyAsync", 3)
        name = "DtoH (Device -> Pinned)"
        self.document.copy(name, after + 2, after + 4, correlation, OUT, 32)
        self.copied[step] = after + 4

    def _commit(self, step: int) -> None:
        outer = self.now
        self._call("cudaEventSynchronize", max(1, self.copied[step] + 8 - self.now))
        self._span(Phase.WAIT, outer, step, depth=1)
        start = self.now
        self.now += self.commit_us
        self._span(Phase.COMMIT, start, step, depth=1)
        self._span(Phase.COMMIT, outer)
        self.commits.append(Commit(step, 1, int(step in self.zombies), ns(self.now)))
        start = self.now
        self.now += 8
        self._span(Phase.DELIVER, start)


def ns(us: float) -> int:
    return round(us * 1000)


def records_of(document: Document) -> Records:
    """What a timeline would make of a document without anything of ours, on a clock that begins at
    the trace's base."""
    found = parse(document.json()).shifted(lambda time: time - BASE)
    end = max((span.end for span in found.device), default=0)
    return Records("cuda", 0, end, device=found.device, calls=found.calls, ops=found.ops)


def user_loop(items: int, steps: int = 10, wake_us: float = 10, python_us: float = 50) -> Records:
    """A stock PyTorch loop: embedding, four layers, argmax, one launch each; then .item() so many
    times, and Python.

    Args:
        wake_us: from the end of an item's copy until the host goes on.
        python_us: between the last item and the next step.
    """
    document = Document()
    host = device = 0.0
    layers = ("rms_norm", "gemv") * 4
    for _ in range(steps):
        begin = host
        for name in ("indexSelectSmallIndex", *layers, "reduce_kernel<512, 1, ArgMaxOps>"):
            op = host
            correlation = document.call("cudaLaunchKernel", host + 2, host + 6)
            host += 8
            document.op("aten::mm", op, host)
            start = max(device, host)
            device = start + (4 if name == "rms_norm" else 60)
            document.kernel(name, start, device, correlation)
        for _ in range(items):
            op = host
            sent = document.call("cudaMemcpyAsync", host + 3, host + 6)
            device = max(device, host + 6) + 3
            document.copy("DtoH (Device -> Pinned)", device - 2, device, sent, COMPUTE, 8)
            document.call("cudaStreamSynchronize", host + 7, device + wake_us)
            host = device + wake_us + 2
            document.op("aten::item", op, host)
            document.op("aten::_local_scalar_dense", op + 1, host - 1)
        document.op("decode one token", begin, host, "user_annotation")
        host += python_us
    return records_of(document)

"""Gaps on the device, and whom it waited for in each of them.

A gap lies between two steps (step gap), between the forward and the late sampling of one step
(split gap), or inside a step (node gap). A step gap in which the engine mostly waited for requests
is none: it is rest. Where its next kernel was launched before the gap began, the device waited for
a copy, or only for itself. Otherwise it waited for the host: the gap is shared out over what the
launching thread did meanwhile. API calls count before phases of ours, those before torch ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from photon_ext.observe.analysis.intervals import Cover, by_thread
from photon_ext.observe.analysis.steps import DeviceStep, Steps, enqueues, short_name
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.records import ApiCall, DeviceSpan, HostSpan, Op, OpKind, Records
from photon_ext.runtime.probe import Phase

MASK_KERNEL = "apply_token_mask"  # late sampling begins with it
# nanoseconds; shorter node gaps are the device's own and are counted, but not explained
NODE_FLOOR = 2_000


class GapKind(Enum):
    """Where a gap lies."""

    STEP = "step gap"
    SPLIT = "split gap"
    NODE = "node gap"
    REST = "no work"


class Cause(Enum):
    """Whom the device waited for."""

    PLAN = "plan"
    LAUNCH = "launch"
    COMMIT = "commit"
    MASK = "mask"
    DELIVER = "deliver"
    RESULTS = "results on their way to the host"
    H2D = "copy to the device"
    SYNC = "synchronizing call"
    PAGEABLE = "pageable copy"
    ALLOCATION = "allocation"
    COLLECT = "requests"
    CALLER = "other code of the host"
    DEVICE = "nobody (the next work was queued already)"


_PHASES = {
    Phase.PLAN: Cause.PLAN,
    Phase.LAUNCH: Cause.LAUNCH,
    Phase.WAIT: Cause.RESULTS,
    Phase.COMMIT: Cause.COMMIT,
    Phase.MASK: Cause.MASK,
    Phase.FINALIZE: Cause.LAUNCH,
    Phase.DELIVER: Cause.DELIVER,
    Phase.COLLECT: Cause.COLLECT,
}
_LAUNCHES = (CallKind.GRAPH_LAUNCH, CallKind.KERNEL_LAUNCH)


class Share(NamedTuple):
    """A part of a gap: whom it was spent on, and where exactly."""

    cause: Cause
    detail: str
    ns: int


def share_name(share: Share) -> str:
    """ "commit", or "launch (from the call to the first kernel)"."""
    return (
        share.cause.value
        if share.detail in ("", share.cause.value)
        else f"{share.cause.value} ({share.detail})"
    )


class Gap(NamedTuple):
    """Idle device from `start` to `end`; `before` and `after` are short kernel names; `step` is the
    number of the step that follows it, or that it lies in.
    """

    start: int
    end: int
    kind: GapKind
    before: str
    after: str
    step: int
    shares: tuple[Share, ...] = ()

    @property
    def ns(self) -> int:
        return self.end - self.start

    @property
    def cause(self) -> Share | None:
        """The largest share."""
        return max(self.shares, key=lambda share: share.ns, default=None)


class HostView:
    """What each thread did, looked up by time."""

    def __init__(self, records: Records) -> None:
        self._spans = {
            thread: Cover[HostSpan](spans) for thread, spans in by_thread(records.host).items()
        }
        self._ops = {thread: Cover[Op](ops) for thread, ops in by_thread(records.ops).items()}
        self._calls = {
            thread: Cover[ApiCall](calls) for thread, calls in by_thread(records.calls).items()
        }
        self._pageable = {
            span.correlation for span in records.device if span.is_pageable and span.correlation
        }

    def phase(self, thread: int, time: int) -> Phase | None:
        """The innermost phase of ours at that time."""
        path = self._spans[thread].at(time) if thread in self._spans else ()
        return path[-1].phase if path else None

    def op(self, thread: int, time: int) -> str:
        """The torch op at that time, as the user wrote it (the outermost one), and the innermost
        range or function around it.
        """
        return op_name(self._ops[thread].at(time)) if thread in self._ops else ""

    def shares(self, thread: int, start: int, end: int) -> Iterator[Share]:
        """What [start, end] was spent on."""
        for piece in _pieces(self._calls.get(thread), start, end):
            share = self._of_call(piece[2][-1], piece[1] - piece[0]) if piece[2] else None
            if share is not None:
                yield share
            else:
                yield from self._of_spans(thread, piece[0], piece[1])

    def _of_spans(self, thread: int, start: int, end: int) -> Iterator[Share]:
        for piece in _pieces(self._spans.get(thread), start, end):
            if piece[2]:
                phase = piece[2][-1].phase
                yield Share(_PHASES[phase], phase.value, piece[1] - piece[0])
            else:
                for begin, until, path in _pieces(self._ops.get(thread), piece[0], piece[1]):
                    yield Share(Cause.CALLER, op_name(path) or "Python", until - begin)

    def _of_call(self, call: ApiCall, ns: int) -> Share | None:
        """None: the call explains nothing, the phase around it does."""
        kind = classify(call.name)
        where = self.where(call)
        if call.correlation in self._pageable:
            return Share(Cause.PAGEABLE, where, ns)
        if kind in _LAUNCHES:
            return Share(Cause.LAUNCH, call.name, ns)
        if kind is CallKind.EVENT_WAIT and self.phase(call.thread, call.start) is Phase.WAIT:
            return Share(Cause.RESULTS, call.name, ns)
        if kind in (CallKind.SYNC, CallKind.EVENT_WAIT):
            return Share(Cause.SYNC, f"{call.name}{', ' * bool(where)}{where}", ns)
        return (
            Share(Cause.ALLOCATION, f"{call.name}{', ' * bool(where)}{where}", ns)
            if kind is CallKind.ALLOCATION
            else None
        )

    def where(self, call: ApiCall) -> str:
        """In which phase of ours and which torch op a call was made: "mask: aten::copy_"."""
        phase = self.phase(call.thread, call.start)
        op = self.op(call.thread, call.start)
        return ": ".join(part for part in (phase.value if phase is not None else "", op) if part)


def op_name(path: tuple[Op, ...]) -> str:
    """A path of ops as its user knows it: the outermost torch op, "in" the innermost range or
    function around it.
    """
    torch_op = next((op.name for op in path if op.kind is OpKind.TORCH), "")
    around: list[str] = []
    for op in path:
        if op.kind is OpKind.TORCH:
            break
        around.append(op.name)
    return " in ".join(part for part in (torch_op, around[-1] if around else "") if part)


def find_gaps(steps: Steps, records: Records) -> list[Gap]:
    """Every gap between the first and the last step, explained."""
    view = HostView(records)
    explain = _Explainer(records, view)
    gaps: list[Gap] = []
    if not steps.steps:
        return gaps
    reached, previous = steps.steps[0].start, None
    for step in steps.steps:
        for index in range(step.first, step.last):
            kernel = steps.kernels[index]
            if kernel.start > reached and previous is not None:
                kind = _kind(step, index, kernel)
                shares = (
                    explain(reached, kernel, step)
                    if kind is not GapKind.NODE or kernel.start - reached >= NODE_FLOOR
                    else ()
                )
                gap = Gap(
                    reached,
                    kernel.start,
                    kind,
                    short_name(previous.name),
                    short_name(kernel.name),
                    step.number,
                    shares,
                )
                gaps.append(gap._replace(kind=GapKind.REST) if _is_rest(gap) else gap)
            if kernel.end >= reached:
                reached, previous = kernel.end, kernel
    return gaps


def step_gaps(gaps: Iterable[Gap]) -> list[Gap]:
    """The gaps that count as idle: between steps, and before a late sampling."""
    return [gap for gap in gaps if gap.kind in (GapKind.STEP, GapKind.SPLIT)]


def _is_rest(gap: Gap) -> bool:
    waited = sum(share.ns for share in gap.shares if share.cause is Cause.COLLECT)
    return gap.kind is GapKind.STEP and 2 * waited > gap.ns


def _kind(step: DeviceStep, index: int, kernel: DeviceSpan) -> GapKind:
    if index == step.first:
        return GapKind.STEP
    return GapKind.SPLIT if MASK_KERNEL in kernel.name else GapKind.NODE


class _Explainer:
    """Shares a gap out."""

    def __init__(self, records: Records, view: HostView) -> None:
        self._view = view
        self._calls = {call.correlation: call for call in records.calls}
        self._in_copies = [span for span in records.device if span.is_in_copy]
        self._enqueues = {} if records.backend == "cuda" else enqueues(records)
        threads = [launch.thread for launch in records.launches]
        threads = threads or [
            call.thread for call in records.calls if classify(call.name) in _LAUNCHES
        ]
        self._thread = max(set(threads), key=threads.count) if threads else None

    def __call__(self, start: int, kernel: DeviceSpan, step: DeviceStep) -> tuple[Share, ...]:
        thread, launched = self._launch_of(kernel, step)
        if launched is not None and launched <= start:
            return _merged(self._on_device(start, kernel.start))
        if thread is None:
            return (Share(Cause.CALLER, "unknown thread", kernel.start - start),)
        until = kernel.start if launched is None else min(launched, kernel.start)
        shares = list(self._view.shares(thread, start, until))
        if until < kernel.start:
            shares.append(
                Share(Cause.LAUNCH, "from the call to the first kernel", kernel.start - until)
            )
        return _merged(shares)

    def _launch_of(self, kernel: DeviceSpan, step: DeviceStep) -> tuple[int | None, int | None]:
        """The thread that launched a kernel, and when its call was over."""
        call = self._calls.get(kernel.correlation)
        if call is not None:
            return call.thread, call.end
        enqueue = self._enqueues.get(kernel.correlation)
        if enqueue is not None:
            return enqueue.thread, enqueue.end
        if step.launch is not None and kernel.start == step.start:
            return step.launch.thread, step.launch.end
        return self._thread, None

    def _on_device(self, start: int, end: int) -> Iterator[Share]:
        """The next kernel was queued: a copy to the device may have held it back."""
        waited = 0
        for copy in self._in_copies:
            overlap = min(copy.end, end) - max(copy.start, start)
            if overlap > 0 and copy.end <= end:
                waited += overlap
                yield Share(Cause.PAGEABLE if copy.is_pageable else Cause.H2D, copy.name, overlap)
        if end - start > waited:
            yield Share(Cause.DEVICE, "", end - start - waited)


def _pieces(
    cover: Cover[HostSpan] | Cover[Op] | Cover[ApiCall] | None, start: int, end: int
) -> Iterator[tuple[int, int, tuple]]:  # type: ignore[type-arg]
    if cover is None:
        yield start, end, ()
    else:
        yield from cover.within(start, end)


def _merged(shares: Iterator[Share] | list[Share]) -> tuple[Share, ...]:
    total: dict[tuple[Cause, str], int] = defaultdict(int)
    for share in shares:
        total[share.cause, share.detail] += share.ns
    return tuple(
        Share(cause, detail, ns)
        for (cause, detail), ns in sorted(total.items(), key=lambda item: -item[1])
        if ns > 0
    )

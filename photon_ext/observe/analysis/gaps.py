"""Gaps on the device, and whom it waited for in each of them.

A gap lies between two steps (step gap), between the forward and the late sampling of one step
(split gap), or inside a step (node gap). A step gap in which the engine mostly waited for requests
is none: it is rest. Where its next kernel was launched before the gap began, the device waited for
a copy, or only for itself. Otherwise it waited for the host: the gap is shared out over what the
launching thread did meanwhile. API calls count before phases of ours, those before torch ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from photon_ext.observe.analysis.intervals import Cover, Piece, by_thread
from photon_ext.observe.analysis.steps import DeviceStep, Steps, short_name
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.host_work import DESCHEDULED_NS
from photon_ext.observe.records import (
    ApiCall,
    DeviceKind,
    DeviceSpan,
    HostSpan,
    Launch,
    Op,
    OpKind,
    Records,
)
from photon_ext.runtime.probe import Phase

MASK_KERNEL = "apply_token_mask"  # late sampling begins with it
NODE_FLOOR = 2_000  # nanoseconds; shorter node gaps are the device's own, and are not explained


class GapKind(Enum):
    """Where a gap lies."""

    STEP = "step gap"
    SPLIT = "split gap"
    NODE = "node gap"
    REST = "no work"


class Cause(Enum):
    """Whom the device waited for."""

    ADMIT = "admit"
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
    DELAY = "delayed launch"
    COLLECT = "requests"
    CALLER = "other code of the host"
    DESCHEDULED = "descheduled"  # the system had taken the host stream's thread off the CPU
    DEVICE = "start of queued work"


_PHASES = {
    Phase.ADMIT: Cause.ADMIT,
    Phase.PLAN: Cause.PLAN,
    Phase.LAUNCH: Cause.LAUNCH,
    Phase.WAIT: Cause.RESULTS,
    Phase.COMMIT: Cause.COMMIT,
    Phase.MASK: Cause.MASK,
    Phase.FINALIZE: Cause.LAUNCH,
    Phase.DELIVER: Cause.DELIVER,
    Phase.DELAY: Cause.DELAY,
    Phase.COLLECT: Cause.COLLECT,
}
_CALLS = {
    CallKind.GRAPH_LAUNCH: Cause.LAUNCH,
    CallKind.KERNEL_LAUNCH: Cause.LAUNCH,
    CallKind.EVENT_WAIT: Cause.SYNC,
    CallKind.SYNC: Cause.SYNC,
    CallKind.ALLOCATION: Cause.ALLOCATION,
}


class Share(NamedTuple):
    """A part of a gap: whom it was spent on, and where exactly."""

    cause: Cause
    detail: str
    ns: int

    @property
    def name(self) -> str:
        """ "commit", or "launch (from the call to the first kernel)"."""
        return f"{self.cause.value} ({self.detail})" if self.detail else self.cause.value


class Gap(NamedTuple):
    """Idle device from `start` to `end`.

    `before` and `after` are short kernel names; `step` is the number of the step that follows it,
    or that it lies in.
    """

    start: int
    end: int
    kind: GapKind
    before: str
    after: str
    step: int
    shares: tuple[Share, ...] = ()  # largest first

    @property
    def ns(self) -> int:
        return self.end - self.start


class HostView:
    """What each thread did, looked up by time."""

    def __init__(self, records: Records) -> None:
        lists = (records.host, records.ops, records.calls)
        self._spans, self._ops, self._calls = (
            {thread: Cover(spans) for thread, spans in by_thread(spans).items()} for spans in lists
        )
        self._pageable = {s.correlation for s in records.device if s.is_pageable and s.correlation}

    def cause(self, call: ApiCall) -> Cause | None:
        """What a call means for the device; None: nothing, the phase around it does."""
        if call.correlation in self._pageable:
            return Cause.PAGEABLE
        kind = classify(call.name)
        if kind is CallKind.EVENT_WAIT and self._phase(call) is Phase.WAIT:
            return Cause.RESULTS  # the commit's own wait (I7)
        return _CALLS.get(kind)

    def where(self, call: ApiCall) -> str:
        """In which phase of ours and which torch op a call was made: "mask: aten::copy_"."""
        phase = self._phase(call)
        op = _op_name(self._ops.get(call.thread, Cover()).at(call.start))
        return ": ".join(filter(None, (phase.value if phase is not None else "", op)))

    def shares(self, thread: int, start: int, end: int) -> Iterator[Share]:
        """What [start, end] was spent on."""
        for begin, until, calls in _pieces(self._calls, thread, start, end):
            cause = self.cause(calls[-1]) if calls else None
            if cause is None:
                yield from self._of_spans(thread, begin, until)
                continue
            name, where = calls[-1].name, self.where(calls[-1])
            if cause is Cause.PAGEABLE:
                yield Share(cause, where, until - begin)
            elif cause in (Cause.SYNC, Cause.ALLOCATION) and where:
                yield Share(cause, f"{name}, {where}", until - begin)
            else:
                yield Share(cause, name, until - begin)

    def _of_spans(self, thread: int, start: int, end: int) -> Iterator[Share]:
        for begin, until, spans in _pieces(self._spans, thread, start, end):
            if spans:
                yield Share(_PHASES[spans[-1].phase], "", until - begin)
                continue
            for first, last, ops in _pieces(self._ops, thread, begin, until):
                yield Share(Cause.CALLER, _op_name(ops) or "Python", last - first)

    def _phase(self, call: ApiCall) -> Phase | None:
        path = self._spans.get(call.thread, Cover()).at(call.start)
        return path[-1].phase if path else None


def find_gaps(steps: Steps, records: Records) -> list[Gap]:
    """Every gap between the first and the last step, explained."""
    explain = _Explainer(records, steps)
    gaps: list[Gap] = []
    reached, previous = steps.steps[0].start if steps.steps else 0, None
    for step in steps.steps:
        late = False  # the step's late sampling has begun
        for index in range(step.first, step.last):
            kernel = steps.kernels[index]
            begins_late = MASK_KERNEL in kernel.name and index > step.first
            late |= begins_late
            if kernel.start > reached and previous is not None:
                kind = GapKind.STEP if index == step.first else GapKind.NODE
                kind = GapKind.SPLIT if begins_late else kind
                long = kind is not GapKind.NODE or kernel.start - reached >= NODE_FLOOR
                shares = explain(reached, kernel, step, late) if long else ()
                kind = GapKind.REST if kind is GapKind.STEP and _is_rest(shares) else kind
                names = (short_name(previous.name), short_name(kernel.name))
                gaps.append(Gap(reached, kernel.start, kind, *names, step.number, shares))
            if kernel.end >= reached:
                reached, previous = kernel.end, kernel
    return gaps


def idle_gaps(gaps: Iterable[Gap]) -> list[Gap]:
    """The gaps that count as idle: between steps, and before a late sampling."""
    return [gap for gap in gaps if gap.kind in (GapKind.STEP, GapKind.SPLIT)]


class _Explainer:
    """Shares a gap out."""

    def __init__(self, records: Records, steps: Steps) -> None:
        self._view = HostView(records)
        self._on_host = records.backend == "host"
        self._calls = {} if self._on_host else {call.correlation: call for call in records.calls}
        self._in_copies = [span for span in records.device if span.is_in_copy]
        self._out_copies = [span.start for span in records.device if span.is_out_copy]
        lost = (span for span in records.device if span.kind is DeviceKind.DESCHEDULED)
        self._lost = {span.start: span.end for span in lost}
        finalizes = (span for span in records.host if span.phase is Phase.FINALIZE)
        self._finalizes = {steps.number(span.step): span for span in finalizes}
        threads = [launch.thread for launch in records.launches] or [
            call.thread for call in records.calls if _CALLS.get(classify(call.name)) is Cause.LAUNCH
        ]
        self._thread = max(set(threads), key=threads.count) if threads else None

    def __call__(
        self, start: int, kernel: DeviceSpan, step: DeviceStep, late: bool
    ) -> tuple[Share, ...]:
        end = kernel.start
        begin = self._lost_until(start, end)
        shares = [Share(Cause.DESCHEDULED, "", begin - start)]
        enqueued = self._enqueue(kernel, step, late)
        if enqueued is not None and enqueued.end <= start:
            shares += self._on_device(begin, end)
        elif (thread := enqueued.thread if enqueued is not None else self._thread) is not None:
            until = end if enqueued is None else min(max(enqueued.end, begin), end)
            shares += self._view.shares(thread, begin, until)
            shares.append(Share(Cause.LAUNCH, "from the call to the first kernel", end - until))
        else:
            shares.append(Share(Cause.CALLER, "unknown thread", end - begin))
        return _merged(shares)

    def _lost_until(self, start: int, end: int) -> int:
        """Until when a host stream's thread was off the CPU from `start` on: that of the kernel
        before, or that of the copy of its results, which was queued and began late."""
        until = self._lost.get(start, start)
        if self._on_host:
            place = bisect_left(self._out_copies, start)
            begun = self._out_copies[place] if place < len(self._out_copies) else end
            until = begun if until + DESCHEDULED_NS <= begun < end else until
        return min(until, end)

    def _enqueue(
        self, kernel: DeviceSpan, step: DeviceStep, late: bool
    ) -> ApiCall | HostSpan | Launch | None:
        """What of the host launched a kernel."""
        call = self._calls.get(kernel.correlation)
        if call is not None:
            return call
        return self._finalizes.get(step.number) if late else step.launch

    def _on_device(self, start: int, end: int) -> Iterator[Share]:
        """The next kernel was queued: a copy to the device may have held it back."""
        waited = 0
        for copy in self._in_copies:
            overlap = min(copy.end, end) - max(copy.start, start)
            if overlap > 0 and copy.end <= end:
                waited += overlap
                yield Share(Cause.PAGEABLE if copy.is_pageable else Cause.H2D, copy.name, overlap)
        rest = end - start - waited
        is_lost = self._on_host and rest >= DESCHEDULED_NS
        yield Share(Cause.DESCHEDULED if is_lost else Cause.DEVICE, "", rest)


def _is_rest(shares: Iterable[Share]) -> bool:
    waited = sum(share.ns for share in shares if share.cause is Cause.COLLECT)
    return 2 * waited > sum(share.ns for share in shares)


def _op_name(path: tuple[Op, ...]) -> str:
    """A path of ops as its user knows it: the outermost torch op, "in" the innermost range or
    function around it."""
    place = next((i for i, op in enumerate(path) if op.kind is OpKind.TORCH), len(path))
    return " in ".join(op.name for op in (*path[place : place + 1], *path[:place][-1:]))


def _pieces(covers: dict[int, Cover], thread: int, start: int, end: int) -> Iterator[Piece]:
    return covers.get(thread, Cover()).within(start, end)


def _merged(shares: Iterable[Share]) -> tuple[Share, ...]:
    total: Counter[tuple[Cause, str]] = Counter()
    for share in shares:
        total[share.cause, share.detail] += share.ns
    return tuple(Share(*what, ns) for what, ns in total.most_common() if ns > 0)

"""The two-slot pipeline: a state machine over steps in flight, free of any device.

The problem: a blocking loop (plan, launch, wait, commit) leaves the device idle while the host
commits and plans. The next forward needs only the sampled token, which is on the device already. So
at depth 2 step t+1 is launched before step t is committed::

    host     launch t+1 │ wait t · commit t │ finalize t+1 │ deliver t │ launch t+2 │ wait t+1 ...
    device   ── forward t ──▶── sample t ──▶── forward t+1 ──▶── sample t+1 ──▶── forward t+2 ...
    copies                        └─▶ records t ─▶ host          └─▶ records t+1 ─▶ host

Invariants, each held here or by the slots below, each with a test that names it:

    I1   Forwards are enqueued on one stream, in launch order.
    I2   Commits are first in, first out.
    I3   ``lease.inflight_refs`` is the number of steps in flight that hold the lease.
    I4   Nothing is released while refs > 0 or running, and exactly once after.
    I5   A slot's pinned output is not rewritten before its commit has finished: a slot is taken
         again only after its commit.
    I6   Sampling of a host-constrained row at t+1 is enqueued after the commit of t.
    I7   A steady decode step has one blocking wait, the commit's.
    I8   Tokens do not depend on depth, batch or schedule.
    I9   Pages are accounted for by their owner, who hears of a release once, through
         ``on_release``.
    I10  Every host value a kernel needs is on the device or in the step's key.
    I11  Between launch and finalize of a split step nothing overwrites its logits: no launch while
         a step waits for its masks.

Slot occupancy is derived from the steps in flight, never stored beside them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from photon_ext.errors import PipelineError
from photon_ext.layout import META_COLUMNS, RECORD_WIDTH, SegmentFlag
from photon_ext.runtime import probe
from photon_ext.runtime.admission import Limits, checked_admission
from photon_ext.runtime.arguments import INT32_MAX, check_callable, checked_count, checked_counts
from photon_ext.runtime.lease import Lease
from photon_ext.runtime.planner import plan
from photon_ext.runtime.ports import RuntimePort, SlotPort, Span, StepSpec
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.record import read_record
from photon_ext.runtime.row import Row, initial_state
from photon_ext.runtime.step import (
    Fill,
    Forward,
    RowEvent,
    Sample,
    Segment,
    Step,
    StepKey,
    StepKind,
)

GAP_WINDOW = 4096
MAX_CHUNK = INT32_MAX // META_COLUMNS  # the words of decode_meta are counted in int32


@dataclass(slots=True)
class PipelineStats:
    """Counters since the pipeline was made.

    Attributes:
        decode_steps, prefill_steps: steps launched, by kind. Neither falls, and neither does their
            sum for a thread that reads each once.
        quiet_steps: steps without a host-to-device copy, neither of input nor of masks.
        committed_rows: segments of committed steps, zombies included.
        zombie_rows: of them, those whose sequence had already ended.
        zombie_steps: committed steps that held nothing but zombies.
        tokens: tokens committed.
        host_waits: commits that found their step unfinished, so that the host had to wait for the
            device; 0 without ``stalls``.
        host_wait_ns: how long all commits waited, nanoseconds; 0 without ``stalls``.
        device_waits: launches that found the device done with everything before, though there had
            been work all along; at depth 1 that is every step. 0 without ``stalls``.
        gap_count, gap_sum_us: step gaps measured so far, and their sum in microseconds; 0 unless
            the runtime keeps timing.
        gaps_us: step gaps of the latest 4096 steps, microseconds; empty unless the runtime keeps
            timing. Another thread than the pipeline's takes ``gaps_us.copy()``: a loop over it
            fails when the pipeline appends.
    """

    decode_steps: int = 0
    prefill_steps: int = 0
    quiet_steps: int = 0
    committed_rows: int = 0
    zombie_rows: int = 0
    zombie_steps: int = 0
    tokens: int = 0
    host_waits: int = 0
    host_wait_ns: int = 0
    device_waits: int = 0
    gap_count: int = 0
    gap_sum_us: float = 0.0
    gaps_us: deque[float] = field(default_factory=lambda: deque(maxlen=GAP_WINDOW))

    @property
    def steps(self) -> int:
        """Steps launched."""
        return self.decode_steps + self.prefill_steps


class Pipeline:
    """Admits rows, launches steps, commits results.

    One turn of the loop is ``launch``, ``commit``, ``finalize`` (``tick`` does it in the right
    order for either depth). Not thread-safe.

    What goes wrong inside a step (the device, with a RuntimeError; a forward that runs eagerly; a
    record that cannot be; ``on_release`` within a commit; Ctrl-C meanwhile) comes out of the call
    it happens in, and leaves the pipeline broken: from then on ``launch``, ``commit``, ``finalize``
    and ``tick`` raise PipelineError, with that as its cause. A mask callback that raises ends its
    row alone, and Ctrl-C within it breaks nothing.

    Args:
        runtime: a Runtime, or the simulated device of ``photon_ext.testing``.
        forward: enqueues a step's forward; reads the step's tensors, assigns ``step.logits`` [R,
            vocab_size].
        vocab_size: width of the logits; token ids lie below it.
        sample: enqueues sampling of ``step.logits`` into ``step.sampled``; None samples as the rows
            ask (greedy, temperature).
        buckets: batch sizes that decode graphs are captured for; those above the runtime's rows are
            dropped, the rows themselves added.
        prefill_buckets: token counts that prefill graphs are captured for; other chunks run
            eagerly. None leaves it to the runtime: one graph of ``chunk`` tokens where idle tokens
            cost nothing (the host backend), none elsewhere.
        chunk: prompt tokens per prefill step at most.
        graph: capture steps into graphs at start-up (default), or run them eagerly.
        on_release: called once with each row whose lease is released, by the commit or abort that
            releases it: its pages are free then.
        stalls: count who waits for whom: two event queries and two clock readings per step, none of
            which waits. False is for measuring what that costs.

    Attributes:
        stats: PipelineStats, which other threads may read.

    Raises:
        ConfigError: an argument is out of range or of the wrong kind, or asks for more memory than
            there is; the runtime has a Pipeline already; or the forward, captured, left logits that
            do not fit.
        CaptureError: on a CPU with ``graph``, ``forward`` or ``sample`` calls an op that is not
            photon_ext's. What else they raise passes through. The runtime stays as it was.
    """

    def __init__(
        self,
        runtime: RuntimePort,
        forward: Forward,
        *,
        vocab_size: int,
        sample: Sample | None = None,
        buckets: Iterable[int] = (1, 8, 32),
        prefill_buckets: Iterable[int] | None = None,
        chunk: int = 256,
        graph: bool = True,
        on_release: Callable[[Row], None] | None = None,
        stalls: bool = True,
    ) -> None:
        rows = runtime.table.max_rows
        vocab_size = checked_count("vocab_size", vocab_size)
        chunk = checked_count("chunk", chunk, MAX_CHUNK)
        if prefill_buckets is None:
            prefill_buckets = (chunk,) if runtime.captures_prefill else ()
        buckets, prefill_buckets = (
            checked_counts("buckets", buckets),
            checked_counts("prefill_buckets", prefill_buckets),
        )
        check_callable("forward", forward, optional=False)
        check_callable("sample", sample)
        check_callable("on_release", on_release)
        decode_buckets = tuple(sorted({bucket for bucket in buckets if bucket < rows} | {rows}))
        prefills = tuple(sorted({bucket for bucket in prefill_buckets if bucket <= chunk}))
        spec = StepSpec(forward, sample, vocab_size, decode_buckets, prefills, chunk, graph)
        self._runtime = runtime
        self._spec = spec
        self._limits = Limits(
            vocab_size,
            runtime.max_len,
            runtime.page_size,
            runtime.table.pages_per_row,
            runtime.table.max_stop_ids,
        )
        self._slots: Sequence[SlotPort] = runtime.open_slots(spec)
        self._on_release = on_release
        self._stalls = stalls
        # whether there has been work ever since the last launch: a device that idles then waits for
        # the host
        self._fed = False
        self._rows: dict[int, Row] = {}
        self._inflight: deque[Step] = deque()
        self._last_kind: StepKind | None = None
        self._last_span: Span | None = None
        self._failure: BaseException | None = None
        self.stats = PipelineStats()

    # --- rows -------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows admitted and not yet released, zombies included, in order of admission."""
        return tuple(self._rows.values())

    @property
    def busy(self) -> bool:
        """Whether any row or step is left."""
        return bool(self._rows or self._inflight)

    @property
    def inflight(self) -> int:
        """Steps launched and not yet committed."""
        return len(self._inflight)

    def admit(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        constrained: bool = False,
        pages: Sequence[int] | None = None,
    ) -> Row:
        """Gives a sequence a row; it rides from the next launch on.

        Args:
            prompt_ids: at least one id in [0, vocab_size).
            max_new_tokens: cap on sampled tokens, ≥ 1; prompt and cap must fit ``max_len``, but for
                the last token, which takes no place.
            stop_ids: ids that end the sequence when sampled; at most the runtime's
                ``max_stop_ids``.
            temperature: 0 is greedy; else 0.001 to 10000.
            seed: of the row's noise; of an integer beyond 64 bits the low ones.
            constrained: sampling waits for a host mask (``finalize``).
            pages: KV pages of the whole sequence, in order: enough for prompt and cap without the
                last token, different, from 1 on, and the caller's until ``on_release``. None, with
                one page per row, is the page of the row's index.

        Raises:
            RequestError: the request can never be served; NoFreeRow: not now. Nothing has been
                taken then.
        """
        request = checked_admission(
            self._limits,
            prompt_ids,
            max_new_tokens,
            stop_ids,
            temperature,
            seed,
            constrained,
            pages,
        )
        index, generation = self._runtime.table.acquire()
        held = (index,) if request.pages is None else request.pages
        self._runtime.table.write_row(
            index, initial_state(generation, request), held, request.stop_ids
        )
        row = Row(
            Lease(index, generation, held),
            request.prompt,
            request.max_new_tokens,
            request.constrained,
        )
        self._rows[index] = row
        return row

    def abort(self, row: Row) -> bool:
        """Ends a row now: tokens in flight are skipped, its lease is released when no step uses it.
        False if it had ended already.

        Where no step uses it, ``on_release`` is called before this returns. No event follows.

        Raises:
            PipelineError: the row is another pipeline's.
        """
        if not row.lease.running:
            return False
        if self._rows.get(row.index) is not row:
            raise PipelineError(f"{row} was admitted by another pipeline; abort it there")
        row.lease.finalize()
        self._runtime.table.kill(row.index)
        self._release_if_idle(row)
        return True

    # --- one turn of the loop ---------------------------------------------------------------------

    def launch(self) -> Step | None:
        """Plans the next step and enqueues it; None when every slot is taken or no row can run.
        Does not wait for the device.

        Raises:
            PipelineError: the latest step waits for its masks, or the pipeline is broken.
        """
        self._require_working()
        if len(self._inflight) >= self._runtime.depth:
            return None
        if self._inflight and not self._inflight[-1].finalized:
            raise PipelineError(
                f"step {self._inflight[-1].index} waits for its masks: call finalize() before the "
                "next launch() (I11)"
            )
        probe.begin(Phase.PLAN)
        planned = plan(self._rows.values(), self._last_kind, self._spec.chunk)
        probe.end()
        if planned is None:
            self._rest()
            return None
        with self._no_way_back():
            return self._enqueue(*planned)

    def commit(self) -> list[RowEvent]:
        """Waits for the oldest step, the only blocking wait, and advances its rows (I2). Empty when
        nothing is in flight.

        Events are in the order of the step's rows: one for each that was sampled, none for zombies
        and for chunks that do not end their prompt. ``on_release`` is called, for rows that end
        here, before the events are returned.

        Raises:
            PipelineError: the step waits for its masks, its record is not that of its rows, a
                custom ``sample`` gave an id beyond the vocabulary, or the pipeline is broken.
        """
        self._require_working()
        if not self._inflight:
            return []
        step = self._inflight[0]
        if not step.finalized:
            raise PipelineError(
                f"step {step.index} waits for its masks: call finalize() before commit()"
            )
        with self._no_way_back():
            probe.begin(Phase.WAIT, step.index)
            records = self._wait(step)
            probe.end()
            probe.begin(Phase.COMMIT, step.index)
            self._inflight.popleft()
            self._measure_gap(step)
            zombies = self.stats.zombie_rows
            read = (
                self._commit_segment(segment, records[i * RECORD_WIDTH : (i + 1) * RECORD_WIDTH])
                for i, segment in enumerate(step.segments)
            )
            events = [event for event in read if event is not None]
            self.stats.committed_rows += len(step.segments)
            self.stats.zombie_steps += self.stats.zombie_rows - zombies == len(step.segments)
            probe.committed(step, self.stats.zombie_rows - zombies)
            probe.end()
            return events

    def finalize(self, fill: Fill | None = None) -> None:
        """Samples the step that waits for masks, once every step before it is committed (I6);
        otherwise does nothing.

        Args:
            fill: called as ``fill(row, words)`` for every running constrained row that is sampled;
                sets bit ``id & 31`` of word ``id >> 5`` of the zeroed int32 ``words`` for each
                allowed id (for bit 31 see sampling.constraints). What it raises ends that row
                alone, but for Ctrl-C on the main thread, which passes through.

        Raises:
            PipelineError: a constrained row is to be sampled and ``fill`` is None, or the pipeline
                is broken.
        """
        self._require_working()
        step = self._inflight[-1] if self._inflight else None
        if step is None or step.finalized or len(self._inflight) > 1:
            return
        slot = self._slots[step.slot]
        probe.begin(Phase.MASK, step.index)
        for i, segment in enumerate(step.segments):
            if segment.sample and segment.row.constrained and segment.row.lease.running:
                self._write_mask(slot, i, segment, fill)
        probe.end()
        probe.begin(Phase.FINALIZE, step.index)
        with self._no_way_back():
            slot.finalize(step.key)
        probe.end()
        step.finalized = True

    def tick(
        self, fill: Fill | None = None, on_event: Callable[[RowEvent], None] | None = None
    ) -> list[RowEvent]:
        """One turn: launch t+1, commit t when the pipeline is full or nothing was left to launch,
        finalize t+1.

        Args:
            fill: see ``finalize``.
            on_event: called with each committed event before the next masks are filled, so that
                constraints can follow their tokens. What it raises neither ends nor delays a row:
                it still gets the turn's other events, once each, the turn is brought to its end,
                masks included, and then the first exception is raised. The next ``tick`` goes on
                from there.

        Returns:
            The events of the step that was committed; empty where none was, as in the first tick at
            depth 2.

        Raises:
            PipelineError: as ``launch``, ``commit`` and ``finalize``.
        """
        launched = self.launch()
        self.finalize(fill)
        events = (
            self.commit() if launched is None or len(self._inflight) >= self._runtime.depth else []
        )
        try:
            if on_event is not None:
                _hand_out(events, on_event)
        finally:
            self.finalize(fill)
            if not self.busy:  # the caller may stop here, and come back with the next request
                self._rest()
        return events

    # --- launch -----------------------------------------------------------------------------------

    def _enqueue(self, kind: StepKind, segments: tuple[Segment, ...]) -> Step:
        split = any(segment.sample and segment.row.constrained for segment in segments)
        key = self._key(kind, segments, split)
        slot = self._free_slot()
        if (
            self._stalls
            and self._fed
            and (not self._inflight or self._slots[self._inflight[-1].slot].done())
        ):
            self.stats.device_waits += 1
        number = self.stats.steps
        probe.begin(Phase.LAUNCH, number)
        words, staged = _segment_words(segments)
        sent = self._slots[slot].launch(
            key, words, staged, self._runtime.table.take_deltas(), not split
        )
        for segment in segments:
            segment.row.lease.retain()
            segment.row.prefilled += segment.num_tokens if segment.tokens is not None else 0
            segment.row.sampled += segment.sample
        step = Step(number, slot, key, segments, self._slots[slot].span, finalized=not split)
        self._inflight.append(step)
        self._fed = True
        self._last_kind = kind
        if kind is StepKind.DECODE:
            self.stats.decode_steps += 1
        else:
            self.stats.prefill_steps += 1
        self.stats.quiet_steps += sent == 0 and not split
        probe.launched(step, sent)
        probe.end()
        return step

    def _key(self, kind: StepKind, segments: tuple[Segment, ...], split: bool) -> StepKey:
        if kind is StepKind.DECODE:
            bucket = next(bucket for bucket in self._spec.decode_buckets if bucket >= len(segments))
            return StepKey(kind, bucket, bucket, split)
        num_tokens = sum(segment.num_tokens for segment in segments)
        bucket = next(
            (bucket for bucket in self._spec.prefill_buckets if bucket >= num_tokens), num_tokens
        )
        if self._spec.graph and bucket in self._spec.prefill_buckets:
            return StepKey(kind, bucket, self._spec.decode_buckets[-1], split)
        return StepKey(kind, num_tokens, len(segments), split)

    def _free_slot(self) -> int:
        taken = {step.slot for step in self._inflight}
        return next(slot for slot in range(len(self._slots)) if slot not in taken)

    def _rest(self) -> None:
        """Nothing can be launched: unless a step is in flight the device idles for want of work,
        which is neither a gap nor a wait.
        """
        if not self._inflight:
            self._last_span, self._fed = None, False

    # --- commit -----------------------------------------------------------------------------------

    def _wait(self, step: Step) -> Sequence[int]:
        slot = self._slots[step.slot]
        if not self._stalls:
            return slot.wait(len(step.segments))
        self.stats.host_waits += not slot.done()
        begin = time.perf_counter_ns()
        records = slot.wait(len(step.segments))
        self.stats.host_wait_ns += time.perf_counter_ns() - begin
        return records

    def _commit_segment(self, segment: Segment, record: Sequence[int]) -> RowEvent | None:
        row = segment.row
        row.lease.drop()
        event = None
        if row.lease.running:
            event = read_record(segment, record, self._limits.vocab_size)
            if event is not None:
                if event.token is not None:
                    row.committed += 1
                    self.stats.tokens += 1
                if event.finish is not None:
                    row.lease.finalize()
        else:
            self.stats.zombie_rows += 1
        self._release_if_idle(row)
        return event

    def _release_if_idle(self, row: Row) -> None:
        if not row.lease.releasable:
            return
        row.lease.release()
        del self._rows[row.index]
        self._runtime.table.release(row.index)
        if self._on_release is not None:
            self._on_release(row)

    def _measure_gap(self, step: Step) -> None:
        if self._last_span is not None and step.span is not None:
            step.gap_us = gap = step.span.gap_us(self._last_span)
            self.stats.gaps_us.append(gap)
            self.stats.gap_sum_us += gap
            self.stats.gap_count += 1
        self._last_span = step.span

    # --- masks and failure ------------------------------------------------------------------------

    def _write_mask(self, slot: SlotPort, index: int, segment: Segment, fill: Fill | None) -> None:
        if fill is None:
            raise PipelineError(f"{segment.row} is constrained: finalize() needs a fill callback")
        try:
            slot.write_mask(index, segment.row, segment.sampled_position, fill)
        except BaseException as error:
            # the user's callback, which may raise anything: its fault is that row's alone
            if (
                isinstance(error, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise  # Ctrl-C, which Python raises wherever the main thread happens to be
            segment.row.fault = error

    def _require_working(self) -> None:
        if self._failure is not None:
            raise PipelineError(
                f"the pipeline cannot go on: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    @contextmanager
    def _no_way_back(self) -> Iterator[None]:
        """What raises in here leaves a step half enqueued or half read: the pipeline says so
        from then on.
        """
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise


def _hand_out(events: Sequence[RowEvent], on_event: Callable[[RowEvent], None]) -> None:
    """Calls ``on_event`` with every event, whatever it raises meanwhile, and then raises the
    first of that.
    """
    raised: BaseException | None = None
    probe.begin(Phase.COMMIT)
    for event in events:
        try:
            on_event(event)
        except BaseException as error:
            # the user's callback, which may raise anything: the other rows' tokens are still to be
            # told
            raised = error if raised is None else raised
    probe.end()
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # it holds this frame


def _segment_words(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """The int32 words of ``segments`` [R, 4], and the staged ids of its tokens."""
    words: list[int] = []
    staged: list[int] = []
    token_index = 0
    for segment in segments:
        flags = SegmentFlag.SAMPLE * segment.sample | SegmentFlag.STAGED * (
            segment.tokens is not None
        )
        words += (segment.row.index, token_index, segment.num_tokens, flags)
        if segment.tokens is not None:
            staged += segment.tokens
        token_index += segment.num_tokens
    return words, staged

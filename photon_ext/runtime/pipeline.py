"""The two-slot pipeline: a state machine over steps in flight, free of any device.

The problem: a blocking loop (plan, launch, wait, commit) leaves the device idle while the host
commits and plans. The next forward needs only the sampled token, which is on the device already. So
at depth 2 step t+1 is launched before step t is committed::

    host     launch t+1 │ wait t · commit t │ finalize t+1 │ deliver t │ launch t+2 │ wait t+1 ...
    device   ── forward t ──▶── sample t ──▶── forward t+1 ──▶── sample t+1 ──▶── forward t+2 ...
    copies                        └─▶ records t ─▶ host          └─▶ records t+1 ─▶ host

The invariants I1 to I15 are in photon_ext/README.md. Slot occupancy is derived from the steps in
flight, never stored beside them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from photon_ext.checks import (
    INT32_MAX,
    Limits,
    check_callable,
    check_count,
    check_counts,
    check_flag,
    check_more_pages,
    check_pages,
)
from photon_ext.errors import PipelineError, RequestError, shown
from photon_ext.layout import META_COLUMNS
from photon_ext.row_params import RowParams
from photon_ext.row_words import bias_words, prompt_bits, row_words
from photon_ext.runtime import probe
from photon_ext.runtime.admission import Admission, check_admission
from photon_ext.runtime.default_plan import first_come_first_served
from photon_ext.runtime.ports import RuntimePort, SlotPort, StepSpec
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.record import read_step
from photon_ext.runtime.row import NEVER, Row, RowState
from photon_ext.runtime.running_set import RunningSet
from photon_ext.runtime.stalls import Stalls
from photon_ext.runtime.stats import PipelineStats
from photon_ext.runtime.step import (
    Fill,
    Forward,
    PageAppend,
    RowEvent,
    Sample,
    Step,
    StepKind,
    StepPlan,
    StepResult,
)
from photon_ext.runtime.step_builder import StepBuilder, StepInput
from photon_ext.runtime.step_features import features_with
from photon_ext.runtime.step_keys import step_keys

if TYPE_CHECKING:
    import torch

MAX_CHUNK = INT32_MAX // META_COLUMNS  # the words of decode_meta are counted in int32


class Pipeline:
    """Admits rows, launches steps, commits results.

    One turn of the loop is ``launch``, ``commit``, ``finalize`` (``tick`` does it in the right
    order for either depth). Not thread-safe.

    What goes wrong inside a step (the device, with a RuntimeError; a forward that runs eagerly; a
    record that cannot be; ``on_release`` within a commit; Ctrl-C meanwhile) comes out of the call
    it happens in, and breaks the pipeline: from then on ``launch``, ``commit``, ``finalize`` and
    ``tick`` raise PipelineError, with that as its cause. A mask callback that raises ends its row
    alone, and Ctrl-C within it breaks nothing.

    Args:
        runtime: a Runtime, or the simulated device of ``photon_ext.testing``.
        forward: enqueues a step's forward; reads the step's tensors, assigns ``step.logits`` [R,
            vocab_size].
        vocab_size: width of the logits; token ids lie below it.
        sample: enqueues sampling of ``step.logits`` into ``step.sampled``; None samples as the rows
            ask (RowParams); a function has to do itself what they ask, and gives no ``logprobs``.
        buckets: batch sizes that decode graphs are captured for: a step runs the graph of the next
            larger one. Those above the runtime's rows are dropped, the rows themselves added. None:
            1, 8, 16, 32, ... doubled up to the rows. Start-up captures three graphs for each size
            and slot: a whole step, and the two halves of one that waits for masks.
        prefill_buckets: token counts that prefill graphs are captured for; other chunks run
            eagerly. None leaves it to the runtime: one graph of ``chunk`` tokens where idle tokens
            cost nothing (the host backend), none elsewhere.
        mixed: capture steps of decode rows and chunks, too, for each of ``buckets`` with each of
            ``prefill_buckets``. As both parts are padded, a step then has up to
            ``keys.max_segments`` segments, which is more than the runtime's rows.
        chunk: prompt tokens per step at most.
        lora_slots: adapters that rows may have. Steps in which a row has one are captured besides,
            so that the others cost what they do without.
        value_ids: how many ids behind the vocabulary are values of objects (StepFeatures.SPATIAL);
            0: answers are text alone. Steps with others are captured besides, as with adapters.
        graph: capture steps into graphs at start-up (default), or run them eagerly.
        on_release: called once with each row that is released, by the commit, tick or abort that
            releases it: its pages are free then. A tick has called `on_event` with the row's last
            events before.
        stalls: count who waits for whom, by two event queries and two clock readings per step.
            False is for measuring what that costs.
        prompt_logprobs: the forward calls ``step.score`` where there is one; else requests for
            log-probabilities of prompts are refused.

    Attributes:
        stats: PipelineStats, which other threads may read.
        keys: which steps are captured.

    Raises:
        ConfigError: an argument is out of range, of the wrong kind, or asks for more memory than
            there is; the runtime has a Pipeline already, or its stream does not suit; or the
            forward, captured, left logits that do not fit.
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
        buckets: Iterable[int] | None = None,
        prefill_buckets: Iterable[int] | None = None,
        mixed: bool = False,
        chunk: int = 256,
        lora_slots: int = 0,
        value_ids: int = 0,
        graph: bool = True,
        on_release: Callable[[Row], None] | None = None,
        stalls: bool = True,
        prompt_logprobs: bool = False,
    ) -> None:
        table = runtime.table
        vocab_size = check_count("vocab_size", vocab_size)
        chunk = check_count("chunk", chunk, MAX_CHUNK)
        if buckets is not None:
            buckets = check_counts("buckets", buckets)
        if prefill_buckets is not None:
            prefill_buckets = check_counts("prefill_buckets", prefill_buckets)
        check_callable("forward", forward, optional=False)
        check_callable("sample", sample)
        check_callable("on_release", on_release)
        check_flag("mixed", mixed)
        check_flag("prompt_logprobs", prompt_logprobs)
        self._lora_slots = check_count("lora_slots", lora_slots, least=0)
        value_ids = check_count("value_ids", value_ids, INT32_MAX - vocab_size, least=0)
        self.keys = step_keys(
            table.max_rows,
            chunk,
            buckets,
            prefill_buckets,
            mixed,
            graph=graph,
            captures_prefill=runtime.captures_prefill,
            features=features_with(self._lora_slots, value_ids),
        )
        self._spec = StepSpec(forward, sample, vocab_size, self.keys, chunk, graph, runtime.max_len)
        self.limits = Limits(
            vocab_size,
            runtime.max_len,
            runtime.page_size,
            table.pages_per_row,
            table.max_stop_ids,
            table.max_biases,
            table.penalty_vocab >= vocab_size,
            prompt_logprobs,
            value_ids,
        )
        self._runtime = runtime
        self._slots: Sequence[SlotPort] = runtime.open_slots(self._spec)
        self._on_release = on_release
        self.running_set = RunningSet()
        self._builder = StepBuilder(self._spec, self.running_set)
        self._inflight: deque[Step] = deque()
        self._committed = NEVER
        self.last_kind: StepKind | None = None
        self._no_way_back = _NoWayBack()
        self.stats = PipelineStats()
        self._stalls = Stalls(self.stats, stalls)

    # --- rows -------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows admitted and not yet released, zombies included, in order of admission."""
        return self.running_set.rows

    @property
    def busy(self) -> bool:
        """Whether any row or step is left."""
        return bool(self.running_set or self._inflight)

    @property
    def inflight(self) -> int:
        """Steps launched and not yet committed."""
        return len(self._inflight)

    @property
    def awaits_masks(self) -> bool:
        """Whether the latest step is not sampled yet: `finalize` is to be called."""
        return bool(self._inflight) and not self._inflight[-1].finalized

    @property
    def idles(self) -> bool:
        """Whether the device is done with all steps in flight. Never blocks."""
        return not self._inflight or self._slots[self._inflight[-1].slot].done()

    def check(self, prompt_ids: Iterable[int], params: RowParams) -> Admission:
        """A request that `admit` takes as it is; usable from any thread. Raises as `admit`."""
        return check_admission(self.limits, prompt_ids, params)

    def admit(
        self,
        prompt_ids: Iterable[int] | Admission,
        params: RowParams | None = None,
        pages: Sequence[int] | None = None,
        *,
        cached: int = 0,
        grows: bool = False,
        automaton: tuple[int, int] = (0, 0),
        lora_slot: int = 0,
    ) -> Row:
        """Gives a sequence a row; it is scheduled from the next launch on.

        Args:
            prompt_ids: at least one id in [0, vocab_size); or what `check` has made of a request:
                then without ``params``.
            params: what the row is run with; None: the defaults. Prompt and ``max_new_tokens`` must
                fit ``max_len``, but for the last token, which takes no place.
            pages: KV pages of the whole sequence, in order: enough for prompt and cap without the
                last token, different, from 0 on, and the caller's until ``on_release``. None, with
                one page per row, is the page of the row's index.
            cached: leading prompt tokens whose keys and values the pages hold already, written by
                steps that are committed; not all of the prompt, and of a row with penalties none
                that was generated.
            grows: the pages are enough for the prompt; plans append the others (PageAppend).
            automaton: where the row's begins among the words of all (RuntimePort.write_automaton),
                and its state before the first token that is sampled; 0: it has none. The words stay
                as they are until ``on_release``.
            lora_slot: the row's adapter, from 1 to ``lora_slots``, the caller's until
                ``on_release``; 0: none.

        Raises:
            RequestError: the request can never be served; NoFreeRow: not now. Nothing has been
                taken then.
        """
        if not isinstance(prompt_ids, Admission):
            prompt_ids = self.check(prompt_ids, RowParams() if params is None else params)
        prompt, params, _ = prompt_ids
        held = check_pages(pages, len(prompt) if grows else prompt_ids.kv_len, self.limits)
        self._check_begin(len(prompt), cached, lora_slot)
        table = self._runtime.table
        index, generation = table.acquire()
        owned = (index,) if held is None else held
        words = row_words(params, generation, cached, prompt_ids.answer_begin, automaton, lora_slot)
        table.write_row(index, words, owned, params.stop_token_ids)
        if params.logit_bias:
            table.write_bias(index, bias_words(params))
        if params.counts_tokens:
            begun = prompt[: prompt_ids.answer_begin]
            table.count_from(index, prompt_bits(begun, table.penalty_vocab))
        capacity = len(owned) * self.limits.page_size
        row = Row(
            index,
            generation,
            owned,
            prompt,
            params,
            prefilled=cached,
            capacity=capacity,
            lora_slot=lora_slot,
            has_automaton=automaton[0] > 0,
            step_tokens=self._runtime.step_tokens,
        )
        self.running_set.add(row)
        return row

    def _check_begin(self, prompt_tokens: int, cached: int, lora_slot: int) -> None:
        """Raises RequestError: see `admit`."""
        if not 0 <= cached < prompt_tokens:
            raise RequestError(
                f"cached is {shown(cached)} of a prompt of {prompt_tokens} tokens; from 0 to "
                f"{prompt_tokens - 1} can be: the last is always fed"
            )
        if not 0 <= lora_slot <= self._lora_slots:
            raise RequestError(
                f"lora_slot is {shown(lora_slot)}; the pipeline has slots 1 to {self._lora_slots}, "
                "and 0 for none"
            )

    def write_automaton(self, offset: int, words: torch.Tensor) -> None:
        """See RuntimePort.write_automaton."""
        self._runtime.write_automaton(offset, words)

    def abort(self, row: Row) -> bool:
        """Ends a row now: tokens in flight are skipped, no event follows, and it is released when
        no step uses it, maybe at once. False if it had ended already.

        Raises:
            PipelineError: the row is another pipeline's.
        """
        return self._leave(row, RowState.FINISHED)

    def drain(self, row: Row) -> bool:
        """Ends a row without losing a token: those in flight are still delivered, and no other is
        launched. Otherwise as `abort`; False also where it drains already.
        """
        return self._leave(row, RowState.DRAINING)

    def _leave(self, row: Row, state: RowState) -> bool:
        if not isinstance(row, Row):
            raise PipelineError(f"{shown(row)} is no row; give one that admit() has returned")
        if not row.delivers or row.state is state:
            return False
        if not self.running_set.holds(row):
            raise PipelineError(f"{row} was admitted by another pipeline; abort it there")
        self.running_set.finish(row, state)
        self._runtime.table.kill(row.index)
        self._tell_released(self._take_unused())
        return True

    # --- one turn of the loop ---------------------------------------------------------------------

    def launch(self, plan: StepPlan | None = None) -> Step | None:
        """Enqueues the next step, without a wait; None: every slot is taken, or nothing is left.

        Args:
            plan: who is scheduled; None: first come, first served, prefill and decode in turns.
                Without rows it launches nothing; its drains and appends are done all the same.

        Raises:
            PipelineError: the plan holds a row that has nothing to launch or no page for it, or
                more than a step takes; the latest step waits for its masks, or the pipeline is
                broken.
            RequestError: the plan appends pages that cannot be.
        """
        self._require_working()
        if not self.can_launch:
            return None
        if self._inflight and not self._inflight[-1].finalized:
            waits = f"step {self._inflight[-1].index} waits for its masks"
            raise PipelineError(f"{waits}: call finalize() before the next launch() (I11)")
        probe.begin(Phase.PLAN)
        if plan is None:
            decode, prefill = self.running_set.decode, self.running_set.prefill
            plan = first_come_first_served(decode, prefill, self.last_kind, self._spec.chunk)
        probe.end()
        if not isinstance(plan, StepPlan):
            raise PipelineError(f"the plan is {shown(plan)}; give a StepPlan, or None")
        for row in plan.drains:
            self.drain(row)
        self._append_pages(plan.appends)
        if not (plan.decode or plan.chunks):
            self._rest()
            return None
        probe.begin(Phase.LAUNCH, self.stats.steps)
        try:
            step_input = self._builder.build(plan)
            with self._no_way_back:
                return self._enqueue(step_input)
        finally:
            probe.end()

    @property
    def can_launch(self) -> bool:
        """Whether a slot is free."""
        return len(self._inflight) < self._runtime.depth

    def commit(self) -> StepResult:
        """Waits for the oldest step, the only blocking wait, and advances its rows (I2). An empty
        result when nothing is in flight. ``on_release`` is called before the result is there to
        be read; `tick` hands its events out first.

        Raises:
            PipelineError: the step waits for its masks, its record is not that of its rows, a
                custom ``sample`` gave an id beyond the vocabulary, or the pipeline is broken.
        """
        result, unused = self._read()
        if unused:
            with self._no_way_back:
                self._tell_released(unused)
        return result

    def _read(self) -> tuple[StepResult, list[Row]]:
        """The result of the oldest step, and the rows that nothing uses any more: their indices are
        free, and `on_release` is to be called with them.
        """
        self._require_working()
        if not self._inflight:
            return StepResult(), []
        step = self._inflight[0]
        if not step.finalized:
            raise PipelineError(
                f"step {step.index} waits for its masks: call finalize() before commit()"
            )
        with self._no_way_back:
            probe.begin(Phase.WAIT, step.index)
            records = self._wait(step)
            probe.end()
            probe.begin(Phase.COMMIT, step.index)
            self._inflight.popleft()
            self._committed = step.index
            self._stalls.committed(step)
            ids = self.limits.vocab_size + self.limits.value_ids
            ended, step_tokens = self.running_set.ended, self._runtime.step_tokens
            result = read_step(step, records, ids, ended, step_tokens)
            if step.batch is not None:
                step.batch.epoch.commits += 1
            if step.chunks or result.short:
                self._count(step, result)
            for event in result.events.values():
                if event.finish is not None:
                    self.running_set.finish(event.row)
            unused = self._take_unused()
            self.stats.committed(step, result.count, result.zombies)
            probe.committed(step, result.zombies)
            probe.end()
            return result, unused

    def finalize(
        self,
        fill: Fill | None = None,
        prepare: Callable[[Sequence[Row]], None] | None = None,
    ) -> None:
        """Samples the step that waits for masks, once every step before it is committed (I6);
        otherwise does nothing.

        Args:
            fill: called as ``fill(row, words)`` for every constrained row that is sampled and whose
                tokens are still delivered; sets bit ``id & 31`` of word ``id >> 5`` of the zeroed
                int32 ``words`` for each allowed id (`set_ids` does). What it raises ends that row
                alone, but for Ctrl-C on the main thread, which passes through.
            prepare: called once before, with all rows that ``fill`` is going to be called with.

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
        waiting = [(index, row) for index, row in step.constrained() if row.delivers]
        if prepare is not None and waiting:
            prepare([row for _, row in waiting])
        for index, row in waiting:
            if row.delivers:  # still, after the callbacks for others
                self._write_mask(slot, index, row, fill)
        probe.end()
        probe.begin(Phase.FINALIZE, step.index)
        with self._no_way_back:
            slot.finalize(step.key)
        probe.end()
        step.finalized = True

    def tick(
        self, fill: Fill | None = None, on_event: Callable[[RowEvent], None] | None = None
    ) -> StepResult:
        """One turn: launch t+1, commit t when the pipeline is full or nothing was left to launch,
        finalize t+1.

        Args:
            fill: see ``finalize``.
            on_event: called with each committed event before the next masks are filled, so that
                constraints can follow their tokens. What it raises neither ends nor delays a row:
                it still gets the turn's other events, the turn is brought to its end, masks
                included, and then the first exception is raised. The next ``tick`` goes on from
                there.

        Returns the result of the step that was committed: iterate over it for its events. Empty
        where none was, as in the first tick at depth 2. Raises as the three.
        """
        launched = self.launch()
        self.finalize(fill)
        full = launched is None or not self.can_launch
        result, unused = self._read() if full else (StepResult(), [])
        try:
            if on_event is not None:
                _hand_out(result, on_event)
        finally:
            if unused:
                with self._no_way_back:
                    self._tell_released(unused)
            self.finalize(fill)
            if not self.busy:  # the caller may stop here, and come back with the next request
                self._rest()
        return result

    # --- launch -----------------------------------------------------------------------------------

    def _append_pages(self, appends: Iterable[PageAppend]) -> None:
        for row, pages in appends:
            if not (row.running and self.running_set.holds(row)):
                raise PipelineError(f"a plan appends pages to {row}, which does not run here")
            held = check_more_pages(row.pages, pages, self.limits)
            self._runtime.table.append_pages(row.index, len(row.pages), held[len(row.pages) :])
            row.pages, row.capacity = held, len(held) * self.limits.page_size

    def _enqueue(self, step_input: StepInput) -> Step:
        batch, segments, key, words, staged, targets = step_input
        number, index = self.stats.steps, self._free_slot()
        slot = self._slots[index]
        self._stalls.launching(self._slots[self._inflight[-1].slot] if self._inflight else None)
        deltas = self._runtime.table.take_deltas()
        logprobs = batch is not None and bool(batch.logprobs)
        for chunk in segments:
            logprobs |= chunk.row.params.logprobs is not None
        sent = slot.launch(key, words, staged, deltas, not key.split, logprobs, targets)
        if batch is not None:
            batch.launch(number)
            if not batch.ready:
                self.running_set.covered(batch.due())
        for segment in segments:
            segment.row.launch_chunk(number, segment.num_tokens)
            if segment.sample:
                self.running_set.prompt_done(segment.row)
        step = Step(number, index, key, batch, segments, slot.span, not key.split)
        self._inflight.append(step)
        self.last_kind = key.kind
        self.stats.launched(step, sent)
        probe.launched(step, sent)
        return step

    def _free_slot(self) -> int:
        # slots take turns, and the oldest step leaves first
        return (self._inflight[-1].slot + 1) % len(self._slots) if self._inflight else 0

    def _rest(self) -> None:
        """Nothing can be launched."""
        if not self._inflight:
            self._stalls.rest()

    # --- commit -----------------------------------------------------------------------------------

    def _wait(self, step: Step) -> memoryview:
        return self._stalls.wait(self._slots[step.slot], step.key.segments)

    def _count(self, step: Step, result: StepResult) -> None:
        """The step is committed: first tokens, and decode rows that got fewer tokens than a step
        may give; the epoch counts all others.
        """
        for column, tokens in result.short.items():
            self.running_set.recount(result.rows[column], tokens)
        for chunk in step.chunks:
            if chunk.sample:
                chunk.row.commit_first()

    def _take_unused(self) -> list[Row]:
        unused = self.running_set.take_unused(self._committed)
        for row in unused:
            self._runtime.table.release(row.index)
        return unused

    def _tell_released(self, rows: list[Row]) -> None:
        if self._on_release is not None:
            for row in rows:
                self._on_release(row)

    # --- masks and failure ------------------------------------------------------------------------

    def _write_mask(self, slot: SlotPort, index: int, row: Row, fill: Fill | None) -> None:
        if fill is None:
            raise PipelineError(f"{row} is constrained: finalize() needs a fill callback")
        try:
            slot.write_mask(index, row, row.mask_position, fill)
        except BaseException as error:  # the user's callback: its fault is that row's alone
            is_main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt) and is_main:
                raise  # Ctrl-C, which Python raises wherever the main thread happens to be
            row.fault = error

    def _require_working(self) -> None:
        if (failure := self._no_way_back.failure) is not None:
            text = f"the pipeline cannot go on: {type(failure).__name__}: {failure}"
            raise PipelineError(text) from failure


class _NoWayBack:
    """What raises in here leaves a step half enqueued or half read, and breaks the pipeline."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failure = error


def _hand_out(events: Iterable[RowEvent], on_event: Callable[[RowEvent], None]) -> None:
    """Calls the user's ``on_event`` with every event, and then raises the first that it raised."""
    raised: BaseException | None = None
    probe.begin(Phase.COMMIT)
    for event in events:
        try:
            on_event(event)
        except BaseException as error:
            raised = error if raised is None else raised
    probe.end()
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # it holds this frame

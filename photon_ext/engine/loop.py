"""The engine loop: continuous batching over the two-slot pipeline; what runs on the engine thread.

One turn, in order (at depth 2 step t+1 runs on the device while the host commits and delivers step
t):

    admit      cancels and passed deadlines are taken, waiting requests get rows and pages; while a
               launch is delayed, whoever arrives
    plan       who is scheduled in step t+1
    launch     step t+1 is enqueued
    commit     step t is read: tokens in columns, stops, constraints advance
    finalize   masks of step t+1, from committed state; its sampling is enqueued
    deliver    readers of step t are woken, ends are told, stop strings are looked for
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from photon_ext.engine.embeds import EmbedsMemory
from photon_ext.engine.output import End
from photon_ext.engine.request import Request
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.engine.step_output import EndedRequest, StepColumns, StepOutput, ToldTokens
from photon_ext.errors import PipelineError, RequestError, describe, shown
from photon_ext.observe.meter import Meter
from photon_ext.runtime import (
    FinishReason,
    Pipeline,
    Row,
    RowEvent,
    Step,
    StepResult,
    TokenLogprobs,
    probe,
)
from photon_ext.runtime.probe import Phase
from photon_ext.sampling.mask_threads import MaskThreads
from photon_ext.scheduling import Deadlines, DelayedLaunch, Planner, Scheduler, Sequence, StepTimes

Listener = Callable[[StepOutput], None]
_LOG = logging.getLogger("photon_ext")
_NONE: dict[int, list[TokenLogprobs]] = {}


class Delivery(NamedTuple):
    """What `deliver` has to show: tokens of a host-checked sequence, or an end with its tokens."""

    sequence: Sequence[Request]
    tokens: tuple[int, ...]
    end: End | None = None


class EngineLoop:
    """Owns the scheduler and the pipeline, whose `on_release` is `scheduler.released.append`.

    Attributes:
        listeners: called with what each step gave.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler[Request],
        planner: Planner[Request],
        queue: RequestQueue,
        meter: Meter,
        masks: MaskThreads,
        embeds: EmbedsMemory,
        times: StepTimes,
        delay: DelayedLaunch,
    ) -> None:
        self.listeners: list[Listener] = []
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._planner = planner
        self._queue = queue
        self._meter = meter
        self._embeds = embeds
        self._deadlines = Deadlines[Request]()
        self._times = times
        self._delay = delay
        self._delayed = False
        self._masks = masks
        self._undelivered: deque[Delivery] = deque()
        self._fresh: StepResult | None = None
        self._columns = StepColumns()
        self._told: dict[int, ToldTokens] = {}  # for the listeners, what is not in columns

    def run(self) -> bool:
        """Turns, until the queue is closed and nothing is left, or a crash, which all callers
        hear of. False: another thread is at it; a start that was interrupted may have made one.
        """
        if not self._queue.own():
            return self._queue.ended
        try:
            while self._collect():
                self._turn()
        except BaseException as error:  # whatever it is, every caller must hear of it
            self._die(error)
        finally:
            self._queue.disown()
        return True

    def _turn(self) -> None:
        clock = self._meter.clock
        self._meter.turn()
        self._admit()
        self._delayed = self._delay_s() > 0.0
        if self._delayed:
            clock.enter(Phase.DELIVER)
            self._deliver()  # who has ended meanwhile
            clock.enter(None)
            return
        launched = self._launch()
        if self._fresh is not None or self._undelivered:
            clock.enter(Phase.DELIVER)
            self._deliver()  # at depth 1: what was committed while nothing ran
        if launched is None or not self._pipeline.can_launch:
            clock.enter(Phase.COMMIT)
            self._commit()
            clock.enter(Phase.FINALIZE)
            self._finalize()
        if self._pipeline.inflight:
            clock.enter(Phase.DELIVER)
            self._deliver()
        clock.enter(None)
        if self._fresh is None and not self._scheduler.rows_held:
            self._scheduler.forget_batch()

    def _collect(self) -> bool:
        """Takes what has arrived; sleeps while there is nothing to do. False: it is the end."""
        seen = probe.active is not None  # a look that nobody asks for takes a microsecond
        probe.begin(Phase.DELAY if seen and self._has_work() else Phase.COLLECT)
        arrivals = self._queue.collect(self._rest_s)
        probe.end()
        for sequence in arrivals.submitted:
            if sequence.ended:  # by a cancel that came between its registration and this
                continue
            self._scheduler.add(sequence)
            self._deadlines.add(sequence)
            if sequence.sink.cancelled:  # before it was registered
                self._end(sequence, sequence.sink.cancel_end)
        for request in arrivals.cancelled:
            if (found := self._scheduler.registry.find(request.id)) is not None:
                self._end(found, request.cancel_end)
        if arrivals.closing:
            for sequence in self._scheduler.registry.live:
                self._end(sequence, End(FinishReason.CANCELLED))
        for sequence in self._deadlines.passed():
            self._scheduler.stats.timeouts += 1
            self._end(sequence, End(FinishReason.TIMEOUT))
        return not arrivals.closing or self._has_work()

    def _rest_s(self) -> float | None:
        """Seconds for which there is nothing to do but what arrives; None: the loop has no work."""
        if not self._has_work():
            return None
        # without a look at them: who waits may get a row first
        idle = self._delayed or not (self._scheduler.waiting_count or self._scheduler.released)
        return self._delay_s() if idle else 0.0

    def _has_work(self) -> bool:
        return bool(
            self._pipeline.busy
            or self._scheduler.released
            or self._undelivered
            or self._fresh is not None
            or self._scheduler.waiting_count
        )

    def _delay_s(self) -> float:
        """Seconds for which the next launch may wait, see DelayedLaunch. It is not delayed where
        nothing runs, or no row has anything to launch.
        """
        left_s = self._delay.left_s()
        if left_s == 0.0:  # first, as it is all that short steps cost
            return 0.0
        pipeline, rows = self._pipeline, self._pipeline.running_set
        waits = pipeline.inflight and pipeline.can_launch and (rows.decode or rows.prefill)
        return left_s if waits and not pipeline.idles else 0.0

    # --- admit, plan, launch ----------------------------------------------------------------------

    def _admit(self) -> None:
        if self._scheduler.released:
            self._scheduler.release_all()
        if not self._scheduler.waiting_count:  # as nearly always
            return
        for sequence, grant in self._planner.admissions():
            pages, cached, place = grant
            for write in self._scheduler.automata.take_writes():
                self._pipeline.write_automaton(*write)
            try:
                row = self._pipeline.admit(
                    sequence.placed(cached, place),
                    pages=pages,
                    cached=cached,
                    grows=True,
                    automaton=sequence.automaton_place,
                    lora_slot=sequence.lora_slot,
                )
            except RequestError as error:
                self._scheduler.cancel(sequence, grant)
                self._end(sequence, End(FinishReason.ERROR, error=str(error)))
            else:
                self._scheduler.admit(sequence, row, grant)
                if sequence.embeds is not None and place is not None:
                    fed = sequence.embeds_behind(cached)
                    self._embeds.write(place, sequence.embeds[-fed:])
        count = self._scheduler.waiting_count
        if count and not self._pipeline.busy:
            raise PipelineError(
                f"{count} requests wait, and no row runs whose end could let them in"
            )

    def _launch(self) -> Step | None:
        clock, pipeline = self._meter.clock, self._pipeline
        if not pipeline.can_launch:
            return None
        clock.enter(Phase.PLAN)
        plan = self._planner.plan(pipeline.last_kind)
        clock.enter(Phase.LAUNCH)
        step = pipeline.launch(plan)
        if step is not None:
            self._delay.launched(step)
        # if nothing older is in flight; else it has to wait for that commit
        self._finalize()
        return step

    def _finalize(self) -> None:
        if self._pipeline.awaits_masks:  # in an engine without constraints no step ever does
            self._pipeline.finalize(self._fill_mask, self._fill_together)

    def _fill_together(self, rows: Iterable[Row]) -> None:
        sequences = map(self._scheduler.sequence_of, rows)
        self._masks.fill(one.constraint for one in sequences if not one.repeats)

    def _fill_mask(self, row: Row, words: memoryview) -> None:
        self._scheduler.sequence_of(row).fill_bitmask(words)

    # --- commit -----------------------------------------------------------------------------------

    def _commit(self) -> None:
        result = self._pipeline.commit()
        if (load := self._times.committed(result, self._pipeline.busy)) is not None:
            self._planner.timed(load)
        self._delay.committed(result)
        for sequence, event in self._scheduler.advance(result):
            self._take(sequence, event)
        if result.step is not None:
            self._fresh = result

    def _take(self, sequence: Sequence[Request], event: RowEvent) -> None:
        """An end, first tokens, or tokens of a host-checked sequence."""
        if sequence.host_checked:
            self._take_host_checked(sequence, event)
        elif event.finish is not None:
            self._end(sequence, _verdict(sequence, event, event.finish), event.tokens)
        else:
            self._tell_listeners(sequence.sink, len(event.tokens))

    def _take_host_checked(self, sequence: Sequence[Request], event: RowEvent) -> None:
        """Its tokens one by one: it may end before the last of them, and the device's verdict is
        that on the last.
        """
        failed, last = event.finish is FinishReason.ERROR, len(event.tokens) - 1
        for i, token in enumerate(event.tokens):
            verdict = event.finish if i == last and not failed else None
            is_stop = verdict is FinishReason.STOP and not event.complete
            if not is_stop:  # that comes with the end, which says whether its text shows
                self._undelivered.append(Delivery(sequence, (token,)))
            try:
                reason = sequence.advance(token, verdict)
            except BaseException as error:
                # the constraint is the caller's code and may raise anything
                fault = f"the constraint raised on token {token}: {describe(error)}"
                self._end(sequence, End(FinishReason.ERROR, error=fault))
                return
            if reason is not None:
                end = _verdict(sequence, event._replace(finish=verdict), reason)
                self._end(sequence, end, (token,) if is_stop else ())
                return
        if failed:
            self._end(sequence, End(FinishReason.ERROR, error=event.error))

    # --- deliver ----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        ended: list[Request] = []
        while self._undelivered:
            delivery = self._undelivered.popleft()
            request = delivery.sequence.sink
            if request.done:  # by a stop string, or a fault
                continue
            known = request.materialized
            try:
                self._show(delivery)
            except BaseException as error:
                # no text for these tokens (tokenizers panic with a BaseException)
                fault = f"the text could not be made: {describe(error)}"
                self._end_now(delivery.sequence, End(FinishReason.ERROR, error=fault))
            self._tell_listeners(request, request.materialized - known)
            if request.done:
                ended.append(request)
                self._meter.requests.add(request.life(delivery.sequence.admitted))
        if self._fresh is not None:
            for request in self._queue.read.copy():
                request.wake()
        if self.listeners and (self._fresh is not None or ended):
            self._tell(ended)
        self._fresh = None

    def _show(self, delivery: Delivery) -> None:
        sequence, tokens, end = delivery
        request = sequence.sink
        if end is not None:
            request.finish(end, tokens)
            return
        request.add(tokens)
        if request.text is not None and request.text.found is not None:
            self._end_now(sequence, End(FinishReason.STOP, request.text.found))

    def _tell_listeners(self, request: Request, count: int) -> None:
        """The latest tokens of a request, which are in no log: with the step's output."""
        if self.listeners and count:
            begin = request.materialized - count
            tokens, logprobs = self._told.setdefault(request.id, ToldTokens([], []))
            tokens += request.tokens_from(begin)
            logprobs += request.logprobs[begin : request.materialized]

    def _tell(self, ended: Iterable[Request]) -> None:
        """One hand-over per step to whoever listens."""
        result = StepResult() if self._fresh is None else self._fresh
        log, told = self._scheduler.log, self._told
        if result.even and not (log.host_checked or told or ended):  # as nearly always
            logprobs = _logprobs(result, log.ids, ()) if result.logprobs else _NONE
            self._call_listeners(self._columns.even(log.ids, result.tokens[0], logprobs))
            return
        self._told = {}
        ids = log.ids if result.rows else array("q")
        apart = {place for place in (*result.events, *log.host_checked) if place < len(ids)}
        ends = [EndedRequest.of(one.id, one.end) for one in ended if one.end is not None]
        logprobs = _logprobs(result, ids, apart)
        output = self._columns.uneven(ids, result.tokens, apart, told, logprobs, ends)
        self._call_listeners(output)

    def _call_listeners(self, output: StepOutput) -> None:
        for listener in self.listeners.copy():
            try:
                listener(output)
            except BaseException as error:  # the caller's code, which may raise anything
                # not remove(): whether and to what it compares equal is the caller's
                place = next(i for i, one in enumerate(self.listeners) if one is listener)
                del self.listeners[place]
                fault = "a listener of the engine, %s, raised %s; it hears no more"
                _LOG.error(fault, shown(listener), describe(error))

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, sequence: Sequence[Request], end: End, tokens: tuple[int, ...] = ()) -> None:
        """The sequence ends; its final event, and the last tokens, come with the next delivery."""
        if not sequence.ended:
            # first: from here on a crash finds it there
            self._undelivered.append(Delivery(sequence, tokens, end))
            self._stop(sequence)

    def _end_now(self, sequence: Sequence[Request], end: End) -> None:
        """The sequence ends, and its caller hears of it at once."""
        if not sequence.ended:
            self._stop(sequence)
        sequence.sink.finish(end)

    def _stop(self, sequence: Sequence[Request]) -> None:
        """The sequence runs no more; its row follows when no step in flight uses it."""
        self._scheduler.finish(sequence)
        if sequence.row is not None:
            self._pipeline.abort(sequence.row)

    def _die(self, error: BaseException) -> None:
        """Everybody learns why. The runtime keeps the memory of steps still in flight."""
        self._queue.fail(error)  # first: from here on nobody is added
        told_late = [delivery.sequence for delivery in self._undelivered]
        fault = f"the engine has crashed: {describe(error)}"
        ended: list[Request] = []
        for sequence in (*told_late, *self._scheduler.registry.live):
            if not sequence.sink.done:
                sequence.sink.finish(End(FinishReason.ERROR, error=fault))
                ended.append(sequence.sink)
        self._fresh, self._told = None, {}
        self._tell(ended)


def _logprobs(
    result: StepResult, ids: array[int], apart: Collection[int]
) -> dict[int, list[TokenLogprobs]]:
    """By request, of decode rows but those in these places."""
    places = {row: place for place, row in enumerate(result.rows) if place not in apart}
    return {ids[places[row]]: own for row, own in result.logprobs.items() if row in places}


def _verdict(sequence: Sequence[Request], event: RowEvent, reason: FinishReason) -> End:
    if reason is FinishReason.ERROR:
        return End(reason, error=event.error)
    if reason is FinishReason.LENGTH:
        return End(reason, sequence.limit)
    if event.finish is FinishReason.STOP and not event.complete:
        return End(reason, event.tokens[-1], hides_last=not sequence.sink.include_stop)
    return End(reason, "constraint")

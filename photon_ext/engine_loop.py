"""The engine loop: continuous batching over the two-slot pipeline; what runs on the engine thread.

One turn, in order (at depth 2 step t+1 runs on the device while the host commits and delivers step
t):

    admit      waiting requests get rows and pages, cancels are taken
    launch     step t+1 is enqueued
    commit     step t is read: tokens, stops, constraints advance
    finalize   masks of step t+1, from committed state; its sampling is enqueued
    deliver    text of step t, to callers
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from photon_ext.errors import PipelineError, RequestError, describe
from photon_ext.observe.meter import Meter
from photon_ext.runtime import FinishReason, Pipeline, Row, RowEvent, Step, probe
from photon_ext.runtime.probe import Phase
from photon_ext.scheduling.mailbox import Mailbox
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence, SequenceState


class Delivery(NamedTuple):
    """What `deliver` has to show: a committed token, or the end of a sequence."""

    sequence: Sequence
    token: int | None = None
    is_stop: bool = False
    reason: FinishReason | None = None
    error: str | None = None


class EngineLoop:
    """Drives the pipeline for the requests that come through the mailbox. It owns the scheduler and
    the pipeline while it runs.

    Args:
        pipeline: made with `released.append` as its `on_release`.
        released: rows whose lease the pipeline has released, to be taken by the next turn: until
            then a commit may still speak of them.
        scheduler: the registry of sequences.
        mailbox: what callers send.
        depth: steps in flight.
        meter: told of every turn; its clock takes the host's time.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        released: list[Row],
        scheduler: Scheduler,
        mailbox: Mailbox,
        depth: int,
        meter: Meter,
    ) -> None:
        self._meter = meter
        self._pipeline = pipeline
        self._released = released
        self._scheduler = scheduler
        self._mailbox = mailbox
        self._depth = depth
        self._undelivered: deque[Delivery] = deque()

    def run(self) -> bool:
        """The thread's whole life: turns, until the mailbox is closed and nothing is left, or until
        a crash, of which all callers hear.

        False: another thread is at it. A start that was interrupted may have made one all the same.
        """
        if not self._mailbox.own():
            return self._mailbox.ended
        try:
            while self._collect():
                self._turn()
        except BaseException as error:  # whatever it is, every caller must hear of it
            self._die(error)
        finally:
            self._mailbox.disown()
        return True

    def _turn(self) -> None:
        clock = self._meter.clock
        self._meter.turn()
        self._admit()
        clock.enter(Phase.LAUNCH)
        launched = self._launch()
        clock.enter(Phase.DELIVER)
        self._deliver()  # at depth 1: what was committed while nothing ran
        if launched is None or self._pipeline.inflight == self._depth:
            clock.enter(Phase.COMMIT)
            self._commit()
            clock.enter(Phase.FINALIZE)
            self._pipeline.finalize(self._fill_mask)
        if self._pipeline.inflight:
            clock.enter(Phase.DELIVER)
            self._deliver()
        clock.enter(None)

    def _collect(self) -> bool:
        """Takes the mail; sleeps while there is nothing to do.

        False: the engine is to end, and nothing is left.
        """
        probe.begin(Phase.COLLECT)
        mail = self._mailbox.collect(self._has_work)
        probe.end()
        for sequence in mail.submitted:
            self._scheduler.add(sequence)
        for request in mail.cancelled:
            if (found := self._scheduler.find(request)) is not None:
                self._end(found, FinishReason.CANCELLED)
        if mail.closing:
            for sequence in self._scheduler.live:
                self._end(sequence, FinishReason.CANCELLED)
        return not mail.closing or self._has_work()

    def _has_work(self) -> bool:
        return bool(
            self._pipeline.busy or self._released or self._undelivered or self._scheduler.waiting
        )

    def _admit(self) -> None:
        for row in self._released:
            self._scheduler.release(row)
        self._released.clear()
        while (taken := self._scheduler.take()) is not None:
            sequence, pages = taken
            try:
                row = self._pipeline.admit(
                    sequence.prompt_ids,
                    stop_ids=sequence.stop_ids,
                    max_new_tokens=sequence.max_new_tokens,
                    temperature=sequence.temperature,
                    seed=sequence.seed,
                    constrained=sequence.constraint is not None,
                    pages=pages,
                )
            except RequestError as error:
                self._scheduler.give_back(sequence, pages)
                self._end(sequence, FinishReason.ERROR, str(error))
            else:
                self._scheduler.place(sequence, row)
        if self._scheduler.waiting and not self._pipeline.busy:
            raise PipelineError(
                f"{self._scheduler.waiting} requests wait, and no row runs whose end could let "
                "them in"
            )

    def _launch(self) -> Step | None:
        step = self._pipeline.launch()
        # if nothing older is in flight; else it has to wait for that commit
        self._pipeline.finalize(self._fill_mask)
        return step

    def _commit(self) -> None:
        for event in self._pipeline.commit():
            self._take(event)

    def _take(self, event: RowEvent) -> None:
        sequence = self._scheduler.sequence_of(event.row)
        if event.token is None:
            self._end(sequence, FinishReason.ERROR, event.error)
            return
        self._undelivered.append(Delivery(sequence, event.token, event.finish is FinishReason.STOP))
        try:
            reason = sequence.commit(event.token, event.finish)
        except BaseException as error:
            # the constraint is the caller's code and may raise anything: its fault is that
            # request's alone
            self._end(
                sequence,
                FinishReason.ERROR,
                f"the constraint raised on token {event.token}: {describe(error)}",
            )
            return
        if reason is not None:
            self._end(sequence, reason)

    def _fill_mask(self, row: Row, words: memoryview) -> None:
        constraint = self._scheduler.sequence_of(row).constraint
        assert constraint is not None
        constraint.fill_bitmask(words)

    def _deliver(self) -> None:
        while self._undelivered:
            delivery = self._undelivered.popleft()
            sequence = delivery.sequence
            try:
                if delivery.token is None:
                    assert delivery.reason is not None
                    sequence.close(delivery.reason, delivery.error)
                elif sequence.deliver(delivery.token, delivery.is_stop):
                    self._end(sequence, FinishReason.STOP)
                    sequence.close(FinishReason.STOP)
            except BaseException as error:
                # no text for these tokens (tokenizers panic with a BaseException): no reason to
                # stop the others
                self._end(sequence, FinishReason.ERROR)
                sequence.close(FinishReason.ERROR, f"the text could not be made: {describe(error)}")

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The sequence ends now; its row follows when no step in flight uses it, its final event
        with the next delivery.
        """
        if sequence.state is SequenceState.ENDED:
            return
        # first: from here on a crash finds it there
        self._undelivered.append(Delivery(sequence, reason=reason, error=error))
        self._scheduler.drop(sequence)
        sequence.end()
        if sequence.row is not None:
            self._pipeline.abort(sequence.row)
        self._mailbox.give_back(sequence.constraint)

    def _die(self, error: BaseException) -> None:
        """The loop has crashed: nobody waits for ever, and everybody learns why.

        The runtime keeps the memory of steps still in flight.
        """
        left = self._mailbox.fail(error)
        pending = [delivery.sequence for delivery in self._undelivered]
        for sequence in {id(s): s for s in (*self._scheduler.live, *pending, *left)}.values():
            sequence.close(FinishReason.ERROR, f"the engine has crashed: {describe(error)}")

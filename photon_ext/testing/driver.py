"""Drives a pipeline through requests, and watches what it says about each: the smallest engine
there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from photon_ext.errors import RequestError
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.ports import RuntimePort
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import FinishReason, Forward, RowEvent
from photon_ext.testing.errors import SimLeaseError
from photon_ext.testing.forward import ToyForward
from photon_ext.testing.invariants import check_invariants
from photon_ext.testing.model import Request


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of a request so far.

    Attributes:
        request: what was asked.
        row: its row, from admission on.
        tokens: those committed, a stop token included.
        finish: why it ended; None: it has not.
        error: what went wrong, where it ended by an error.
        released: its row and pages were given back, which may come later than its end.
    """

    request: Request
    row: Row | None = None
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    released: bool = False


class Driver:
    """Admits requests first come first served as rows and pages allow, and ticks. A SimError says
    what went wrong.

    A request that the pipeline refuses is a RequestError of the tick that admits it.

    Args:
        runtime: a SimRuntime, or another one on the CPU.
        pages: pages of a pool, for runtimes with more than one page per row.
        pipeline_type: the pipeline to drive; a test may plant a bug in a subclass.
        forward: what steps run; None is a ToyForward, which other runtimes than the simulated one
            run with ``graph`` False only.
        vocab_size, buckets, prefill_buckets, mixed, chunk, graph: of the Pipeline.

    Attributes:
        pipeline: what it drives.
        outcomes: of every request, in order of submission.
        free_pages: of the pool.
    """

    def __init__(
        self,
        runtime: RuntimePort,
        *,
        pages: int = 0,
        pipeline_type: type[Pipeline] = Pipeline,
        forward: Forward | None = None,
        vocab_size: int = 32,
        buckets: Iterable[int] = (1, 2),
        prefill_buckets: Iterable[int] | None = (),
        mixed: bool = False,
        chunk: int = 8,
        graph: bool = True,
    ) -> None:
        self.pipeline = pipeline_type(
            runtime,
            forward or ToyForward(runtime, vocab_size, pages or None),
            vocab_size=vocab_size,
            buckets=buckets,
            prefill_buckets=prefill_buckets,
            mixed=mixed,
            chunk=chunk,
            graph=graph,
            on_release=self.on_release,
        )
        self.outcomes: list[Outcome] = []
        self.free_pages = deque(range(pages))
        self._runtime = runtime
        self._pages = pages
        self._waiting: deque[Outcome] = deque()
        self._live: dict[tuple[int, int], Outcome] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self.pipeline.busy

    def submit(self, request: Request) -> Outcome:
        """Queues a request. Raises RequestError where it needs more pages than there are."""
        if self._paged and self._needed(request) > self._pages:
            raise RequestError(
                f"the request needs {self._needed(request)} pages and the pool has {self._pages}; "
                "make the Driver with more"
            )
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self._waiting.append(outcome)
        return outcome

    def cancel(self, outcome: Outcome) -> None:
        """Ends a request wherever it is; one that has ended stays as it is."""
        if outcome in self._waiting:
            self._waiting.remove(outcome)
            outcome.finish = FinishReason.CANCELLED
        elif outcome.row is not None and self.pipeline.abort(outcome.row):
            outcome.finish = FinishReason.CANCELLED
            self._forget_ended(outcome)

    def admit(self) -> None:
        """Admits what fits, in order."""
        while (
            self._waiting and self._runtime.table.free_rows and self._fits(self._waiting[0].request)
        ):
            outcome = self._waiting.popleft()
            request = outcome.request
            outcome.row = self.pipeline.admit(
                request.prompt_ids,
                request.params,
                [self.free_pages.popleft() for _ in range(self._needed(request))]
                if self._paged
                else None,
                automaton=self.automaton_of(request),
            )
            self._live[outcome.row.index, outcome.row.generation] = outcome

    def automaton_of(self, request: Request) -> tuple[int, int]:
        """Where the automaton of a request that gets a row begins, and its state; here none has
        one.
        """
        return 0, 0

    def tick(self) -> None:
        """One turn of the loop."""
        self.admit()
        self.pipeline.tick(self.fill, self.take)
        check_invariants(self.pipeline)

    def run(self, *requests: Request) -> list[tuple[int, ...]]:
        """Submits ``requests`` and ticks until nothing is left; the tokens of each."""
        outcomes = [self.submit(request) for request in requests]
        while self.busy:
            self.tick()
        return [tuple(outcome.tokens) for outcome in outcomes]

    def take(self, event: RowEvent) -> None:
        """Notes what a commit reported."""
        outcome = self._live.get((event.row.index, event.row.generation))
        if outcome is None or outcome.finish is not None:
            raise SimLeaseError(
                f"{event.row} has ended, and a commit still reports {event.tokens}, {event.finish}"
            )
        outcome.tokens += event.tokens
        outcome.finish, outcome.error = event.finish, event.error
        self._forget_ended(outcome)

    def fill(self, row: Row, words: memoryview) -> None:
        """The mask of a constrained row, from its committed tokens."""
        outcome = self._live[row.index, row.generation]
        assert outcome.request.allowed is not None
        for token in outcome.request.allowed(tuple(outcome.tokens)):
            bits = words[token >> 5] | 1 << (token & 31)
            words[token >> 5] = bits - (1 << 32) if bits >> 31 & 1 and bits > 0 else bits

    def on_release(self, row: Row) -> None:
        """Takes pages back; each lease is heard of once."""
        outcome = self._live.get((row.index, row.generation))
        if outcome is None or outcome.released:
            raise SimLeaseError(f"{row} was released twice")
        outcome.released = True
        self._forget_ended(outcome)
        if self._paged:
            self.free_pages.extend(row.pages)

    def _forget_ended(self, outcome: Outcome) -> None:
        """An outcome that has its end and its release, in either order, is spoken of no more."""
        if outcome.released and outcome.finish is not None and outcome.row is not None:
            del self._live[outcome.row.index, outcome.row.generation]

    @property
    def _paged(self) -> bool:
        return self._pages > 0

    def _needed(self, request: Request) -> int:
        return -(
            -(len(request.prompt_ids) + request.params.max_new_tokens - 1)
            // self._runtime.page_size
        )

    def _fits(self, request: Request) -> bool:
        return not self._paged or self._needed(request) <= len(self.free_pages)

"""Who runs next: first come, first served, when a row and all pages of the request are free."""

from __future__ import annotations

from collections import deque

from photon_ext.errors import RequestError
from photon_ext.runtime import Row
from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.request import Request
from photon_ext.scheduling.sequence import Sequence, SequenceState


class Scheduler:
    """Every live sequence: the one registry, the waiting queue, and the rows and pages of those
    that run.

    A sequence is live from `add` to `drop`; its row and pages are returned by `release`, which may
    come later (zombies). Not thread-safe: the engine thread owns it, except for `fit`, which reads
    constants only.

    Args:
        pool: the KV pages.
        page_size: tokens per page.
        max_rows: sequences in rows at once.
        max_len: longest sequence, prompt and generated tokens.
    """

    def __init__(self, pool: PagePool, page_size: int, max_rows: int, max_len: int) -> None:
        self.pool = pool
        self._page_size = page_size
        self.max_rows = max_rows
        self._max_len = max_len
        self._live: dict[Request, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._in_rows: dict[Row, Sequence] = {}

    @property
    def live(self) -> tuple[Sequence, ...]:
        """Sequences without a final event, oldest first."""
        return tuple(self._live.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rows_held(self) -> int:
        """Rows in use, those of ended sequences whose steps are still in flight included."""
        return len(self._in_rows)

    def pages_for(self, max_step_tokens: int) -> int:
        """Pages that hold `max_step_tokens` KV tokens."""
        return -(-max_step_tokens // self._page_size)

    def fit(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """The length cap of a request, cut to what the context leaves.

        Raises:
            RequestError: the request can never be served by this engine, however long it waits.
        """
        if prompt_tokens == 0:
            raise RequestError(
                "the prompt is empty; give at least one token (a model's beginning-of-text id will "
                "do)"
            )
        if prompt_tokens > self._max_len:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and the context holds {self._max_len}; "
                "shorten the prompt, or make the engine with a larger max_len"
            )
        cap = min(max_new_tokens, self._max_len - prompt_tokens + 1)
        needed, total = self.pages_for(prompt_tokens + cap - 1), self.pool.num_pages
        if needed > total:
            raise RequestError(
                f"a prompt of {prompt_tokens} tokens and max_new_tokens {cap} need {needed} pages "
                f"of {self._page_size} tokens and the "
                f"pool has {total}; ask for fewer tokens ({total * self._page_size} in all), or "
                "make the engine with more num_pages"
            )
        return cap

    def add(self, sequence: Sequence) -> None:
        """Registers a sequence and queues it."""
        self._live[sequence.request] = sequence
        self._waiting.append(sequence)

    def find(self, request: Request) -> Sequence | None:
        """The live sequence of a request, waiting or running; None once it has ended."""
        return self._live.get(request)

    def sequence_of(self, row: Row) -> Sequence:
        """Who holds a row, ended or not."""
        return self._in_rows[row]

    def take(self) -> tuple[Sequence, list[int]] | None:
        """The next sequence to admit, with its pages, or None: nobody waits, or the first in line
        has to go on waiting.

        The caller follows up with `place`, or with `give_back` if admission failed.
        """
        if not self._waiting or len(self._in_rows) >= self.max_rows:
            return None
        pages = self.pool.allocate(self.pages_for(self._waiting[0].max_step_tokens))
        return None if pages is None else (self._waiting.popleft(), pages)

    def place(self, sequence: Sequence, row: Row) -> None:
        """The sequence taken last has got this row."""
        sequence.admit(row)
        self._in_rows[row] = sequence

    def give_back(self, sequence: Sequence, pages: list[int]) -> None:
        """The sequence taken last was not admitted: it is first in line again."""
        self.pool.release(pages)
        self._waiting.appendleft(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The sequence has ended: it is live no more, and waits no more.

        Its row and pages stay until `release`.
        """
        self._live.pop(sequence.request, None)
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)

    def release(self, row: Row) -> None:
        """The row's lease is released: no step in flight uses its pages."""
        del self._in_rows[row]
        self.pool.release(row.lease.pages)

"""One request's state on the host. The engine thread owns it; callers hold its Request."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Generic

from typing_extensions import TypeVar

from photon_ext.layout import FIRST_EMBED
from photon_ext.runtime import Admission, FinishReason, Row, TokenLogprobs
from photon_ext.sampling import Constraint
from photon_ext.sampling.constraints import is_finished, pack_ids
from photon_ext.sampling.token_automaton import TokenAutomaton
from photon_ext.scheduling.adapters import Adapter
from photon_ext.scheduling.policy import Key
from photon_ext.scheduling.prefix_cache import token_bytes
from photon_ext.scheduling.token_sink import TokenSink

if TYPE_CHECKING:
    import torch

Sink = TypeVar("Sink", bound=TokenSink, default=TokenSink, covariant=True)
"""What callers hold of a request: scheduling knows it as a TokenSink, an engine as its own."""


class SequenceState(Enum):
    """A request waits for a row, runs in one, drains (it was preempted: its tokens in flight are
    still delivered, then it waits again), is finished (they are skipped: a zombie), and is released
    once no step in flight uses its row.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    RELEASED = "released"


@dataclass(eq=False, slots=True)
class Sequence(Generic[Sink]):
    """A request from submit to the release of its row.

    Attributes:
        admission: what its row is run with; after a preemption, the rest of it.
        sink: where its tokens go, the caller's side.
        host_checked: each token is handled by itself, for a constraint or for stop strings; else
            tokens stay in columns.
        limit: what its length cap is: "max_new_tokens", "max_objects", or "max_len" where the
            context leaves less.
        embeds: [n, hidden], in host memory: those of its prompt, in order; None once it has ended.
            In the prompt's ids each has a negative number that says its content, so that pages are
            shared by content.
        root: what its KV pages depend on besides its tokens (see PrefixCache).
        adapter: what its rows are run with; None: the model as it is.
        priority: the higher, the sooner, under a policy that looks at it.
        deadline: when it ends at the latest, in seconds of `time.monotonic`; infinite: never.
        arrived: when it came, in seconds of `time.monotonic`.
        admitted: when it first got a row, in seconds of `time.perf_counter`; None: it has not yet.
        key: its place in the policy's order.
        automaton: a constraint that the device keeps; None: it has none.
        automaton_begin: where it lies on the device, while a row holds it.
        content: the tokens of its admission's prompt as bytes, for the prefix cache.
        row: its row, from admission on.
        ended: no token counts any more.
        preemptions: how often it had to leave its row, to go on later.
    """

    admission: Admission
    constraint: Constraint | None
    sink: Sink
    host_checked: bool = False
    limit: str = "max_new_tokens"
    root: Hashable = None
    priority: int = 0
    deadline: float = math.inf
    adapter: Adapter | None = None
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    key: Key = ()
    automaton: TokenAutomaton | None = None
    automaton_begin: int = 0
    embeds: torch.Tensor | None = None
    content: bytes = field(init=False, repr=False)
    row: Row | None = None
    ended: bool = False
    preemptions: int = 0
    _asked: Admission = field(init=False, repr=False)
    _checked_tokens: list[int] = field(default_factory=list, init=False, repr=False)
    _repeated: deque[int] = field(default_factory=deque, init=False, repr=False)
    _scored: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._asked = self.admission
        self.content = token_bytes(self.admission.prompt_ids)

    @property
    def id(self) -> int:
        """The request's."""
        return self.sink.id

    @property
    def rank(self) -> tuple[Key, int]:
        """The smallest is the first to get a row, the largest the first to give it up: by the
        policy, then by arrival, in whose order ids are given.
        """
        return self.key, self.sink.id

    @property
    def state(self) -> SequenceState:
        """From admission on that of its row."""
        if self.row is not None:
            return SequenceState(self.row.state.value)
        return SequenceState.RELEASED if self.ended else SequenceState.WAITING

    @property
    def automaton_place(self) -> tuple[int, int]:
        """Where its automaton begins, and the state behind what is committed of its answer, unless
        its row makes that again; zeros: it has none.
        """
        if self.automaton is None:
            return 0, 0
        answer = self.admission.prompt_ids[self.admission.answer_begin :]
        return self.automaton_begin, self.automaton.state_after(answer)

    @property
    def lora_slot(self) -> int:
        """Where its adapter is; 0: it has none."""
        return 0 if self.adapter is None else self.adapter.slot

    def _answer(self, begin: int) -> list[int]:
        """What is committed of its answer, from token `begin` on, but for the last token of one
        that ends with it.
        """
        if self.host_checked:
            return self._checked_tokens[begin:]
        return self.sink.tokens_from(begin)

    def whole_content(self) -> bytes:
        """The tokens of its prompt and of what is committed of its answer, as `content`."""
        return self.content + token_bytes(self._answer(self.admission.generated))

    @property
    def known(self) -> int:
        """Tokens that its next row begins with: of its prompt, and those that it will repeat."""
        return len(self.admission.prompt_ids) + len(self._repeated)

    @property
    def repeats(self) -> int:
        """How many tokens its row makes again that were told before a preemption."""
        return len(self._repeated)

    def new_scores(self, position: int, scores: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of the log-probabilities of the tokens behind ``position`` of its prompt those that are
        new: after a preemption they come again.
        """
        prompt = len(self._asked.prompt_ids)
        begin, end = (max(at - position, 0) for at in (self._scored, prompt - 1))
        self._scored += len(new := scores[begin:end])
        return new

    def embeds_behind(self, position: int) -> int:
        """Embeddings of its prompt from this position on."""
        if self.embeds is None:
            return 0
        return sum(token < 0 for token in self.admission.prompt_ids[position:])

    def placed(self, cached: int, place: int | None) -> Admission:
        """What its row is run with; embeddings behind ``cached`` tokens stand from ``place`` on."""
        if place is None:
            return self.admission
        begun, fed = self.admission.prompt_ids[:cached], self.admission.prompt_ids[cached:]
        ids = itertools.count(FIRST_EMBED - place, -1)
        staged = (next(ids) if token < 0 else token for token in fed)
        return self.admission._replace(prompt_ids=(*begun, *staged))

    def requeue(self, exact: bool) -> None:
        """It was preempted, and goes on later: noise depends on seed and position, so that its
        tokens are those of an undisturbed run.

        It goes on behind what it has generated, as a longer prompt; or, `exact`, from its own
        prompt on, and makes the same tokens again: a chunk would give their keys and values other
        bits than the decode steps gave.
        """
        prompt, asked, _ = self._asked
        tokens = (*prompt, *self._answer(0))
        if asked.prompt_logprobs is not None and self._scored >= len(prompt) - 1:
            # all are told: it finds its pages in the cache
            asked = replace(asked, prompt_logprobs=None)
            self._asked = self.admission = self._asked._replace(params=asked)
        if exact:
            self._repeated = deque(tokens[len(prompt) :])
        else:
            self.admission = self._behind(tokens)
            self.content = token_bytes(tokens)
        self.row = None
        self.preemptions += 1

    def _behind(self, tokens: tuple[int, ...]) -> Admission:
        """What is left of the request, behind its prompt and answer so far."""
        asked, answered = self._asked.params, len(tokens) - len(self._asked.prompt_ids)
        left = self._asked.kv_len + 1 - len(tokens)
        shortest = max(0, asked.min_tokens - (asked.max_new_tokens - left))
        params = replace(asked, max_new_tokens=left, min_tokens=shortest)
        return Admission(tokens, params, answered)

    def repeat(self, token: int) -> str | None:
        """Takes a token that was told before. Returns what is wrong, where it is another one."""
        expected = self._repeated.popleft()
        if token == expected:
            return None
        return (
            f"after a preemption token {token} came where {expected} had been told: the forward "
            "does not give the same bits again, which `exact` relies on"
        )

    def fill_bitmask(self, words: memoryview) -> None:
        """The mask of its next token: the constraint's, or of the one token that is repeated."""
        if self._repeated:
            words[:] = memoryview(pack_ids((self._repeated[0],), len(words)))
        else:
            assert self.constraint is not None
            self.constraint.fill_bitmask(words)

    def advance(self, token: int, verdict: FinishReason | None) -> FinishReason | None:
        """Takes a token of a host-checked sequence, and the device's verdict, to the constraint,
        which may raise anything.

        Returns why the sequence ends with this token, or None. A finished constraint counts before
        the length cap.
        """
        self._checked_tokens.append(token)
        if self.constraint is not None and verdict is not FinishReason.STOP:
            self.constraint.advance(token)
            if is_finished(self.constraint):
                verdict = FinishReason.STOP
        return verdict

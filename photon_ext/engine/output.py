"""What a request gives: events, and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from photon_ext.runtime import FinishReason, TokenLogprobs
from photon_ext.sampling.spatial import Objects
from photon_ext.sampling.tools import ToolCall, calls_in


class StreamEvent(NamedTuple):
    """A token, and the text that became certain with it; or the last one: why the request ended.

    Attributes:
        text: to be joined to that of the events before; often a word, sometimes empty. The last
            event has what was held back, none after an error.
        token_ids: the token, a stop token included; empty in the last event.
        finish_reason, stop_reason, error: of the last event: see Output; else None.
        logprobs: of the token, where they were asked for; else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        text: without special tokens, and without the stop unless include_stop; empty without a
            tokenizer.
        token_ids: the generated ids, a final stop token included.
        finish_reason: "stop", "length", "cancelled", "timeout" or "error".
        stop_reason: with "stop" the id of the stop token, the stop string, or "constraint", which
            was finished; with "length" "max_new_tokens" or, with a skill, "max_objects", or
            "max_len" where the context was full; else None.
        error: what went wrong, with finish reason "error"; else None.
        prompt_tokens: length of the prompt in tokens, those of a chat template included.
        cached_tokens: of them, those whose keys and values were found in cached pages.
        ttft_ms: milliseconds from submit, once the prompt was encoded, to the commit of the first
            token; None without one.
        tokens_per_s: decode rate: tokens after the first by the time since the first; None below
            two tokens.
        logprobs: of each of token_ids, where they were asked for; else empty. `Engine.token_text`
            has the text of an id.
        prompt_logprobs: of the tokens of the prompt from the second on, where they were asked for;
            else empty.
        constraint_on: of a request with a constraint, where it was kept: "device", or "host: " and
            why; else None.
        objects: of a request with a skill, those that are complete: their values are the ids from
            the vocabulary's size on, of token_ids, and have no text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    tokens_per_s: float | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    constraint_on: str | None = None
    objects: Objects = ()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that the text has, see `calls_in`."""
        return calls_in(self.text)


@dataclass(frozen=True, slots=True)
class End:
    """Why a request has ended.

    Attributes:
        stop_reason, error: see Output.
        hides_last: the last token is a stop token, whose text is not shown.
        time: when, in seconds of `time.perf_counter`.
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    hides_last: bool = False
    time: float = field(default_factory=time.perf_counter)

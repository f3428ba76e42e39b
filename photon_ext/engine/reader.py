"""One reader's way through a request: its events, and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from photon_ext.engine.output import Output, StreamEvent
from photon_ext.engine.token_feed import Cursor
from photon_ext.errors import describe

if TYPE_CHECKING:
    from photon_ext.engine.request import Request
    from photon_ext.runtime import TokenLogprobs


class EventReader:
    """Makes a request's events, with text of its own."""

    def __init__(self, request: Request) -> None:
        self.ended = False
        self._request = request
        self._seen = Cursor()
        self._text = request.make_text()

    def take(self) -> list[StreamEvent]:
        """What has come since the last call."""
        known = self._seen.tokens
        tokens, end, self._seen = self._request.read(self._seen)
        told: list[TokenLogprobs | None] = [*self._request.logprobs[known:]]
        logprobs = told or [None] * len(tokens)
        events: list[StreamEvent] = []
        try:
            for i, token in enumerate(tokens):
                is_stop = end is not None and end.hides_last and i == len(tokens) - 1
                piece = "" if is_stop else self._text.push(token)
                events.append(StreamEvent(piece, (token,), logprobs=logprobs[i]))
            if end is not None:
                piece = "" if end.error is not None else self._text.finish()
                events.append(StreamEvent(piece, (), end.reason.value, end.stop_reason, end.error))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):  # meant for the reader's thread
            raise
        except BaseException as error:  # tokenizers panic with a BaseException
            self._request.cancel()
            for i in range(len(events), len(tokens)):
                events.append(StreamEvent("", (tokens[i],), logprobs=logprobs[i]))
            fault = f"the text could not be made: {describe(error)}"
            events.append(StreamEvent("", (), "error", None, fault))
        self.ended = bool(events) and events[-1].finish_reason is not None
        return events


def read_output(request: Request) -> Output:
    """The output of a request that has ended."""
    events, end = EventReader(request).take(), request.end
    last, first = events[-1], request.first_time
    assert end is not None
    assert last.finish_reason is not None
    ids = tuple(token for event in events for token in event.token_ids)
    rate = None
    if len(ids) >= 2 and first is not None and end.time > first:
        rate = (len(ids) - 1) / (end.time - first)
    return Output(
        text="".join(event.text for event in events),
        token_ids=ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        ttft_ms=None if first is None else 1e3 * (first - request.submitted),
        tokens_per_s=rate,
        logprobs=tuple(request.logprobs[: len(ids)]),
        prompt_logprobs=tuple(request.prompt_logprobs),
        constraint_on=request.constraint_on,
        objects=() if request.objects is None else request.objects.read(ids),
    )

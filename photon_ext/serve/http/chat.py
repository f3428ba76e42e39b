"""/v1/chat/completions: answers in OpenAI's shape, at once or as events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from photon_ext.serve.http.chat_request import ChatRequest
from photon_ext.serve.http.chat_run import ChatRun, Turn
from photon_ext.serve.http.errors import any_error
from photon_ext.serve.http.ids import new_id
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.parts import CallArguments, CallBegun, Part, Said, Thought
from photon_ext.serve.http.respond import DONE, EventStream, Json, json_bytes, quoted
from photon_ext.serve.http.sampling_fields import StreamOptions
from photon_ext.serve.http.token_names import TokenNames


class ChatEndpoint:
    """Answers conversations."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, body: ChatRequest, request: Request) -> Response:
        run = await ChatRun.start(self._model, body, request.state.size)
        request.state.log = run.logged
        if body.stream:
            return EventStream(_ChatEvents(run, body.stream_options, body.top is not None).bodies())
        return Json(await _whole(run, body, self._model.names))


async def _whole(run: ChatRun, body: ChatRequest, names: TokenNames) -> dict[str, Any]:
    """An answer that is not streamed. Raises as ChatRun.turns."""
    messages = [WholeMessage() for _ in run.answers]
    async with aclosing(run.turns()) as turns:
        async for found in turns:
            for index, own in found:
                messages[index].add(own)
    choices = []
    for index, (message, one) in enumerate(zip(messages, run.answers, strict=True)):
        scored = {"content": message.scored} if body.top is not None else None
        choices.append(
            {
                "index": index,
                "message": message.told(),
                "logprobs": scored,
                "finish_reason": one.finish_reason,
                "stop_reason": one.answer.stop_reason,
            }
        )
    told: dict[str, Any] = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": run.name,
        "choices": choices,
        "usage": run.usage.told(),
    }
    if body.metadata:
        told["metadata"] = body.metadata
    if body.prompt_logprobs is not None:
        told["prompt_logprobs"] = names.prompt_entries(run.prompt, run.prompt_scores)
    return told


class WholeMessage:
    """An answer's parts, joined.

    Attributes:
        scored: its tokens' log-probabilities, as JSON has them.
    """

    def __init__(self) -> None:
        self.scored: list[Any] = []
        self.said: list[str] = []
        self.thought: list[str] = []
        self.calls: list[tuple[CallBegun, list[str]]] = []

    def add(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if turn.scored is not None:
                self.scored.append(json.loads(turn.scored))
            for part in turn.parts:
                self._add(part)

    def told(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        content = "".join(self.said)
        found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.thought:
            found["reasoning_content"] = "".join(self.thought)
        if self.calls:
            found["content"] = content or None
            found["tool_calls"] = [
                {
                    "id": begun.id,
                    "type": "function",
                    "function": {"name": begun.name, "arguments": "".join(arguments)},
                }
                for begun, arguments in self.calls
            ]
        return found

    def _add(self, part: Part) -> None:
        match part:
            case Said(text):
                self.said.append(text)
            case Thought(text):
                self.thought.append(text)
            case CallBegun():
                self.calls.append((part, []))
            case CallArguments(index, text):
                self.calls[index][1].append(text)


class _ChatEvents:
    """The events of a streamed answer, written by hand: a few microseconds for each token."""

    def __init__(self, run: ChatRun, options: StreamOptions | None, scored: bool) -> None:
        """`scored`: log-probabilities were asked for."""
        self._run = run
        self._options = options or StreamOptions()
        self._scored = scored
        fields = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": run.name,
        }
        self._head = f'data: {json_bytes(fields).decode()[:-1]},"choices":['
        self._heads = [
            f'{self._head}{{"index":{index},"delta":' for index in range(len(run.answers))
        ]
        # what stands behind a delta, where it is always the same
        self._plain = None if scored or self._options.continuous_usage_stats else self._tail()
        self._begun: set[int] = set()
        self._waiting: list[list[str]] = [[] for _ in run.answers]  # log-probabilities, no text yet

    async def bodies(self) -> AsyncGenerator[bytes, None]:
        """All events that wait, as one body. An error is an event, too, behind which nothing comes
        but the end of events.
        """
        try:
            async with aclosing(self._run.turns()) as turns:
                async for found in turns:
                    events = [each for index, own in found for each in self._events(index, own)]
                    if events:
                        yield "".join(events).encode()
            if self._options.include_usage:
                usage = json_bytes(self._run.usage.told()).decode()
                yield f'{self._head}],"usage":{usage}}}\n\n'.encode()
        except Exception as error:
            yield b"data: %b\n\n" % json_bytes(any_error(error).body())
        yield DONE

    def _events(self, index: int, turns: Sequence[Turn]) -> list[str]:
        events = []
        if index not in self._begun:
            self._begun.add(index)
            events.append(self._event(index, '{"role":"assistant","content":""}'))
        waiting = self._waiting[index]
        for parts, scored, reason in turns:
            if scored is not None:
                waiting.append(scored)
            for part in parts:
                if self._plain is not None and type(part) is Said:
                    event = f'{self._heads[index]}{{"content":{quoted(part.text)}}}{self._plain}'
                else:
                    event = self._event(index, _delta(part))
                events.append(event)
            if reason is not None:
                events.append(self._event(index, "{}", reason))
        return events

    def _event(self, index: int, delta: str, reason: str | None = None) -> str:
        scored = "null"
        if self._scored and self._waiting[index]:
            scored = f'{{"content":[{",".join(self._waiting[index])}]}}'
            self._waiting[index].clear()
        finish = "null" if reason is None else f'"{reason}"'
        return f"{self._heads[index]}{delta}{self._tail(scored, finish)}"

    def _tail(self, scored: str = "null", finish: str = "null") -> str:
        usage = ""
        if self._options.continuous_usage_stats:
            usage = f',"usage":{json_bytes(self._run.usage.told()).decode()}'
        elif self._options.include_usage:
            usage = ',"usage":null'
        return f',"logprobs":{scored},"finish_reason":{finish}}}]{usage}}}\n\n'


def _delta(part: Part) -> str:
    match part:
        case Said(text):
            return f'{{"content":{quoted(text)}}}'
        case Thought(text):
            return f'{{"reasoning_content":{quoted(text)}}}'
        case CallBegun(index, call, name):
            function = f'{{"name":{quoted(name)},"arguments":""}}'
            own = f'"index":{index},"id":{quoted(call)},"type":"function","function":{function}'
        case CallArguments(index, text):
            own = f'"index":{index},"function":{{"arguments":{quoted(text)}}}'
    return f'{{"tool_calls":[{{{own}}}]}}'

"""/v1/messages and /v1/messages/count_tokens: chats in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from photon_ext.serve.http.anthropic_request import CountRequest, MessagesRequest
from photon_ext.serve.http.chat_run import ChatRun, Turn, chat_prompt
from photon_ext.serve.http.errors import any_error
from photon_ext.serve.http.ids import new_id
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.parts import CallArguments, CallBegun, Part, Said, Thought
from photon_ext.serve.http.respond import EventStream, Json, json_bytes, quoted

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesEndpoint:
    """Answers conversations."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, body: MessagesRequest, request: Request) -> Response:
        asked = body.asked(self._model.texts.tokenizer)
        run = await ChatRun.start(self._model, asked, request.state.size)
        request.state.log = run.logged
        answer = _Answer(run)
        if not body.stream:
            return Json(await answer.whole())
        return EventStream(answer.bodies())

    async def count(self, body: CountRequest, request: Request) -> Response:
        model = self._model
        asked = body.chat(model.texts.tokenizer)
        model.adapter(asked.model)
        prompt = await chat_prompt(model, asked, asked.asked_tools(), request.state.size)
        return Json({"input_tokens": len(prompt.ids)})


class _Answer:
    """One answer, as blocks: a thought, text, calls of tools, in the order in which they come."""

    def __init__(self, run: ChatRun) -> None:
        self._run = run
        self._id = new_id("msg_")
        self._block = -1
        self._kind: type[Part] | None = None  # of the block that is open

    async def whole(self) -> dict[str, Any]:
        """Raises as ChatRun.turns."""
        blocks: list[dict[str, Any]] = []
        texts: list[list[str]] = []
        async with aclosing(self._run.turns()) as turns:
            async for found in turns:
                for part in _parts(found):
                    if self._opens(part):
                        blocks.append(_empty(part))
                        texts.append([])
                    if not isinstance(part, CallBegun):
                        texts[-1].append(part.text)
        for block, text in zip(blocks, texts, strict=True):
            _fill(block, "".join(text))
        return {**self._told(), "content": blocks}

    async def bodies(self) -> AsyncGenerator[bytes, None]:
        """The events; an error is one, too, and the last."""
        try:
            async with aclosing(self._run.turns()) as turns:
                begun = False
                async for found in turns:
                    events = [] if begun else [self._begin()]
                    begun = True
                    for part in _parts(found):
                        events += self._events(part)
                    yield "".join(events).encode()
            yield "".join(self._ends()).encode()
        except Exception as error:
            yield _event("error", json_bytes(any_error(error).anthropic_body()).decode()).encode()

    def _events(self, part: Part) -> Iterator[str]:
        if self._opens(part):
            if self._block > 0:
                yield self._closes(self._block - 1)
            own = json.dumps(_empty(part))
            fields = f'"index":{self._block},"content_block":{own}'
            yield _event("content_block_start", f'{{"type":"content_block_start",{fields}}}')
        if isinstance(part, CallBegun):
            return
        kind, name = _DELTAS[type(part)]
        delta = f'{{"type":"{kind}","{name}":{quoted(part.text)}}}'
        fields = f'"index":{self._block},"delta":{delta}'
        yield _event("content_block_delta", f'{{"type":"content_block_delta",{fields}}}')

    def _opens(self, part: Part) -> bool:
        """Whether another block begins with this part."""
        if isinstance(part, CallArguments) or (
            type(part) is self._kind and not isinstance(part, CallBegun)
        ):
            return False
        self._block, self._kind = self._block + 1, type(part)
        return True

    def _begin(self) -> str:
        message = {**self._told(), "stop_reason": None, "stop_sequence": None, "content": []}
        return _event("message_start", _dumped({"type": "message_start", "message": message}))

    def _ends(self) -> Iterator[str]:
        if self._block >= 0:
            yield self._closes(self._block)
        told = self._told()
        delta = {name: told[name] for name in ("stop_reason", "stop_sequence")}
        found = {"type": "message_delta", "delta": delta, "usage": told["usage"]}
        yield _event("message_delta", _dumped(found))
        yield _event("message_stop", '{"type":"message_stop"}')

    def _closes(self, block: int) -> str:
        return _event("content_block_stop", f'{{"type":"content_block_stop","index":{block}}}')

    def _told(self) -> dict[str, Any]:
        """All but the blocks, so far."""
        (one,), usage = self._run.answers, self._run.usage
        stopped = one.answer.stop_reason
        by_string = isinstance(stopped, str) and one.finish_reason == "stop"
        reason = None if one.finish_reason is None else _REASONS[one.finish_reason]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._run.name,
            "stop_reason": "stop_sequence" if by_string else reason,
            "stop_sequence": stopped if by_string else None,
            "usage": {
                "input_tokens": usage.prompt - usage.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached,
                "output_tokens": usage.completion,
            },
        }


_DELTAS: dict[type[Part], tuple[str, str]] = {
    Said: ("text_delta", "text"),
    Thought: ("thinking_delta", "thinking"),
    CallArguments: ("input_json_delta", "partial_json"),
}


def _parts(found: Sequence[tuple[int, Sequence[Turn]]]) -> Iterator[Part]:
    return (part for _, turns in found for turn in turns for part in turn.parts)


def _empty(part: Part) -> dict[str, Any]:
    """The block that begins with a part."""
    match part:
        case Thought():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegun(_, call, name):
            return {"type": "tool_use", "id": call, "name": name, "input": {}}
    return {"type": "text", "text": ""}


def _fill(block: dict[str, Any], text: str) -> None:
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        block["input"] = json.loads(text or "{}")
    except (ValueError, RecursionError):  # the answer was cut, or is nested too deeply
        block["input"] = {}


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _dumped(value: Any) -> str:
    return json_bytes(value).decode()

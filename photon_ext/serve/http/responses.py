"""/v1/responses: chats in the shape of OpenAI's newer clients; nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from photon_ext.serve.http.chat_run import ChatRun
from photon_ext.serve.http.errors import any_error
from photon_ext.serve.http.ids import new_id
from photon_ext.serve.http.model import ServedModel
from photon_ext.serve.http.parts import CallArguments, CallBegun, Part, Said, Thought
from photon_ext.serve.http.respond import EventStream, Json, json_bytes
from photon_ext.serve.http.responses_request import NamedTool, ResponsesRequest


class ResponsesEndpoint:
    """Answers conversations."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, body: ResponsesRequest, request: Request) -> Response:
        asked = body.chat(self._model.texts.tokenizer)
        run = await ChatRun.start(self._model, asked, request.state.size)
        request.state.log = run.logged
        answer = _Answer(run, body)
        if body.stream:
            return EventStream(answer.bodies())
        return Json(await answer.whole())


class _OpenItem:
    """An item of the output that is being written."""

    def __init__(self, part: Part) -> None:
        self.kind = CallBegun if isinstance(part, CallBegun) else type(part)
        self.texts: list[str] = []
        self._begun = part if isinstance(part, CallBegun) else None
        prefix = {Said: "msg_", Thought: "rs_", CallBegun: "fc_"}[self.kind]
        self.id = new_id(prefix)

    def takes(self, part: Part) -> bool:
        """Whether a part goes on with this item."""
        kind = CallBegun if isinstance(part, CallArguments) else type(part)
        return kind is self.kind and not isinstance(part, CallBegun)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def content(self) -> dict[str, Any]:
        """The one part of its content, of what is no call."""
        if self.kind is Thought:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def told(self, status: str) -> dict[str, Any]:
        if self._begun is not None:
            call = {"type": "function_call", "call_id": self._begun.id, "name": self._begun.name}
            return {"id": self.id, **call, "arguments": self.text, "status": status}
        content = [] if status == "in_progress" else [self.content()]
        if self.kind is Thought:
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        message = {"type": "message", "role": "assistant", "status": status}
        return {"id": self.id, **message, "content": content}


class _Answer:
    """One response: its items, in the order in which they come."""

    def __init__(self, run: ChatRun, body: ResponsesRequest) -> None:
        self._run = run
        self._body = body
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._done: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._sequence = 0

    async def whole(self) -> dict[str, Any]:
        """Raises as ChatRun.turns."""
        async for _ in self._events():
            pass
        return self._told()

    async def bodies(self) -> AsyncGenerator[bytes, None]:
        """The events; an error is one, too, and the last."""
        try:
            async with aclosing(self._events()) as found:
                async for events in found:
                    yield b"".join(map(self._event, events))
        except Exception as error:
            told = any_error(error)
            fields = {"message": told.message, "param": told.param, "code": told.code}
            yield self._event({"type": "error", **fields, "error": told.body()["error"]})

    async def _events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Of what came at a time. Raises as ChatRun.turns."""
        begun = False
        async with aclosing(self._run.turns()) as turns:
            async for found in turns:
                events = []
                if not begun:
                    begun, told = True, self._told()
                    for kind in ("created", "in_progress"):
                        events.append({"type": f"response.{kind}", "response": told})
                for _, own in found:
                    for turn in own:
                        for part in turn.parts:
                            events += self._part_events(part)
                yield events
        end = [*self._close()]
        told = self._told()
        yield [*end, {"type": f"response.{told['status']}", "response": told}]

    def _part_events(self, part: Part) -> Iterator[dict[str, Any]]:
        if self._open is None or not self._open.takes(part):
            yield from self._close()
            self._open = item = _OpenItem(part)
            place = {"output_index": len(self._done)}
            added = item.told("in_progress")
            yield {"type": "response.output_item.added", **place, "item": added}
            if item.kind is not CallBegun:
                yield {
                    "type": "response.content_part.added",
                    **self._place(item),
                    "content_index": 0,
                    "part": item.content(),
                }
        if isinstance(part, CallBegun):
            return
        item = self._open
        item.texts.append(part.text)
        kind = f"response.{_NAMES[item.kind]}.delta"
        yield {"type": kind, **self._place(item), **_inner(item), "delta": part.text}

    def _close(self) -> Iterator[dict[str, Any]]:
        """The item that is open is complete."""
        item, self._open = self._open, None
        if item is None:
            return
        place, inner = self._place(item), _inner(item)
        field = "arguments" if item.kind is CallBegun else "text"
        told = {field: item.text}
        if item.kind is CallBegun:
            told["name"] = item.told("completed")["name"]
        yield {"type": f"response.{_NAMES[item.kind]}.done", **place, **inner, **told}
        if item.kind is not CallBegun:
            part = {"content_index": 0, "part": item.content()}
            yield {"type": "response.content_part.done", **place, **part}
        done = item.told("completed")
        index = {"output_index": len(self._done)}
        self._done.append(done)
        yield {"type": "response.output_item.done", **index, "item": done}

    def _place(self, item: _OpenItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._done)}

    def _event(self, event: dict[str, Any]) -> bytes:
        self._sequence += 1
        data = json_bytes({**event, "sequence_number": self._sequence - 1})
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)

    def _told(self) -> dict[str, Any]:
        """The response, as far as it is."""
        (one,), body, usage = self._run.answers, self._body, self._run.usage
        reason = one.finish_reason
        cut = reason == "length"
        status = "in_progress" if reason is None else "incomplete" if cut else "completed"
        choice: Any = body.tool_choice or "auto"
        if isinstance(choice, NamedTool):
            choice = choice.model_dump()
        form = None if body.text is None else body.text.format
        text = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._run.name,
            "output": [*self._done],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text},
            "tool_choice": choice,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None
            if reason is None
            else {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }


_NAMES: dict[type[Any], str] = {
    Said: "output_text",
    Thought: "reasoning_text",
    CallBegun: "function_call_arguments",
}


def _inner(item: _OpenItem) -> dict[str, Any]:
    """Where within an item a text stands."""
    if item.kind is CallBegun:
        return {}
    return {"content_index": 0, **({"logprobs": []} if item.kind is Said else {})}

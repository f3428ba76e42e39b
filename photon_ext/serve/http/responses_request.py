"""The body of /v1/responses, and the chat that it asks for. Nothing is stored between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from photon_ext.checks import INT32_MAX
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.serve.http.chat_request import ChatRequest
from photon_ext.serve.http.fields import (
    BY_TYPE,
    Fields,
    JsonObject,
    Many,
    NotTaken,
    SentBack,
    branch,
    row_field,
)

_STATELESS = "nothing is stored here: send the whole conversation as input"
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_TEXTS = ("input_text", "output_text", "text")


def _known(kinds: tuple[str, ...], what: str) -> BeforeValidator:
    """Refuses others by name."""

    def checked(value: Any) -> Any:
        kind = value.get("type", "message") if isinstance(value, dict) else "message"
        if isinstance(kind, str) and kind not in kinds and isinstance(value, dict):
            raise PydanticCustomError(
                "not_taken",
                "{what} of type '{kind}' is not supported by this server; there are {kinds}",
                {"what": what, "kind": kind[:50], "kinds": ", ".join(kinds)},
            )
        return {"type": "message", **value} if isinstance(value, dict) else value

    return BeforeValidator(checked)


class TextContent(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[Any, NotTaken([])] = None
    logprobs: Annotated[Any, NotTaken([])] = None
    parsed: SentBack = None


Contents = Many[Annotated[TextContent, _known(_TEXTS, "a part")]]


class Item(Fields):
    """What all items may have, as clients copy them from a response."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Contents


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Contents


class ReasoningText(Fields):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Annotated[Any, NotTaken([])] = None
    content: Many[ReasoningText] | None = None
    encrypted_content: Annotated[Any, NotTaken()] = None


AnyItem = Annotated[
    Annotated[
        Annotated[MessageItem, branch("message")]
        | Annotated[CallItem, branch("function_call")]
        | Annotated[CallOutputItem, branch("function_call_output")]
        | Annotated[ReasoningItem, branch("reasoning")],
        BY_TYPE,
    ],
    _known(_ITEMS, "an item"),
]


class FunctionTool(Fields):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def told(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True, exclude={"type", "strict"})
        return {"type": "function", "function": given}


class NamedTool(Fields):
    type: Literal["function"]
    name: str


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def told(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextFields(Fields):
    format: TextFormat | None = None
    verbosity: Annotated[Any, NotTaken("medium")] = None


class Reasoning(Fields):
    """`effort`: "none" switches thoughts off, where the chat template can."""

    effort: Literal["none", "medium"] | None = None
    summary: Annotated[Any, NotTaken("auto")] = None
    generate_summary: Annotated[Any, NotTaken("auto")] = None


class StreamFields(Fields):
    include_obfuscation: Annotated[Any, NotTaken(False)] = None


class ResponsesRequest(Fields):
    """OpenAI's fields, and behind them those of this engine."""

    model: str | None = None
    input: str | Many[AnyItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    temperature: float | None = row_field("temperature")
    top_p: float | None = row_field("top_p", least=0)
    stream: bool | None = False
    stream_options: StreamFields | None = None
    tools: Many[Annotated[FunctionTool, _known(("function",), "a tool")]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    text: TextFields | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = Field(default=None, description="Comes with the answer.")
    user: str | None = Field(default=None, description="Of no effect.")
    safety_identifier: str | None = Field(default=None, description="Of no effect.")
    prompt_cache_key: str | None = Field(default=None, description="Of no effect.")
    prompt_cache_retention: Annotated[Any, NotTaken("in_memory")] = None
    store: Annotated[Any, NotTaken(False, instead=_STATELESS)] = None
    previous_response_id: Annotated[Any, NotTaken(instead=_STATELESS)] = None
    conversation: Annotated[Any, NotTaken(instead=_STATELESS)] = None
    background: Annotated[Any, NotTaken(False)] = None
    include: Annotated[Any, NotTaken([])] = None
    prompt: Annotated[Any, NotTaken()] = None
    max_tool_calls: Annotated[Any, NotTaken()] = None
    top_logprobs: Annotated[Any, NotTaken(0)] = None
    truncation: Annotated[Any, NotTaken("disabled")] = None
    service_tier: Annotated[Any, NotTaken("auto", "default")] = None

    # gateways add these
    top_k: int | None = row_field("top_k", least=-1)
    min_p: float | None = row_field("min_p")
    repetition_penalty: float | None = row_field("repetition_penalty")
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)

    def engine_names(self) -> dict[str, str]:
        form = "tools" if self.text is None or self.text.format is None else "text"
        own = {"max_new_tokens": "max_output_tokens", "json_schema": form}
        prompt = dict.fromkeys(("ids", "prompt", "messages"), "input")
        return {**super().engine_names(), **own, **prompt, "response_format": "text"}

    def chat(self, tokenizer: Tokenizer) -> ChatRequest:
        """The chat that is asked for. Raises ValidationError."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            named: Any = {"type": "function", "function": {"name": choice.name}}
        else:
            named = choice
        form = None if self.text is None else self.text.format
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "min_p": self.min_p,
                "repetition_penalty": self.repetition_penalty,
                "priority": self.priority,
                "tools": [tool.told() for tool in self.tools or ()] or None,
                "tool_choice": named,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": None if form is None else form.told(),
                "chat_template_kwargs": self._thinks(tokenizer),
            }
        )

    def _thinks(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        template = tokenizer.chat_template
        off = self.reasoning is not None and self.reasoning.effort == "none"
        switches = template is not None and template.reads("enable_thinking")
        return {"enable_thinking": False} if off and switches else None

    def _messages(self) -> list[dict[str, Any]]:
        """Items of one turn of the assistant are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case MessageItem(role="assistant"):
                    turn = _assistant(messages)
                    turn["content"] += _joined(item.content)
                case MessageItem():
                    messages.append({"role": item.role, "content": _joined(item.content)})
                case CallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _assistant(messages).setdefault("tool_calls", []).append(call)
                case CallOutputItem():
                    told = {"role": "tool", "tool_call_id": item.call_id}
                    messages.append({**told, "content": _joined(item.output)})
                case ReasoningItem():
                    thought = "".join(part.text for part in item.content or ())
                    _assistant(messages)["reasoning_content"] = thought
        return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _joined(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)

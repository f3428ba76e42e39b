"""The bodies of /v1/messages, and the chat that each asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from photon_ext.checks import INT32_MAX
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.serve.http.chat_request import ChatRequest
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import (
    BY_TYPE,
    Fields,
    JsonObject,
    Many,
    NotTaken,
    branch,
    row_field,
)
from photon_ext.serve.http.thought_parser import BEGIN

_NO_EFFECT = "Of no effect: prompts share pages by their content."


class Block(Fields):
    """What all blocks may have."""

    cache_control: dict[str, Any] | None = Field(default=None, description=_NO_EFFECT)


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, NotTaken([])] = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


def _known_block(value: Any) -> Any:
    """Raises PydanticCustomError, with the name of a block that is not supported."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _KINDS:
        raise PydanticCustomError(
            "not_taken",
            "a block of type '{kind}' is not supported by this server; there are {kinds}",
            {"kind": kind[:50], "kinds": ", ".join(_KINDS)},
        )
    return value


_KINDS = ("text", "thinking", "tool_use", "tool_result")
Text = Annotated[TextBlock, BeforeValidator(_known_block)]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Text] | None = None
    is_error: bool | None = False

    @property
    def told(self) -> str:
        """Templates have no place for an error, but in the text."""
        text = _joined(self.content or "")
        return f"Error: {text}" if self.is_error else text


AnyBlock = Annotated[
    Annotated[
        Annotated[TextBlock, branch("text")]
        | Annotated[ThinkingBlock, branch("thinking")]
        | Annotated[ToolUseBlock, branch("tool_use")]
        | Annotated[ToolResultBlock, branch("tool_result")],
        BY_TYPE,
    ],
    BeforeValidator(_known_block),
]


class Turn(Fields):
    role: Literal["user", "assistant"]
    content: str | Many[AnyBlock]

    def told(self) -> Iterator[dict[str, Any]]:
        """The messages of a chat that this is. Raises ApiError."""
        blocks = self.content
        if isinstance(blocks, str):
            yield {"role": self.role, "content": blocks}
        elif self.role == "assistant":
            yield _assistant(blocks)
        else:
            yield from _user(blocks)


class Tool(Block):
    name: str = Field(min_length=1)
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None

    def told(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    def told(self) -> str | dict[str, Any]:
        """Raises ApiError."""
        if (self.name is None) == (self.type == "tool"):
            raise bad_request(
                "tool_choice has the type 'tool' and a name, or neither", "tool_choice.name"
            )
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Fields):
    """`budget_tokens` is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)


class Metadata(Fields):
    user_id: str | None = None


class CountRequest(Fields):
    """A conversation, whose tokens are counted."""

    model: str
    messages: Many[Turn] = Field(min_length=1)
    system: str | Many[Text] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def engine_names(self) -> dict[str, str]:
        own = {"ids": "messages", "prompt": "messages", "stop": "stop_sequences"}
        return {**super().engine_names(), **own, "json_schema": "tools"}

    def chat(self, tokenizer: Tokenizer, **fields: Any) -> ChatRequest:
        """The chat that is asked for, with `fields` besides. Raises ApiError, ValidationError."""
        messages = [each for turn in self.messages for each in turn.told()]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _joined(self.system)})
        choice = self.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        asked = {
            "model": self.model,
            "messages": messages,
            "tools": [tool.told() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.told(),
            "parallel_tool_calls": parallel,
            "continue_final_message": messages[-1]["role"] == "assistant",
            "chat_template_kwargs": self._thinks(tokenizer),
        }
        return ChatRequest.model_validate({**asked, **fields})

    def _thinks(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """What is told to a template that can switch its model's thoughts off. Raises ApiError: a
        model is to think that cannot.
        """
        wanted = self.thinking is not None and self.thinking.type != "disabled"
        if wanted and tokenizer.token_id(BEGIN) is None:
            raise bad_request("thinking is enabled, and this model does not think", "thinking")
        template = tokenizer.chat_template
        switches = template is not None and template.reads("enable_thinking")
        return {"enable_thinking": wanted} if switches else None


class MessagesRequest(CountRequest):
    """Anthropic's fields."""

    max_tokens: int = Field(ge=1, le=INT32_MAX)
    stop_sequences: Many[str] | None = None
    stream: bool | None = False
    temperature: float | None = row_field("temperature", most=1)
    top_p: float | None = row_field("top_p", least=0)
    top_k: int | None = row_field("top_k")
    metadata: Metadata | None = Field(default=None, description="Of no effect.")
    service_tier: Annotated[Any, NotTaken("auto", "standard_only")] = None
    container: Annotated[Any, NotTaken()] = None
    context_management: Annotated[Any, NotTaken()] = None
    mcp_servers: Annotated[Any, NotTaken([])] = None
    output_config: Annotated[Any, NotTaken()] = None

    def asked(self, tokenizer: Tokenizer) -> ChatRequest:
        """Raises as `chat`."""
        return self.chat(
            tokenizer,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for block in blocks:
        match block:
            case TextBlock():
                told["content"] += block.text
            case ThinkingBlock():
                told["reasoning_content"] = told.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, "assistant")
    return {**told, "tool_calls": calls} if calls else told


def _user(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own."""
    text: list[TextBlock] = []
    for block in blocks:
        match block:
            case TextBlock():
                text.append(block)
            case ToolResultBlock():
                if text:
                    yield {"role": "user", "content": _joined(text)}
                    text = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.told}
            case _:
                raise _misplaced(block, "user")
    if text or not blocks:
        yield {"role": "user", "content": _joined(text)}


def _misplaced(block: Any, role: str) -> Exception:
    return bad_request(
        f"a message of role {role!r} has no block of type {block.type!r}", "messages"
    )

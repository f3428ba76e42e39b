"""ChatRequest: the body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from photon_ext.layout import MOST_LOGPROBS
from photon_ext.sampling.tools import Tools
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import JsonObject, Many, NotTaken
from photon_ext.serve.http.form_fields import FormFields
from photon_ext.serve.http.messages import Message
from photon_ext.serve.http.sampling_fields import SamplingFields


class ChatRequest(SamplingFields, FormFields):
    """OpenAI's fields, and behind them those of chat templates."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    metadata: dict[str, str] | None = Field(default=None, description="Comes with the answer.")

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: JsonObject | None = None

    tools: Many[JsonObject] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    separate_reasoning: bool | None = Field(
        default=True, description="Thoughts are in reasoning_content, not in content."
    )
    functions: Annotated[Any, NotTaken([], instead="use tools")] = None
    function_call: Annotated[Any, NotTaken("none", "auto", instead="use tool_choice")] = None
    modalities: Annotated[Any, NotTaken(["text"])] = None
    audio: Annotated[Any, NotTaken()] = None
    prediction: Annotated[Any, NotTaken()] = None
    moderation: Annotated[Any, NotTaken()] = None
    web_search_options: Annotated[Any, NotTaken()] = None
    service_tier: Annotated[Any, NotTaken("auto", "default")] = None
    verbosity: Annotated[Any, NotTaken("medium")] = None
    reasoning_effort: Annotated[
        Any, NotTaken(instead="use chat_template_kwargs, as {'enable_thinking': false}")
    ] = None
    prompt_cache_key: str | None = Field(
        default=None, description="Of no effect: prompts share pages by their content."
    )
    prompt_cache_retention: Annotated[Any, NotTaken("in_memory")] = None
    prompt_cache_options: Annotated[Any, NotTaken()] = None
    safety_identifier: str | None = Field(default=None, description="Of no effect.")

    def asked_tools(self) -> Tools | None:
        """A call that is forced has its own form, whatever is asked of a text. Raises ApiError,
        ConfigError.
        """
        tools = Tools.of(self.tools, self.tool_choice)
        if tools is not None and tools.given and not tools.forced and self.form():
            raise bad_request(
                "tools are given, and a form of the answer, which leaves no room for calls; give "
                "one of them, or tool_choice 'none' or 'required'",
                "tools",
            )
        return tools

    def engine_names(self) -> dict[str, str]:
        names = {**super().engine_names(), "ids": "messages", "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        if self.response_format is None:  # a schema is that of the call that is forced
            names["json_schema"] = "tools"
        return names

    @property
    def cap(self) -> int | None:
        """The most tokens of an answer; None: what the context holds. Raises ApiError."""
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            raise bad_request(
                f"max_tokens is {old} and max_completion_tokens {new}; give one of them",
                "max_completion_tokens",
            )
        return old if new is None else new

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are told with each; None: not even its own log-probability.
        Raises ApiError.
        """
        if self.top_logprobs and not self.logprobs:
            raise bad_request(
                f"top_logprobs is {self.top_logprobs} and logprobs is not true; set it",
                "top_logprobs",
            )
        return (self.top_logprobs or 0) if self.logprobs else None

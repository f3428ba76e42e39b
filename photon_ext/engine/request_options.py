"""What a caller may ask for one request, besides what its tokens are sampled with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypedDict

from photon_ext.checks import INT32_MAX, as_index, check_seconds
from photon_ext.errors import ConfigError, shown
from photon_ext.models.text.chat_options import NO_OPTIONS, ChatOptions
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.spatial import Skill
from photon_ext.sampling.tools import Tools


class RequestKeywords(TypedDict, total=False):
    """Keywords of `Engine.generate`, `submit` and `chat`; see RequestOptions.of."""

    priority: int
    timeout_s: float | None
    deadline: float | None
    cache_salt: str | None
    lora: str | None
    tools: Iterable[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    skill: str | None
    max_objects: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    special_tokens_in_messages: bool


class RequestOptions(NamedTuple):
    """Checked; `deadline` is in seconds of `time.monotonic`, infinite where there is none."""

    priority: int = 0
    deadline: float = math.inf
    cache_salt: str | None = None
    lora: str | None = None
    tools: Tools | None = None
    skill: Skill | None = None
    chat: ChatOptions = NO_OPTIONS

    @classmethod
    def of(
        cls,
        priority: object = 0,
        timeout_s: object = None,
        deadline: object = None,
        cache_salt: object = None,
        lora: object = None,
        tools: object = None,
        tool_choice: object = None,
        skill: object = None,
        max_objects: object = None,
        chat_template_kwargs: object = None,
        continue_final_message: object = False,
        special_tokens_in_messages: object = False,
        **unknown: object,
    ) -> RequestOptions:
        """What a call asks for.

        Args:
            priority: the higher, the sooner it gets a row, with the policy "priority" or your own.
            timeout_s, deadline: seconds from now, and a time of `time.monotonic`, at which what has
                not ended ends with finish reason "timeout" and the tokens that it has; the sooner
                counts.
            cache_salt: a string; requests share cached pages only with those that have the same, so
                that nobody learns from the time of an answer what others have asked.
            lora: the name of an adapter that `Engine.load_lora` has loaded; None: none.
            tools: functions that the answer may call, in OpenAI's shape: {"type": "function",
                "function": {"name": ..., "description": ..., "parameters": a JSON schema}}. The
                model's chat template tells it of them; `Output.tool_calls` has its calls.
            tool_choice: "auto" or None: the model decides; "none": it hears of no tools;
                "required", or {"type": "function", "function": {"name": ...}}: the answer is the
                JSON {"name": ..., "arguments": {...}} of one of them, or of this one, as
                `json_schema` would make it.
            skill: "point", "detect" or "segment": the answer is `Output.objects`, of a model with
                region heads: Points, Boxes, or the corners of an outline. max_new_tokens does not
                count then; stop strings, constraints and logprobs are refused. None: it is text.
            max_objects: the most objects, or corners, of an answer; None: 150.
            chat_template_kwargs: what the model's chat template reads besides messages and tools,
                by name, such as {"enable_thinking": False}.
            continue_final_message: the answer goes on with the text of the last message, instead of
                beginning one of its own: for an assistant's message that is not complete.
            special_tokens_in_messages: text of messages, tools and chat_template_kwargs that equals
                a special token of the model (<|im_end|>, ...) becomes that token. Otherwise it is
                encoded as text, so that nobody ends their turn within a message. Prompts that no
                template renders always have them.

        Raises ConfigError: a value is not allowed.
        """
        for name in unknown:
            remedy = f"there are {', '.join(RequestKeywords.__annotations__)}"
            if name == "n":
                remedy = "it is a keyword of Engine.generate, submit and chat: give it there"
            elif name in {field.name for field in fields(SamplingParams)}:
                remedy = f"it is one of SamplingParams: give params=SamplingParams({name}=...)"
            raise ConfigError(f"a request has no option {shown(name)}; {remedy}")
        number = as_index(priority)
        if number is None or abs(number) > INT32_MAX:
            raise ConfigError(
                f"priority is {shown(priority)}; give an integer from {-INT32_MAX} to {INT32_MAX}, "
                "the higher the sooner"
            )
        ends = [math.inf]
        if timeout_s is not None:
            expected = "seconds >= 0, or None for no timeout"
            ends.append(time.monotonic() + check_seconds("timeout_s", timeout_s, expected))
        if deadline is not None:
            expected = "seconds >= 0 of time.monotonic(), or None for no deadline"
            ends.append(check_seconds("deadline", deadline, expected))
        if not isinstance(cache_salt, (str, type(None))):
            raise ConfigError(f"cache_salt is {shown(cache_salt)}; give a string, or None")
        # of a str alone: hash and equality of a subclass are its own
        salt = None if cache_salt is None else str.__str__(cache_salt)
        if not isinstance(lora, (str, type(None))):
            raise ConfigError(f"lora is {shown(lora)}; give the name of an adapter, or None")
        adapter = None if lora is None else str.__str__(lora)
        given, found = Tools.of(tools, tool_choice), Skill.of(skill, max_objects)
        if given is not None and found is not None:
            raise ConfigError(f"skill is {found.name!r}, and tools are of text; leave one out")
        chat = ChatOptions.of(
            () if given is None else given.given,
            chat_template_kwargs,
            continue_final_message,
            special_tokens_in_messages,
        )
        return cls(number, min(ends), salt, adapter, given, found, chat)

"""ChatOptions: how a conversation becomes a prompt, besides what is said in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from photon_ext.checks import check_flag
from photon_ext.errors import ConfigError, shown


class ChatOptions(NamedTuple):
    """See `of`.

    Attributes:
        tools: as the chat template gets them.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    continue_final_message: bool = False
    special_tokens_in_messages: bool = False

    @classmethod
    def of(
        cls,
        tools: tuple[Mapping[str, Any], ...],
        template_kwargs: object,
        continue_final_message: object,
        special_tokens_in_messages: object,
    ) -> ChatOptions:
        """What a call asks for; see RequestOptions.of. Raises ConfigError."""
        given = {} if template_kwargs is None else template_kwargs
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ConfigError(
                f"chat_template_kwargs is {shown(given)}; give a dict of the names that the "
                "model's chat template reads, for instance {'enable_thinking': False}"
            )
        check_flag("continue_final_message", continue_final_message)
        check_flag("special_tokens_in_messages", special_tokens_in_messages)
        return cls(
            tools,
            MappingProxyType({**given}),
            bool(continue_final_message),
            bool(special_tokens_in_messages),
        )

    @property
    def needs_template(self) -> str | None:
        """What of this a chat template alone can do, in words; None: nothing."""
        if self.tools:
            return f"{len(self.tools)} tools are"
        if self.template_kwargs:
            return f"chat_template_kwargs {shown({**self.template_kwargs})} is"
        return "continue_final_message is" if self.continue_final_message else None


NO_OPTIONS = ChatOptions()

"""OpenEnd: a last message that the answer goes on with."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from photon_ext.errors import RequestError, shown
from photon_ext.models.text.chat_template import Message
from photon_ext.models.text.special_tokens import ChatText


class OpenEnd:
    """Marks the end of the last message, and cuts the text of the conversation there.

    Attributes:
        messages: for the template.
        added: characters of the mark.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        """Raises RequestError: the last message has no text."""
        last = messages[-1] if messages else None
        content = last.get("content") if isinstance(last, Mapping) else None
        if not isinstance(last, Mapping) or not isinstance(content, str):
            raise RequestError(
                f"continue_final_message goes on with the last message, whose content is "
                f"{shown(content)}; give a text"
            )
        # the blank tells whether the template takes blanks off the end of a message
        self._mark = f"end-{secrets.token_hex(16)} "
        self.added = len(self._mark)
        self.messages: list[Message] = [*messages[:-1], {**last, "content": content + self._mark}]

    def cut(self, chat: ChatText) -> ChatText:
        """What stands before the end. Raises RequestError: the template does not show it."""
        end = chat.text.rfind(self._mark.rstrip())
        if end < 0:
            raise RequestError(
                "the chat template does not show the last message, which continue_final_message "
                "goes on with; leave that out, or end with an assistant message"
            )
        if not chat.text.startswith(self._mark, end):
            end = len(chat.text[:end].rstrip())
        return chat.part(0, end)

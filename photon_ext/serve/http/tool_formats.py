"""How models write calls of tools, by name."""

from __future__ import annotations

import secrets
import string
from typing import NamedTuple

from photon_ext.models.text.tokenizer import Tokenizer

_LETTERS = string.ascii_letters + string.digits


class ToolFormat(NamedTuple):
    """
    Attributes:
        begins, ends: what stands around calls, each JSON of one call or of a list of them.
        bare: an answer may be such JSON and nothing else.
        named: a call may be its name and then the JSON of its arguments (Mistral's newer models).
        id_letters: of a call's id.
    """

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False
    named: bool = False
    id_letters: int = 24

    def call_id(self) -> str:
        if self.id_letters < 20:  # its template wants just these
            return "".join(secrets.choice(_LETTERS) for _ in range(self.id_letters))
        return "call_" + secrets.token_hex(self.id_letters // 2)

    def special_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Marks that are tokens: special ones have to stay in the text."""
        found = map(tokenizer.token_id, (*self.begins, *self.ends, *_WITHIN))
        return frozenset(token for token in found if token is not None)


_WITHIN = ("[ARGS]",)
FORCED = ToolFormat(bare=True)  # what the engine makes of a call that has to come
FORMATS = {
    "granite": ToolFormat(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    "hermes": ToolFormat(("<tool_call>",), ("</tool_call>",)),
    "llama3": ToolFormat(("<|python_tag|>",), bare=True),
    "mistral": ToolFormat(("[TOOL_CALLS]",), named=True, id_letters=9),
    "phi": ToolFormat(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
}


def format_of(tokenizer: Tokenizer) -> str | None:
    """The name of the format that a chat template speaks of; None: of none that is known."""
    template = tokenizer.chat_template
    if template is None or not template.reads("tools"):
        return None
    if template.mentions("[TOOL_CALLS]"):
        return "mistral"
    if template.mentions("<|tool|>"):
        return "phi"
    if template.mentions("<|tool_call|>"):
        return "granite"
    if template.mentions("<tool_call>"):
        return "hermes"
    return "llama3" if template.mentions("<|python_tag|>") else None

"""The stub model's tokens: 256 bytes, and special tokens behind them."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|python_tag|>",
)
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
IM_END = 257
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>'
THINKS = f"<think>\nhm\n</think>\n\nWait.\n{CALL}"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def special_backend() -> Backend:
    """Ids are the ranks of bytes in the byte-level alphabet; then special tokens, then marks."""
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in MARKS])
    return backend


_BACKEND = special_backend()


def ids_of(text: str) -> list[int]:
    """The tokens of a text; names of special tokens are these tokens."""
    ids: list[int] = _BACKEND.encode(text, add_special_tokens=False).ids
    return ids


def text_of(ids: list[int]) -> str:
    text: str = _BACKEND.decode(ids, skip_special_tokens=False)
    return text

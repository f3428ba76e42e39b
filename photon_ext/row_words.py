"""The device words of a row's parameters; see row_params and csrc/common/row_state.h."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from photon_ext.checks import INT32_MAX
from photon_ext.layout import ROW_COLUMNS, RowColumn
from photon_ext.row_params import FIELDS, Field, RowParams


def row_words(
    params: RowParams,
    generation: int,
    position: int = 0,
    answer_begin: int = 0,
    automaton: tuple[int, int] = (0, 0),
    lora_slot: int = 0,
) -> list[int]:
    """The row_state words of a row before its first step, which feeds the token at ``position``.
    Tokens that are staged from ``answer_begin`` on count as sampled. ``automaton``: where it
    begins, and its state. ``lora_slot``: its adapter's; 0: none.
    """
    params, words = params.settled(), [0] * ROW_COLUMNS
    words[RowColumn.POSITION] = position
    words[RowColumn.ALIVE] = 1
    words[RowColumn.GENERATION] = generation
    words[RowColumn.STOP_COUNT] = len(params.stop_token_ids)
    words[RowColumn.BIAS_COUNT] = len(params.logit_bias)
    words[RowColumn.ANSWER_BEGIN] = answer_begin
    if params.logprobs is not None:
        sign = -1 if params.logprobs_mode == "processed" else 1
        words[RowColumn.LOGPROBS] = sign * (1 + params.logprobs)
    words[RowColumn.AUTOMATON], words[RowColumn.AUTOMATON_STATE] = automaton
    words[RowColumn.LORA_SLOT] = lora_slot
    if params.min_tokens > 0:
        words[RowColumn.STOP_AFTER] = params.max_new_tokens - params.min_tokens + 1
    packed = _PACKED.unpack(_PACK.pack(*_VALUES(params)))
    for column, word in zip(_COLUMNS, packed, strict=True):
        words[column] = word
    return words


def bias_words(params: RowParams) -> list[int]:
    """The leading words of a row's biases: ids, each with the bits of its bias."""
    pairs = [word for pair in params.biases for word in pair]
    return list(
        struct.unpack(f"<{len(pairs)}i", struct.pack("<" + "if" * (len(pairs) // 2), *pairs))
    )


def prompt_bits(prompt_ids: Iterable[int], vocab: int) -> list[int]:
    """A row's prompt bits: one for each id of the vocabulary."""
    found = bytearray(4 * -(-vocab // 32))
    for token in set(prompt_ids):
        if token >= 0:  # not of an embedding
            found[token >> 3] |= 1 << (token & 7)
    return list(struct.unpack(f"<{len(found) // 4}i", found))


def _code(kind: Any, field: Field) -> str:
    """How `struct` packs a value: the bits of a float32, a flag (whose HOST_MASK is 1) or an
    integer of 32 bits, or one of 64 bits as its low and its high half.
    """
    if kind is float:
        return "f"
    return "i" if kind is bool or field.most <= INT32_MAX else "Q"


_KEPT = [
    (name, field.column, _code(kind, field))
    for name, (kind, field) in FIELDS.items()
    if field.column is not None
]
_VALUES = attrgetter(*(name for name, _, _ in _KEPT))
_PACK = struct.Struct("<" + "".join(code for _, _, code in _KEPT))
_PACKED = struct.Struct(f"<{_PACK.size // 4}i")
_COLUMNS = [
    column + i for _, column, code in _KEPT for i in range(struct.calcsize(f"<{code}") // 4)
]

"""The device words of a row's parameters; see row_params and csrc/common/row_state.h."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from photon_ext.checks import INT32_MAX
from photon_ext.layout import HOST_MASK, ROW_COLUMNS, RowColumn
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
        words[RowColumn.MUTED_UNTIL] = params.max_new_tokens - params.min_tokens + 1
    for name, (kind, field) in FIELDS.items():
        if field.column is not None:
            packed = _packed(getattr(params, name), kind, field)
            words[field.column : field.column + len(packed)] = packed
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


def _packed(value: Any, kind: Any, field: Field) -> tuple[int, ...]:
    """A value as int32 words: a flag, the bits of a float32, one integer, or an integer of 64
    bits as its low and its high half.
    """
    if kind is bool:
        return (HOST_MASK if value else 0,)
    if kind is float:
        return struct.unpack("<i", struct.pack("<f", value))
    if field.most <= INT32_MAX:
        return (value,)
    return struct.unpack("<ii", struct.pack("<Q", value))

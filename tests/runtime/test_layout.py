"""Every number of layout.py against the C++ headers, and the packed layouts against their own
bounds.
"""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from photon_ext import layout
from photon_ext.row_params import FIELDS, RowParams
from photon_ext.row_words import row_words
from tests.ops.tables import float_bits

COMMON = Path(__file__).parents[2] / "csrc" / "common"


def enums(header: str) -> dict[str, int]:
    """Every enumerator and constexpr int of a header."""
    text = re.sub(r"//[^\n]*", "", (COMMON / header).read_text())
    pairs = re.findall(r"\b(k[A-Z]\w*)\s*=\s*(-?\d+|INT32_MIN)\b", text)
    return {name: -(2**31) if value == "INT32_MIN" else int(value) for name, value in pairs}


def camel(member: str) -> str:
    return "".join(part.capitalize() for part in member.split("_"))


@pytest.mark.parametrize(
    ("header", "enum", "prefix"),
    [
        ("decode_meta.h", layout.Meta, "kMeta"),
        ("decode_meta.h", layout.SegmentFlag, "kSegment"),
        ("row_state.h", layout.RowColumn, "kRow"),
        ("decode_meta.h", layout.Count, "kCount"),
        ("out_record.h", layout.RecordFlag, "kRecord"),
    ],
)
def test_every_member_is_the_headers(header: str, enum: type[IntEnum], prefix: str) -> None:
    found = enums(header)
    for member in enum:
        assert found[prefix + camel(member.name)] == member.value, member


@pytest.mark.parametrize(
    ("header", "start", "end", "enum"),
    [
        ("decode_meta.h", "enum MetaColumn", "kMetaColumns", layout.Meta),
        ("decode_meta.h", "enum SegmentFlag", "}", layout.SegmentFlag),
        ("decode_meta.h", "enum Counts", "kCountsSize", layout.Count),
        ("row_state.h", "enum RowColumn", "kRowColumns", layout.RowColumn),
        ("row_state.h", "enum DeltaTable", "kDeltaTables", layout.DeltaTable),
        ("out_record.h", "enum RecordFlag", "}", layout.RecordFlag),
    ],
)
def test_no_member_of_the_header_is_missing(
    header: str, start: str, end: str, enum: type[IntEnum]
) -> None:
    text = re.sub(r"//[^\n]*", "", (COMMON / header).read_text())
    body = text[text.index(start) :]
    body = body[: body.index(end, len(start))]
    values = [int(value) for value in re.findall(r"=\s*(\d+)", body)]
    assert values == [member.value for member in enum]


def test_constants_are_the_headers() -> None:
    meta, rows, record = enums("decode_meta.h"), enums("row_state.h"), enums("out_record.h")
    assert meta["kMetaColumns"] == layout.META_COLUMNS
    assert meta["kSegmentColumns"] == layout.SEGMENT_COLUMNS
    assert meta["kCountsSize"] == layout.COUNTS_SIZE
    assert len(layout.Count) == layout.COUNTS_SIZE
    assert meta["kNoToken"] == layout.NO_TOKEN
    link = enums("lora.h")
    assert (link["kLinkColumns"], link["kLinkSpare"]) == (layout.LINK_COLUMNS, layout.LINK_SPARE)
    assert enums("embedding.h")["kFirstEmbed"] == layout.FIRST_EMBED
    assert rows["kRowColumns"] == layout.ROW_COLUMNS
    assert rows["kMaxTables"] == layout.MAX_TABLES
    assert rows["kDeltaHeader"] == layout.DELTA_HEADER
    assert rows["kDeltaRunWords"] == layout.DELTA_RUN_WORDS
    assert rows["kHostMask"] == layout.HOST_MASK
    assert rows["kDeltaTables"] == len(layout.DeltaTable)
    assert rows["kLeastTables"] == layout.LEAST_TABLES
    assert rows["kDeltaZeros"] == layout.DELTA_ZEROS
    assert rows["kTablePages"] == layout.DeltaTable.PAGES
    assert record["kRecordTokens"] == layout.RECORD_TOKENS
    assert record["kMaskKeyColumns"] == layout.MASK_KEY_COLUMNS
    assert layout.RECORD_WIDTH > layout.RECORD_TOKENS


def test_parameters_of_a_row_lie_in_the_columns_of_the_header() -> None:
    """Each parameter of the table has a column of its own, and its words are where csrc looks for
    them; nothing else is written but what every row has.
    """
    found = enums("row_state.h")
    least = {"max_new_tokens": 1, "temperature": 0.0, "seed": 0, "constrained": False}
    words = {
        "max_new_tokens": (2**31 - 1, {"kRowRemaining": 2**31 - 1}),
        "temperature": (1.5, {"kRowTemperature": float_bits(1.5)}),
        "seed": (2**64 - 2, {"kRowSeedLow": -2, "kRowSeedHigh": -1}),
        "constrained": (True, {"kRowConstraint": found["kHostMask"]}),
        "stop_token_ids": ((7, 8), {"kRowStopCount": 2}),
        "top_k": (40, {"kRowTopK": 40}),
        "top_p": (0.25, {"kRowTopP": float_bits(0.25)}),
        "min_tokens": (1, {"kRowStopAfter": 1}),
        "min_p": (0.5, {"kRowMinP": float_bits(0.5)}),
        "repetition_penalty": (2.0, {"kRowRepetitionPenalty": float_bits(2.0)}),
        "presence_penalty": (0.5, {"kRowPresencePenalty": float_bits(0.5)}),
        "frequency_penalty": (-1.0, {"kRowFrequencyPenalty": float_bits(-1.0)}),
        "logit_bias": ({5: 1.0, 2: -1.0}, {"kRowBiasCount": 2}),
        "logprobs": (4, {"kRowLogprobs": 5}),
        "logprobs_mode": ("processed", {}),  # with logprobs alone
        "prompt_logprobs": (4, {}),  # the host's alone
        "object_values": (3, {"kRowObjectValues": 3}),
    }
    assert set(words) == set(FIELDS)
    base = row_words(RowParams(**least), 0)
    always = {"kRowRemaining": 1, "kRowAlive": 1}
    always |= dict.fromkeys(("kRowTopP", "kRowRepetitionPenalty"), float_bits(1.0))
    assert base == [
        next((word for name, word in always.items() if found[name] == column), 0)
        for column in range(found["kRowColumns"])
    ]
    for name, (value, expected) in words.items():
        changed = row_words(RowParams(**{**least, name: value}), 0)
        differ = {i: word for i, word in enumerate(changed) if word != base[i]}
        assert differ == {found[column]: word for column, word in expected.items()}, name


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 256])
def test_parts_of_the_step_input_do_not_overlap(num_tokens: int) -> None:
    inputs = layout.InputLayout(max_segments=3, max_step_tokens=num_tokens, delta_words=17)
    assert inputs.staged_offset == 3 * layout.SEGMENT_COLUMNS
    assert inputs.delta_offset >= inputs.staged_offset + num_tokens
    assert inputs.delta_offset % 4 == 0
    assert inputs.words == inputs.delta_offset + 17


def test_log_probabilities_lie_behind_the_records() -> None:
    outputs, record = layout.OutputLayout(5, max_step_tokens=9), enums("out_record.h")
    assert outputs.words(4, logprobs=False) == 4 * layout.RECORD_WIDTH
    assert outputs.words(4, logprobs=True) == outputs.logprob_offset + 4 * layout.LOGPROB_WIDTH
    assert outputs.logprob_offset == 5 * layout.RECORD_WIDTH
    scored = outputs.words(4, logprobs=False, scored=9)
    assert scored == outputs.words(4, logprobs=True) + 9 * layout.LOGPROB_WIDTH
    assert outputs.capacity == outputs.words(5, logprobs=True, scored=9)
    assert record["kMostLogprobs"] == layout.MOST_LOGPROBS


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (32, 1), (33, 2), (49152, 1536)])
def test_mask_rows_cover_the_vocabulary(vocab: int, words: int) -> None:
    masks = layout.MaskLayout(max_segments=5, vocab_size=vocab)
    assert masks.row_words == words
    assert masks.words(4, 0) == masks.mask_offset(4) == 4 * layout.MASK_KEY_COLUMNS
    assert masks.words(4, 2) == masks.mask_offset(4) + 2 * words
    assert masks.capacity == masks.words(5, 5)

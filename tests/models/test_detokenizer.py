"""Streaming text: the pieces join to the whole, and no piece holds half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from photon_ext.models.text.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character beyond ASCII is cut; id 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, {}, None, "test")


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's decoder.

    Blanks as a mark, bytes as tokens, and the first blank of a text dropped.
    """
    symbols = ["<s>", "▁", "a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE({symbol: index for index, symbol in enumerate(symbols)}, [], byte_fallback=True)
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, {}, None, "test")


BYTES, PIECES = byte_tokenizer(), sentencepiece_tokenizer()


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@given(text=st.text())
def test_characters_come_whole(text: str) -> None:
    pieces = stream(BYTES, BYTES.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes_join_to_what_decoding_at_once_gives(ids: list[int]) -> None:
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)


@given(
    parts=st.lists(
        st.one_of(st.integers(0, 4), st.characters(exclude_categories=["Cs"])), max_size=20
    )
)
def test_decoders_that_treat_the_first_token_differently(parts: list[int | str]) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [5 + byte for byte in part.encode()]
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids)


def test_a_character_is_given_with_its_last_byte() -> None:
    assert stream(BYTES, BYTES.encode("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


def test_what_never_became_a_character_is_flushed() -> None:
    ids = BYTES.encode("a🙂")[:-1]
    assert stream(BYTES, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_give_no_text() -> None:
    assert stream(BYTES, [*BYTES.encode("é")[:1], 256, *BYTES.encode("é")[1:]]) == ["", "", "é", ""]


class CountedStream:
    """The library's stream: it keeps what it is given until a character is whole."""

    def __init__(self, ids: Sequence[int] = (), skip_special_tokens: bool = False) -> None:
        self._stream = DecodeStream(ids, skip_special_tokens)
        self.most = self._kept = 0

    def step(self, backend: Backend, token: int) -> str | None:
        piece: str | None = self._stream.step(backend, token)
        self._kept = 0 if piece is not None else self._kept + 1
        self.most = max(self.most, self._kept)
        return piece


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[CountedStream]:
    made: list[CountedStream] = []

    def make(*args: Any, **options: Any) -> CountedStream:
        made.append(CountedStream(*args, **options))
        return made[-1]

    monkeypatch.setattr("photon_ext.models.text.detokenizer.DecodeStream", make)
    return made


@pytest.mark.parametrize("token", [256, 400], ids=["special", "unknown"])
def test_tokens_without_a_text_do_not_pile_up(token: int, streams: list[CountedStream]) -> None:
    """A request that ignores the end token may give thousands of them.

    Each made the next one slower, and others waited.
    """
    pieces = stream(BYTES, [*BYTES.encode("a"), *[token] * 300, *BYTES.encode("b")])
    assert "".join(pieces) == "ab"
    assert [each.most for each in streams[:1]] == [0]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte tokens"])
def test_bytes_that_are_no_text_do_not_pile_up(
    tokenizer: Tokenizer, streams: list[CountedStream]
) -> None:
    """A model that is lost may repeat such a byte for ever.

    What is held stays short, and it shows.
    """
    (bad,) = (
        tokenizer.token_id(symbol)
        for symbol in ("ÿ", "<0xFF>")
        if tokenizer.token_id(symbol) is not None
    )
    a = tokenizer.token_id("a")
    assert bad is not None
    assert a is not None
    pieces = stream(tokenizer, [a, *[bad] * 1000, a])
    assert "".join(pieces) == tokenizer.decode([a, *[bad] * 1000, a]) == "a" + "\ufffd" * 1000 + "a"
    assert max(each.most for each in streams) == 64
    assert max(map(len, pieces)) <= 64


@given(ids=st.lists(st.integers(0, 260), max_size=40))
def test_any_byte_tokens_stream_and_only_what_is_no_text_may_differ(ids: list[int]) -> None:
    text, whole = "".join(stream(PIECES, ids)), PIECES.decode(ids)
    assert text == whole or "\ufffd" in whole


def test_the_beginning_of_a_run_that_is_no_text_is_kept() -> None:
    ids = [PIECES.token_id(token) for token in ("<0x41>", "<0xFF>", "c", "▁b")]
    assert stream(PIECES, ids) == ["A", "", "\ufffdc", " b", ""]
    assert PIECES.decode(ids) == "\ufffd\ufffdc b"


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    detokenizer = BYTES.detokenizer(skip_special_tokens=False)
    assert [detokenizer.push(token) for token in [*BYTES.encode("a"), 256, 400]] == [
        "a",
        "<end>",
        "",
    ]

"""Streaming text: the pieces join to the whole, and no piece holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from photon_ext.models.detokenizer import Detokenizer
from photon_ext.models.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character beyond ASCII is cut; id 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, {}, None, "test")


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's decoder: blanks as a mark, bytes as tokens, and the first blank of a text
    dropped.
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


@pytest.mark.parametrize("count", [50, 500])
def test_a_long_text_decodes_a_short_window(count: int) -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return BYTES.decode(ids)

    detokenizer = Detokenizer(decode)  # type: ignore[arg-type]
    for token in BYTES.encode("long text " * (count // 10)):
        detokenizer.push(token)
    assert max(seen) == 2


@pytest.mark.parametrize("token", [256, 400], ids=["special", "unknown"])
def test_tokens_without_a_text_are_decoded_once_at_most(
    token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that ignores the end token may give thousands of them; each made the next one
    slower, and others waited.
    """
    seen: list[int] = []
    tokenizer = byte_tokenizer()
    decode = tokenizer.decode

    def counted(ids: list[int], skip_special_tokens: bool = True) -> str:
        seen.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    pieces = stream(tokenizer, [*BYTES.encode("a"), *[token] * 300, *BYTES.encode("b")])
    assert "".join(pieces) == "ab"
    assert max(seen) <= 2


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    detokenizer = BYTES.detokenizer(skip_special_tokens=False)
    assert [detokenizer.push(token) for token in [*BYTES.encode("a"), 256, 400]] == [
        "a",
        "<end>",
        "",
    ]

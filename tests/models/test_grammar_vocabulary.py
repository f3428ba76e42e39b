"""The vocabulary that grammars are compiled against: the bytes of every token."""

from __future__ import annotations

import sys

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from photon_ext.errors import ConfigError, RequestError
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.models.text.grammar_vocabulary import grammar_vocabulary
from photon_ext.models.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer

NO_TEXT = b"\xff"  # is in no UTF-8: the library never allows this byte


def letters_of_bytes() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print are themselves, the others follow from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def allowed(vocabulary: LLTokenizer, regex: str, num_ids: int) -> set[int]:
    mask = int.from_bytes(
        LLMatcher(vocabulary, LLMatcher.grammar_from_regex(regex)).compute_bitmask(), "little"
    )
    return {token for token in range(num_ids) if mask >> token & 1}


def test_every_token_of_smollm2_has_its_bytes(smollm2: LoadedModel) -> None:
    tokenizer, alphabet = smollm2.tokenizer, letters_of_bytes()
    assert tokenizer is not None
    vocabulary = grammar_vocabulary(tokenizer, smollm2.config.vocab, smollm2.config.eos_ids)
    assert vocabulary.vocab_size == smollm2.config.vocab == 49152
    special = [token for token in range(49152) if vocabulary.is_special_token(token)]
    assert tokenizer.decode(special) == ""
    assert {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")} <= {*special}
    texts = {token: tokenizer._backend.id_to_token(token) for token in range(49152)}
    wrong = [
        token
        for token, text in texts.items()
        if token not in special
        and vocabulary.decode_bytes([token]) != bytes(alphabet[letter] for letter in text)
    ]
    assert wrong == []
    assert vocabulary.eos_tokens == list(smollm2.config.eos_ids)


def test_every_token_of_the_byte_tokenizer_has_its_byte() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = grammar_vocabulary(byte_tokenizer(), VOCAB, [0])
    bytes_of = letters_of_bytes()
    expected = [bytes([bytes_of[letter]]) for letter in alphabet[1:]]
    found = [vocabulary.decode_bytes([token]) for token in range(1, VOCAB)]
    assert [byte or NO_TEXT for byte in found] == expected


def test_tokens_of_sentencepiece_have_their_bytes() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "é"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"}, None, "pieces")
    vocabulary = grammar_vocabulary(tokenizer, len(pieces), [2])
    found = [vocabulary.decode_bytes([token]) for token in range(3, len(pieces))]
    expected = [*(bytes([byte]) for byte in range(256)), b" a", b"b", "é".encode()]
    assert [text or NO_TEXT for text in found] == expected


def test_ids_without_a_token_are_never_allowed() -> None:
    vocabulary = grammar_vocabulary(byte_tokenizer(), 300, [7, 290])
    assert vocabulary.vocab_size == 300
    assert vocabulary.eos_tokens == [7]  # 290 is no token
    any_text = allowed(vocabulary, r"[\s\S]*", 300)
    assert max(any_text) < VOCAB
    assert len(any_text) > 170  # first bytes of UTF-8, and the end


def test_a_tokenizer_with_more_tokens_than_the_model_keeps_them_all() -> None:
    assert grammar_vocabulary(byte_tokenizer(), 100, [7]).vocab_size == VOCAB


def test_a_tokenizer_of_words_is_refused() -> None:
    backend = Backend(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0"))
    tokenizer = Tokenizer(backend, {}, None, "words.json")
    with pytest.raises(RequestError, match=r"^words.json: no tokenizer whose tokens are known byt"):
        grammar_vocabulary(tokenizer, 2, [1])


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^this model has no end token, .*; give eos_ids to"):
        grammar_vocabulary(byte_tokenizer(), VOCAB, [])


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"llguidance .*; pip install llguidance"):
        grammar_vocabulary(byte_tokenizer(), VOCAB, [0])

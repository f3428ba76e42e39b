"""A tokenizer's vocabulary as llguidance wants it: the bytes of each token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from photon_ext.errors import ConfigError, RequestError
from photon_ext.models.text.tokenizer_file import library_errors

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from photon_ext.models.text.tokenizer import Tokenizer


def grammar_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]
) -> LLTokenizer:
    """The vocabulary, once per engine: it takes about 0.3 s for 50,000 tokens, during which no
    other Python code runs.

    Args:
        vocab_size: width of the logits; ids without a token are never allowed.
        eos_ids: the tokens that are allowed where an answer may end.

    Raises:
        ConfigError: the package llguidance is missing, or cannot be loaded.
        RequestError: the model has no end token, or a tokenizer that the library cannot read.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ConfigError(
            f"json_schema, regex, choice and grammar need the package llguidance ({error}); "
            "pip install llguidance"
        ) from error
    ends = [token for token in dict.fromkeys(eos_ids) if token < tokenizer.vocab_size]
    if not ends:
        raise RequestError(
            "this model has no end token, by which an answer ends where its grammar allows more; "
            "give eos_ids to the engine, or a constraint of your own"
        )
    with library_errors(RequestError, _told(tokenizer)):
        try:
            text = _without_names(tokenizer.to_json())
            return LLTokenizer(text, n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=ends)
        except ValueError as error:
            raise RequestError(f"{_told(tokenizer)} ({error})") from error


def _without_names(text: str) -> str:
    """The tokenizer with special tokens of names that no text holds. The library tokenizes text
    that an answer must have: a constant "<|im_end|>" would become the token that ends it.
    """
    found: dict[str, Any] = json.loads(text)
    secret, model = secrets.token_hex(16), found["model"]
    special = [token for token in found["added_tokens"] if token["special"]]
    names = {token["content"]: f"{secret}:{token['id']}" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): i for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(found)


def _told(tokenizer: Tokenizer) -> str:
    return (
        f"{tokenizer.source}: no tokenizer whose tokens are known bytes (byte-level BPE, or "
        "SentencePiece with byte tokens); give a constraint of your own"
    )

"""A tokenizer of 256 byte tokens, built in code."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from photon_ext.models.text.tokenizer import Tokenizer

VOCAB = 256


def byte_tokenizer(template: str | None = None) -> Tokenizer:
    """Token ids are the ranks of the bytes in the byte-level alphabet; there are no special
    tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, template, "the byte tokenizer")

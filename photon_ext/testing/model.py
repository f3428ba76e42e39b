"""A toy language model whose next token depends on every token before it, and an oracle that
needs no pipeline.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import torch

from photon_ext import ops
from photon_ext.layout import DeltaTable, RowColumn, SegmentFlag
from photon_ext.row_params import RowParams
from photon_ext.row_words import bias_words, prompt_bits, row_words

Allowed = Callable[[tuple[int, ...]], Collection[int]]
"""A constraint: the ids allowed after the tokens generated so far."""


class Request:
    """What is asked of a row.

    Attributes:
        prompt_ids: the prompt.
        params: what the row is run with; the seed is 0 unless another is given.
        allowed: a constraint that the host evaluates; None is unconstrained.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        allowed: Allowed | None = None,
        **params: Any,
    ) -> None:
        """`params`: other fields of RowParams."""
        self.prompt_ids = tuple(prompt_ids)
        self.allowed = allowed
        own = {"seed": 0, "constrained": allowed is not None, **params}
        self.params = RowParams(max_new_tokens, **own)

    def __repr__(self) -> str:
        return f"Request({self.prompt_ids}, {self.params}, {self.allowed})"


class ToyModel:
    """Logits are a hash of all tokens before: one wrong, stale or missing entry changes what
    follows.

    Args:
        vocab_size: width of the logits.
        seed: another seed is another model.
        decode_mark: added to what decode steps keep of a token, so that keys and values that
            chunks and decode steps compute differ, as they do on a GPU.
        adapter: added to every token that is kept: the model with that adapter.
    """

    def __init__(
        self, vocab_size: int = 32, seed: int = 0, decode_mark: int = 0, adapter: int = 0
    ) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.decode_mark = decode_mark
        self.adapter = adapter

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Next-token logits in [0, 16), exact in float32, after ``tokens``."""
        return list(hashed_logits(tokens, self.vocab_size, self.seed))

    def generate(self, request: Request) -> tuple[int, ...]:
        """The tokens that a correct engine returns for ``request``, whatever rides beside it."""
        context = [token + self.adapter for token in request.prompt_ids]
        tokens: list[int] = []
        sampler = _Sampler(request, self.vocab_size)
        while len(tokens) < request.params.max_new_tokens:
            sampler.logits[0] = torch.frombuffer(
                hashed_logits(context, self.vocab_size, self.seed), dtype=torch.float32
            )
            if request.allowed is not None:
                sampler.allow(request.allowed(tuple(tokens)))
            token = sampler.sample(len(context) - 1, len(tokens))
            if token < 0:
                break
            tokens.append(token)
            context.append(token + self.decode_mark + self.adapter)
            sampler.count(token)
            if token in request.params.stop_token_ids:
                break
        return tuple(tokens)


class _Sampler:
    """Samples for one row by the op that steps sample with."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.logits = torch.zeros(1, vocab_size)
        params = request.params
        self._segments = torch.tensor([[1, 0, 1, SegmentFlag.SAMPLE]], dtype=torch.int32)
        self._sampled = torch.zeros(1, dtype=torch.int32)
        self._cap = params.max_new_tokens
        words: tuple[Sequence[int], ...] = (
            row_words(params, 1),
            (),
            params.stop_token_ids,
            bias_words(params),
            [0] * vocab_size,
            prompt_bits(request.prompt_ids, vocab_size),
        )
        self._tables = [torch.tensor([own, own], dtype=torch.int32) for own in words]
        self._rows, self._counts = self._tables[0], self._tables[DeltaTable.TOKEN_COUNTS]
        self._seen = list(request.prompt_ids)

    def allow(self, ids: Collection[int]) -> None:
        """Leaves only ``ids``."""
        forbidden = torch.ones(self.logits.shape[1], dtype=torch.bool)
        forbidden[list(ids)] = False
        self.logits[0, forbidden] = float("-inf")

    def sample(self, position: int, generated: int) -> int:
        """The id that follows ``position``, with so many tokens of the answer before; negative
        where no id is a candidate.
        """
        self._rows[1, RowColumn.POSITION] = position
        self._rows[1, RowColumn.REMAINING] = self._cap - generated
        ops.sample_into(self._sampled, self.logits, self._segments, self._rows, tables=self._tables)
        return int(self._sampled.item())

    def count(self, token: int) -> None:
        """The answer has one more token."""
        self._counts[1, token] += 1
        self._seen.append(token)
        bits = prompt_bits(self._seen, self._counts.shape[1])
        self._tables[DeltaTable.SEEN_BITS][1] = torch.tensor(bits, dtype=torch.int32)


def hashed_logits(tokens: Sequence[int], vocab_size: int, seed: int) -> array[float]:
    """The float32 logits of the toy model after ``tokens``; shared, so nobody may write them."""
    return _logits_of(zlib.crc32(array("i", tokens).tobytes(), seed), vocab_size)


@lru_cache(maxsize=1024)
def _logits_of(prefix: int, vocab_size: int) -> array[float]:
    return array("f", (_mix(prefix * 0x10001 + token) / 4096.0 for token in range(vocab_size)))


def _mix(value: int) -> int:
    """16 well-mixed bits of ``value``.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 48

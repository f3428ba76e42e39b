"""A toy language model whose next token depends on every token before it, and an oracle that
needs no pipeline.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from photon_ext import ops
from photon_ext.layout import ROW_COLUMNS, RowColumn, SegmentFlag
from photon_ext.runtime.admission import Admission
from photon_ext.runtime.row import initial_state

Allowed = Callable[[tuple[int, ...]], Collection[int]]
"""A constraint: the ids allowed after the tokens generated so far."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a row.

    Attributes:
        prompt_ids: the prompt.
        max_new_tokens: cap on sampled tokens.
        stop_ids: ids that end the sequence.
        temperature: 0 is greedy.
        seed: of the noise.
        allowed: a constraint that the host evaluates; None is unconstrained.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    allowed: Allowed | None = None


class ToyModel:
    """Logits are a hash of all tokens before: one wrong, stale or missing entry changes what
    follows.

    Args:
        vocab_size: width of the logits.
        seed: another seed is another model.
    """

    def __init__(self, vocab_size: int = 32, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Next-token logits in [0, 16), exact in float32, after ``tokens``."""
        return list(hashed_logits(tokens, self.vocab_size, self.seed))

    def generate(self, request: Request) -> tuple[int, ...]:
        """The tokens that a correct engine returns for ``request``, whatever rides beside it."""
        context = list(request.prompt_ids)
        tokens: list[int] = []
        sampler = _Sampler(request, self.vocab_size)
        while len(tokens) < request.max_new_tokens:
            sampler.logits[0] = torch.frombuffer(
                hashed_logits(context, self.vocab_size, self.seed), dtype=torch.float32
            )
            if request.allowed is not None:
                sampler.allow(request.allowed(tuple(tokens)))
            token = sampler.sample(len(context) - 1)
            if token < 0:
                break
            tokens.append(token)
            context.append(token)
            if token in request.stop_ids:
                break
        return tuple(tokens)


class _Sampler:
    """Samples for one row by the op that steps sample with."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        admission = Admission(
            request.prompt_ids,
            request.max_new_tokens,
            (),
            request.temperature,
            request.seed,
            False,
            None,
        )
        self.logits = torch.zeros(1, vocab_size)
        self._rows = torch.zeros(2, ROW_COLUMNS, dtype=torch.int32)
        self._rows[1] = torch.tensor(initial_state(1, admission), dtype=torch.int32)
        self._segments = torch.tensor([[1, 0, 1, SegmentFlag.SAMPLE]], dtype=torch.int32)
        self._sampled = torch.zeros(1, dtype=torch.int32)

    def allow(self, ids: Collection[int]) -> None:
        """Leaves only ``ids``."""
        forbidden = torch.ones(self.logits.shape[1], dtype=torch.bool)
        forbidden[list(ids)] = False
        self.logits[0, forbidden] = float("-inf")

    def sample(self, position: int) -> int:
        """The id that follows ``position``; negative where no id is a candidate."""
        self._rows[1, RowColumn.POSITION] = position
        ops.sample_into(self._sampled, self.logits, self._segments, self._rows)
        return int(self._sampled.item())


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

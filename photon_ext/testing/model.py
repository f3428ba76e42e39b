"""A toy language model whose next token depends on every token before it, and an oracle that
needs no pipeline.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from photon_ext.testing.noise import gumbel

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
    """Logits are a hash of all tokens in the row's KV pages: one wrong, stale or missing entry
    changes what follows.

    Args:
        vocab_size: width of the logits.
        seed: another seed is another model.
    """

    def __init__(self, vocab_size: int = 32, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._seed = seed

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Next-token logits in [0, 16), exact in float32, after ``tokens``."""
        return list(
            _hashed_logits(zlib.crc32(array("i", tokens).tobytes(), self._seed), self.vocab_size)
        )

    def generate(self, request: Request) -> tuple[int, ...]:
        """The tokens that a correct engine returns for ``request``, whatever rides beside it."""
        context = list(request.prompt_ids)
        tokens: list[int] = []
        while len(tokens) < request.max_new_tokens:
            logits = self.logits(context)
            if request.allowed is not None:
                allowed = request.allowed(tuple(tokens))
                logits = [
                    value if token in allowed else -math.inf for token, value in enumerate(logits)
                ]
            token = pick(
                logits, request.temperature, request.seed, request.seed >> 32, len(context) - 1
            )
            if token < 0:
                break
            tokens.append(token)
            context.append(token)
            if token in request.stop_ids:
                break
        return tuple(tokens)


def pick(
    logits: Sequence[float], temperature: float, seed_low: int, seed_high: int, position: int
) -> int:
    """The sampled id, as ``sample_into`` defines it; -1 where no token has a candidate logit.

    Greedy where ``temperature`` is 0, with ties to the lowest id; otherwise Gumbel-max. NaN and
    -inf are never candidates.
    """
    best, best_value = -1, -math.inf
    for token, value in enumerate(logits):
        if math.isnan(value) or value == -math.inf:
            continue
        if temperature > 0:
            value = value / temperature + gumbel(seed_low, seed_high, position, token)
        if best < 0 or value > best_value:
            best, best_value = token, value
    return best


@lru_cache(maxsize=1024)
def _hashed_logits(prefix: int, vocab_size: int) -> tuple[float, ...]:
    return tuple(_mix(prefix * 0x10001 + token) / 4096.0 for token in range(vocab_size))


def _mix(value: int) -> int:
    """16 well-mixed bits of ``value``.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 48

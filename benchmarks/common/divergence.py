"""How far the logits of one model are from those of another, and how well they foretell a text.

All in float64, some rows at a time; a logit of -inf is a token that never comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common.result import BenchmarkError

ROWS = 64


def divergence(reference: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """`kl`: mean and 99th percentile over the rows of [tokens, vocab] of the Kullback-Leibler
    divergence, in nats: sum over the vocabulary of p * (log p - log q), p of the reference and q of
    what was found. `top1`: share of rows in which both have the same likeliest token.
    """
    if reference.shape != found.shape:
        raise BenchmarkError(
            f"logits of {list(reference.shape)} and {list(found.shape)} are not of the same text "
            "and vocabulary"
        )
    values, same = [], 0
    for expected, logits in zip(reference.split(ROWS), found.split(ROWS), strict=True):
        log_p, log_q = (each.double().log_softmax(-1) for each in (expected, logits))
        p = log_p.exp()
        values.append(torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1))
        same += int((expected.argmax(-1) == logits.argmax(-1)).sum())
    kl = torch.cat(values)
    if bool(kl.isnan().any()):
        raise BenchmarkError(f"logits at token {int(kl.isnan().nonzero()[0])} are not numbers")
    spread = {"mean": float(kl.mean()), "p99": float(kl.quantile(0.99))}
    return {"kl": spread, "top1": same / len(reference)}


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    """exp of the mean of -log p over the tokens of a text from the second on, each foretold by the
    logits [tokens, vocab] of those before it.
    """
    total = sum(float(part.sum()) for part in _log_likelihoods(logits[:-1], ids[1:]))
    return math.exp(-total / (len(ids) - 1))


def _log_likelihoods(logits: torch.Tensor, ids: list[int]) -> Iterator[torch.Tensor]:
    following = torch.tensor(ids, device=logits.device).unsqueeze(-1)
    for part, tokens in zip(logits.split(ROWS), following.split(ROWS), strict=True):
        yield part.double().log_softmax(-1).gather(-1, tokens)

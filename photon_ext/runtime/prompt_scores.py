"""Log-probabilities of a prompt's own tokens, in a step that runs eagerly."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from photon_ext import ops
from photon_ext.layout import MOST_LOGPROBS, NO_TOKEN, ROW_COLUMNS, RowColumn, SegmentFlag

BEYOND_ANY_LOGIT = struct.unpack("<i", struct.pack("<f", 1e30))[0]


class PromptScores:
    """Takes logits of a step's chunk tokens, and writes what they say of the tokens that follow.

    It needs no kernel of its own: each token gets a row of scratch tables, whose bias has the
    prompt's next token sampled; log-probabilities are of the logits without biases.
    """

    def __init__(
        self,
        out: torch.Tensor,
        first: int,
        targets: Sequence[int],
        hopper: bool,
    ) -> None:
        """``out``: int32 [T, LOGPROB_WIDTH], of the chunk tokens, which begin with token ``first``
        of the step. ``targets``: the id that follows each; negative: nothing is wanted of it. Waits
        until the tables are on the device of ``out``.
        """
        self._out, self._first, self._hopper = out, first, hopper
        ids = torch.tensor([NO_TOKEN, *targets], dtype=torch.int32)
        state = torch.zeros(len(ids), ROW_COLUMNS, dtype=torch.int32)
        state[:, RowColumn.ALIVE] = ids >= 0
        state[:, RowColumn.BIAS_COUNT] = 1
        state[:, RowColumn.LOGPROBS] = 1 + MOST_LOGPROBS
        biases = torch.stack([ids, torch.full_like(ids, BEYOND_ANY_LOGIT)], dim=1)
        segments = torch.tensor([[row, 0, 1, int(SegmentFlag.SAMPLE)] for row in range(len(ids))])
        none = torch.zeros(len(ids), 0, dtype=torch.int32)
        self._tables = [table.to(out.device) for table in (state, none, none, biases)]
        self._segments = segments[1:].int().to(out.device)
        self._sampled = torch.zeros(len(targets), dtype=torch.int32, device=out.device)

    def __call__(self, logits: torch.Tensor, token: int) -> None:
        """``logits``: [n, vocab], of the step's tokens from ``token`` on."""
        part = slice(token - self._first, token - self._first + len(logits))
        ops.sample_into(
            self._sampled[part],
            logits,
            self._segments[part],
            self._tables[0],
            None,
            self._hopper,
            self._tables,
            self._out[part],
        )

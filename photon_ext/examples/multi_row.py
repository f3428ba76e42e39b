"""Several rows: a forward of your own in plain PyTorch, over a key-value cache of its own.

python -m photon_ext.examples.multi_row --device cuda

A step has tokens, each with its id, position, length and row, and segments: the tokens of one row
that follow each other. A decode row has one token, a part of a prompt has many, and one step may
hold segments of several rows. Rows are numbered from 1 to max_rows, and padding is row 0, so a
cache that is indexed by row has max_rows + 1 rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch

from photon_ext import Pipeline, RowParams, Runtime
from photon_ext.runtime import StepTensors

VOCAB, WIDTH, HEADS, MAX_LEN = 96, 64, 4, 256
PROMPTS = ([3, 5, 7], [11], [13, 17, 19, 23, 29, 31], [2, 4, 6, 8])


class Model:
    """One layer of attention, random weights, and the keys and values of all rows.

    Args:
        max_rows: rows that can live at once.
        device: where it runs.
    """

    def __init__(self, max_rows: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator).to(device)
            return drawn / math.sqrt(columns)

        self.embedding, self.positions = 8 * weight(VOCAB, WIDTH), 4 * weight(MAX_LEN, WIDTH)
        self.qkv, self.head = weight(3 * WIDTH, WIDTH), weight(VOCAB, WIDTH)
        size = (max_rows + 1, MAX_LEN, HEADS, WIDTH // HEADS)  # row 0 is padding's
        self.keys = torch.zeros(size, device=device)
        self.values = torch.zeros(size, device=device)
        self.slots = torch.arange(MAX_LEN, device=device)

    def forward(self, step: StepTensors) -> None:
        """Assigns the step's logits [R, VOCAB]. Shapes are fixed and nothing is read by the host,
        so that a step can be captured in a graph.
        """
        token, position, length, row = step.decode_meta.long().unbind(1)  # each [T]
        x = self.embedding[token] + self.positions[position]
        q, k, v = (x @ self.qkv.T).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)  # [T, heads, 16]
        self.keys[row, position] = k  # of dead and padding tokens: to row 0
        self.values[row, position] = v
        # the tokens of a row that are there by now, in this step's own prompt part, too; a dead
        # token has length 0 and sees one slot, so that nothing becomes NaN
        seen = self.slots < length.clamp(min=1)[:, None]  # [T, MAX_LEN]
        scores = torch.einsum("thd,tlhd->thl", q, self.keys[row]) * (WIDTH // HEADS) ** -0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        x = x + torch.einsum("thl,tlhd->thd", weights, self.values[row]).reshape(-1, WIDTH)
        first, count = step.segments[:, 1].long(), step.segments[:, 2].long()
        last = (first + count - 1).clamp(min=0)  # of padding segments: any token
        step.logits = x[last] @ self.head.T


@torch.inference_mode()
def decode(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, max_rows: int, device: str
) -> list[list[int]]:
    """Greedy tokens of each prompt, up to `max_rows` of them at once."""
    model = Model(max_rows, device)
    runtime = Runtime(max_rows=max_rows, max_len=MAX_LEN, depth=2, device=device)
    pipeline = Pipeline(
        runtime, model.forward, vocab_size=VOCAB, chunk=4, graph=runtime.device.type == "cuda"
    )
    params = RowParams(max_new_tokens=max_new_tokens)
    waiting = list(enumerate(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    prompt_of = {}  # by row
    while waiting or pipeline.busy:
        while waiting and len(pipeline.rows) < max_rows:
            index, prompt = waiting.pop(0)
            prompt_of[pipeline.admit(prompt, params)] = index
        for event in pipeline.tick():
            tokens[prompt_of[event.row]] += event.tokens
    return tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Decodes four prompts, three at a time, and each alone."""
    parser = argparse.ArgumentParser(description="A forward of several rows.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=12)
    options = parser.parse_args(argv)

    together = decode(PROMPTS, options.new_tokens, 3, options.device)
    alone = [decode([prompt], options.new_tokens, 1, options.device)[0] for prompt in PROMPTS]
    for tokens in together:
        print(*tokens)
    print("each alone gives the same:", together == alone)


if __name__ == "__main__":
    main()

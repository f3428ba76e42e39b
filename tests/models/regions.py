"""Region heads of random weights for the tiny models, and what plain PyTorch makes of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from photon_ext.models.region import RegionConfig, RegionHeads

BINS = 32


def random_heads(hidden: int, seed: int = 0) -> RegionHeads:
    """Small, and with embeddings large enough to change what follows."""
    torch.manual_seed(seed)
    config = RegionConfig(hidden, BINS, coordinate_features=8, size_features=12)
    heads = RegionHeads(config)
    for encoder in (heads.coord_encoder, heads.size_encoder):
        encoder.weight.mul_(2)
    return heads


def fourier(values: list[float], frequencies: Tensor) -> Tensor:
    angle = 2 * math.pi * torch.tensor(values) @ frequencies
    return torch.cat([angle.cos(), angle.sin()])


def encoded(heads: RegionHeads, value: int) -> Tensor:
    """The embedding of a value, by its place behind the vocabulary."""
    if value < BINS:
        return heads.coord_encoder(fourier([value / BINS], heads.coord_features))
    sides = [2.0 ** (10 * side / (BINS - 1) - 10) for side in divmod(value - BINS, BINS)]
    return heads.size_encoder(fourier(sides, heads.size_features))


@torch.no_grad()
def spatial_tokens(
    model: PreTrainedModel,
    heads: RegionHeads,
    embeds: Tensor,
    count: int,
    most: int,
    stops: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """The tokens of an answer of objects of `count` values to a prompt [1, n, hidden], and what the
    text head said where each object, or the end, began.
    """
    vocab = model.config.vocab_size
    tokens: list[int] = []
    said: list[int] = []
    while len(tokens) < count * most:
        hidden: Any = model.model(inputs_embeds=embeds).last_hidden_state[0, -1]
        place = len(tokens) % count
        if place == 0:
            said.append(int(model.lm_head(hidden).argmax()))
            if said[-1] in stops:
                return [*tokens, said[-1]], said
        if place < 2:
            value = int(heads.coord_decoder(hidden).argmax())
        else:
            w, h = heads.size_decoder(hidden).view(2, BINS).argmax(dim=1).tolist()
            value = BINS + w * BINS + h
        tokens.append(vocab + value)
        embeds = torch.cat([embeds, encoded(heads, value)[None, None]], dim=1)
    return tokens, said

"""What the stages of the plain loop share: weights, rotary tables, and the two pieces of a layer
that no stage changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights


@dataclass(frozen=True)
class Model:
    """A Llama or Qwen3 decoder without biases. H hidden, D head_dim; `cos` and `sin` are float32
    [positions, D]."""

    config: ModelConfig
    weights: DecoderWeights
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm over the last dimension; as it is where there is no weight (q and k of
        Llama)."""
        return x if weight is None else F.rms_norm(x, weight.shape, weight, self.config.rms_eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D] with each token's angles [T, D] (Su et al., "RoFormer");
    pairs are i and i + D / 2."""
    low, high = x.chunk(2, dim=-1)
    turned = x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return turned.to(x.dtype)

"""What a family has and the decoder does not, folded into the parameters as they are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from photon_ext.dequantize import dequantized
from photon_ext.models.config import ModelConfig
from photon_ext.weight import Weight

FINAL_NORM = "model.norm"
_ADDS_TO_RESIDUAL = ("self_attn.o_proj", "mlp.down_proj")


def folded(config: ModelConfig, module: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as the decoder has it.

    `module`: whose it is, as Hugging Face names it; `tensor` [n, ...]: its weight in a dtype to
    multiply in, its bias, or B of an adapter, by the module's outputs.
    """
    if _is_multiplied(config, module):
        return tensor.float() * config.residual_multiplier
    if module == FINAL_NORM and config.logits_divisor != 1:
        return tensor.float() / config.logits_divisor
    if module.endswith("self_attn.qkv_proj") and config.reorders_heads:
        return tensor[_rotated_halves(config)]
    return tensor


def folded_weight(config: ModelConfig, module: str, weight: Weight) -> Weight:
    """The same of a weight of any format. What it is multiplied by goes into its scales."""
    if _is_multiplied(config, module):
        factor = config.residual_multiplier
        if weight.scale is None:
            return Weight(dequantized(weight).float() * factor)
        if weight.format.is_fp4:
            divisor = torch.ones(weight.n, 1) if weight.divisor is None else weight.divisor
            return replace(weight, divisor=divisor / factor)
        return replace(weight, scale=weight.scale.float() * factor)
    parts = (weight.data, weight.scale, weight.zero, weight.divisor)
    data, *others = (None if one is None else folded(config, module, one) for one in parts)
    assert data is not None
    return Weight(data, weight.format, *others)


def _is_multiplied(config: ModelConfig, module: str) -> bool:
    return module.endswith(_ADDS_TO_RESIDUAL) and config.residual_multiplier != 1


def _rotated_halves(config: ModelConfig) -> torch.Tensor:
    """The order of the rows of q, k and v in which the rotated pairs come first.

    The kernels pair element i of a head with i + head_dim / 2. A model that rotates the first R
    elements pairs i with i + R / 2: its halves are moved apart, and the rest is split behind them.
    That is done to q and k alike, so that their products are the same.
    """
    half, rotated, size = config.rotated // 2, config.rotated, config.head_dim
    rest = (size - rotated) // 2
    order = [*range(half), *range(rotated, rotated + rest)]
    order += [*range(half, rotated), *range(rotated + rest, size)]
    heads = torch.arange(config.qkv_size).view(-1, size)
    keys_end = config.q_heads + config.kv_heads
    return torch.cat((heads[:keys_end, order], heads[keys_end:])).flatten()

"""What a family has and the decoder does not, folded into the parameters as they are loaded."""

from __future__ import annotations

import torch

from photon_ext.models.config import ModelConfig

FINAL_NORM = "model.norm"
_ADDS_TO_RESIDUAL = ("self_attn.o_proj", "mlp.down_proj")


def folded(config: ModelConfig, module: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as the decoder has it.

    `module`: whose it is, as Hugging Face names it; `tensor` [n, ...]: its weight, the scales of
    that, its bias, or B of an adapter, by the module's outputs. What weights with scales are
    multiplied by goes into the scales.
    """
    has_scales = tensor.dtype is torch.float8_e4m3fn
    if module.endswith(_ADDS_TO_RESIDUAL) and config.residual_multiplier != 1 and not has_scales:
        return tensor.float() * config.residual_multiplier
    if module == FINAL_NORM and config.logits_divisor != 1:
        return tensor.float() / config.logits_divisor
    if module.endswith("self_attn.qkv_proj") and config.rotated < config.head_dim:
        return tensor[_rotated_halves(config)]
    return tensor


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

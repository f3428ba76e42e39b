"""DecoderWeights: every parameter of a decoder, with q/k/v and gate/up fused.

`weight_slots` names each parameter as a Hugging Face checkpoint does and says where it goes: a
loader is a loop over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from photon_ext.errors import ConfigError
from photon_ext.models.config import ModelConfig


class Linear(NamedTuple):
    """A projection: weight [n, k] and an optional bias [n], in the dtype of the model."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer. H hidden, I intermediate, D head_dim."""

    input_norm: torch.Tensor  # [H]
    qkv: Linear  # [(q_heads + 2 kv_heads) * D, H]: q rows, then k, then v
    q_norm: torch.Tensor | None  # [D], Qwen3 only
    k_norm: torch.Tensor | None  # [D], Qwen3 only
    o: Linear  # [H, q_heads * D]
    post_norm: torch.Tensor  # [H]
    gate_up: Linear  # [2 I, H]: gate rows, then up rows
    down: Linear  # [H, I]


@dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a model, on one device, in one dtype.

    `lm_head` is `embedding` itself where they are tied.
    """

    embedding: torch.Tensor  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [vocab, H]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every distinct tensor, once."""
        yield self.embedding
        for layer in self.layers:
            yield from (layer.input_norm, layer.post_norm)
            yield from (norm for norm in (layer.q_norm, layer.k_norm) if norm is not None)
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                yield from (part for part in linear if part is not None)
        yield self.final_norm
        if self.lm_head is not self.embedding:
            yield self.lm_head

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def bytes_per_step(self) -> int:
        """Bytes of them that a decode step reads.

        Those are all but an embedding that is not the head too, of which it reads a row per token.
        """
        return self.nbytes - (0 if self.lm_head is self.embedding else self.embedding.nbytes)


def empty_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> DecoderWeights:
    """Uninitialized parameters of the right shapes on `device`.

    A loader fills them through `weight_slots`.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(n: int, k: int, bias: bool) -> Linear:
        return Linear(empty(n, k), empty(n) if bias else None)

    layers = tuple(
        LayerWeights(
            input_norm=empty(config.hidden),
            qkv=linear(config.qkv_size, config.hidden, config.qkv_bias),
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            o=linear(config.hidden, config.q_size, config.o_bias),
            post_norm=empty(config.hidden),
            gate_up=linear(2 * config.intermediate, config.hidden, config.mlp_bias),
            down=linear(config.hidden, config.intermediate, config.mlp_bias),
        )
        for _ in range(config.layers)
    )
    embedding = empty(config.vocab, config.hidden)
    lm_head = embedding if config.tied_embeddings else empty(config.vocab, config.hidden)
    return DecoderWeights(embedding, layers, empty(config.hidden), lm_head)


def check_weights(config: ModelConfig, weights: DecoderWeights) -> None:
    """Raises ConfigError unless all parameters of `config` are there as the kernels want them.

    That is: in the shapes of the config, contiguous, on one device and in one dtype that the
    kernels know.
    """
    if weights.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(
            f"the weights are {weights.dtype}; convert them to float32, float16 or bfloat16"
        )
    if len(weights.layers) != config.layers:
        raise ConfigError(
            f"the weights have {len(weights.layers)} layers and the config {config.layers}; give "
            "those of one model"
        )
    expected = dict(_parameters(empty_weights(config, weights.dtype, "meta")))
    for name, tensor in _parameters(weights):
        found, wanted = (
            _shown(tensor, tensor.device if tensor is not None else None),
            _shown(expected[name], weights.device),
        )
        if found != wanted:
            raise ConfigError(
                f"{name} of the weights is {found}, expected {wanted}, by the config and the "
                "embedding"
            )
        if tensor is not None and not tensor.is_contiguous():
            raise ConfigError(
                f"{name} of the weights has strides {list(tensor.stride())}, expected a contiguous "
                "tensor, as the kernels read it; give its .contiguous()"
            )


def _parameters(weights: DecoderWeights) -> Iterator[tuple[str, torch.Tensor | None]]:
    """By where they are; those that a model may lack too."""
    yield "embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        for name, value in vars(layer).items():
            if isinstance(value, Linear):
                yield f"layers[{index}].{name}.weight", value.weight
                yield f"layers[{index}].{name}.bias", value.bias
            else:
                yield f"layers[{index}].{name}", value
    yield "final_norm", weights.final_norm
    yield "lm_head", weights.lm_head


def _shown(tensor: torch.Tensor | None, device: torch.device | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {device}"


def weight_slots(
    config: ModelConfig, weights: DecoderWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    """For every parameter its name in Hugging Face's files, and its view of `weights`."""
    yield "model.embed_tokens.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", layer.input_norm
        yield prefix + "post_attention_layernorm.weight", layer.post_norm
        if layer.q_norm is not None and layer.k_norm is not None:
            yield prefix + "self_attn.q_norm.weight", layer.q_norm
            yield prefix + "self_attn.k_norm.weight", layer.k_norm
        q_size, kv_size = config.q_size, config.kv_size
        yield from _split(
            prefix + "self_attn.",
            layer.qkv,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
        )
        yield from _split(prefix + "self_attn.", layer.o, {"o_proj": config.hidden})
        yield from _split(
            prefix + "mlp.",
            layer.gate_up,
            {"gate_proj": config.intermediate, "up_proj": config.intermediate},
        )
        yield from _split(prefix + "mlp.", layer.down, {"down_proj": config.hidden})
    yield "model.norm.weight", weights.final_norm
    if not config.tied_embeddings:
        yield "lm_head.weight", weights.lm_head


def _split(prefix: str, linear: Linear, rows: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    sizes = list(rows.values())
    for name, part in zip(rows, torch.split(linear.weight, sizes), strict=True):
        yield f"{prefix}{name}.weight", part
    if linear.bias is not None:
        for name, part in zip(rows, torch.split(linear.bias, sizes), strict=True):
            yield f"{prefix}{name}.bias", part


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DecoderWeights:
    """Weights for benchmarks, made on `device`: norms one, all else normal with deviation 0.02.

    Same seed, same weights.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, slot in weight_slots(config, weights):
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)
    return weights

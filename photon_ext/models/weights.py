"""DecoderWeights: every parameter of a decoder, in its layers.

`weight_slots` names each parameter as a Hugging Face checkpoint does and says where it goes: a
loader is a loop over it. Which there are, the layers themselves say (layers/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial

import torch

from photon_ext.errors import ConfigError, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.layers.block import Block, empty_block
from photon_ext.models.layers.projection import Projection, empty_projection
from photon_ext.models.layers.weight import empty_weight, named_tensors
from photon_ext.models.projections import embedding_format, head_projection
from photon_ext.models.quantization import EMBEDDING
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat

_DEVIATION = 0.02  # of random weights


@dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a model, on one device, and the settings of its layers.

    All are of one dtype but the weights that are stored in fewer bits. That of `head` is
    `embedding` itself where they are tied. Its bias is no parameter:
    `without_ids` makes it.
    """

    embedding: Weight  # [vocab, H]
    layers: tuple[Block, ...]
    head: Projection  # [vocab, H]; it normalizes the last layer's output

    @property
    def dtype(self) -> torch.dtype:
        assert self.head.norm is not None
        return self.head.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.weights[0] is self.embedding

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every distinct tensor, once."""
        found = (one for _, one in _leaves(self) if isinstance(one, torch.Tensor))
        yield from {id(tensor): tensor for tensor in found}.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def bytes_per_step(self) -> int:
        """Bytes of them that a decode step reads.

        Those are all but an embedding that is not the head too: a step reads a row per token of it.
        """
        return self.nbytes - (0 if self.tied else self.embedding.nbytes)


def empty_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> DecoderWeights:
    """Uninitialized parameters of the right shapes on `device`.

    A loader fills them through `weight_slots`.
    """
    empty = partial(torch.empty, dtype=dtype, device=device)
    layers = tuple(empty_block(config, index, empty) for index in range(config.layers))
    stored = embedding_format(config)
    embedding = empty_weight(config.vocab, config.hidden, stored, empty)
    tied = embedding if config.tied_embeddings else None
    head = empty_projection(head_projection(config), empty, tied)
    return DecoderWeights(embedding, layers, head)


def without_ids(weights: DecoderWeights, ids: Sequence[int]) -> DecoderWeights:
    """The same, with a bias of the head, so that no token of `ids` is ever sampled."""
    if not ids:
        return weights
    assert weights.head.norm is not None
    bias = weights.head.norm.new_zeros(weights.head.weight.n)
    bias[list(ids)] = -torch.inf
    return replace(weights, head=replace(weights.head, bias=bias))


def check_weights(config: ModelConfig, weights: DecoderWeights) -> None:
    """Raises ConfigError unless all parameters of `config` are there as the kernels want them, and
    the settings of layers are its own.

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
    wanted_weights = empty_weights(config, weights.dtype, "meta")
    if weights.head.bias is not None:
        wanted_weights = without_ids(wanted_weights, [0])
    expected = dict(_leaves(wanted_weights))
    for name, value in _leaves(weights):
        found, wanted = _shown(value), _shown(expected.get(name), weights.device)
        if found != wanted:
            raise ConfigError(
                f"{name} of the weights is {found}, expected {wanted}, by the config and the "
                "embedding"
            )
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            raise ConfigError(
                f"{name} of the weights has strides {list(value.stride())}, expected a contiguous "
                "tensor, as the kernels read it; give its .contiguous()"
            )


def _leaves(part: object, path: str = "") -> Iterator[tuple[str, object]]:
    """What a part of the weights is made of in the end, tensors and settings, by where they are."""
    if isinstance(part, tuple):
        for index, one in enumerate(part):
            yield from _leaves(one, f"{path}[{index}]")
    elif is_dataclass(part):
        for name, one in vars(part).items():
            yield from _leaves(one, f"{path}.{name}" if path else name)
    else:
        yield path, part


def _shown(value: object, device: torch.device | None = None) -> str:
    """`device`: where it is expected."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {device or value.device}"
    return shown(value)


def weight_modules(weights: DecoderWeights) -> Iterator[tuple[str, Weight]]:
    """The table of embeddings and the weight of each linear, by its module's name in Hugging Face's
    files: views of `weights`.
    """
    yield EMBEDDING, weights.embedding
    for index, layer in enumerate(weights.layers):
        for projection in layer.projections().values():
            for module, weight in projection.modules():
                yield f"model.layers.{index}.{module}", weight
    if not weights.tied:
        yield from weights.head.modules()


def other_slots(weights: DecoderWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Norms and biases, by their names in Hugging Face's files: views of `weights`."""
    for index, layer in enumerate(weights.layers):
        for name, slot in layer.slots():
            yield f"model.layers.{index}.{name}", slot
    assert weights.head.norm is not None
    yield "model.norm.weight", weights.head.norm


def weight_slots(weights: DecoderWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of `weights`, by names as Hugging Face's: views."""
    for module, weight in weight_modules(weights):
        yield from named_tensors(module, weight)
    yield from other_slots(weights)


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DecoderWeights:
    """Weights for benchmarks, made on `device`: norms one, all else with deviation 0.02, normal but
    in int4 and int8, where all codes come as often. ConfigError: some are in another format.

    Same seed, same weights.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for module, weight in weight_modules(weights):
        _randomize(module, weight, generator)
    for name, slot in other_slots(weights):
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, _DEVIATION, generator=generator)
    return weights


def _randomize(module: str, weight: Weight, generator: torch.Generator) -> None:
    data = weight.data
    if weight.format is WeightFormat.DENSE:
        data.normal_(0.0, _DEVIATION, generator=generator)
    elif weight.format is WeightFormat.FP8 and weight.scale is not None:
        data.copy_(torch.empty(data.shape, device=data.device).normal_(generator=generator))
        weight.scale.fill_(_DEVIATION)
    elif weight.format.is_int and weight.scale is not None:
        data.random_(0, 256, generator=generator)
        codes = 16 if weight.format is WeightFormat.INT4 else 256
        weight.scale.fill_(_DEVIATION * 12**0.5 / codes)
        if weight.zero is not None:
            _center(weight.zero, weight.scale)
    else:
        raise ConfigError(
            f"{module} is stored as {weight.format.value}, of which there are no random weights; "
            "give a model whose weights are plain, or in fp8, int4 or int8"
        )


def _center(zero: torch.Tensor, scale: torch.Tensor) -> None:
    """Zero points or offsets of int4, so that all numbers of a scale are about zero."""
    if zero.is_floating_point():
        torch.mul(scale, -7.5, out=zero)
    else:
        zero.fill_(8)

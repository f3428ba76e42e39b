"""RegionHeads: what lets a decoder point at things: heads that read a coordinate or a size from the
hidden state, and encoders that make embeddings of them for the next input.

A value is a number of bins, told apart by its id: the ids behind the vocabulary are coordinates,
then sizes (`ops.spatial_features_into` says which).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from photon_ext import ops
from photon_ext.errors import ConfigError, shown
from photon_ext.models.layers.projection import Projection
from photon_ext.models.loading.loader import checked_dtype
from photon_ext.models.loading.module_file import load_module
from photon_ext.models.projections import Epilogue, ProjectionShape
from photon_ext.weight import Weight

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors

MOST_BINS = 4096
MOST_WIDTH = 2**24  # of what it multiplies
PROMPTS = {
    "point": "\n\nPoint: {}\n\n",
    "detect": "\n\nDetect: {}\n\n",
    "segment": "\n\nSegment: {}\n\n",
}


@dataclass(frozen=True)
class RegionConfig:
    """The shape of region heads. ConfigError: it cannot be.

    Attributes:
        hidden: width of the decoder.
        bins: values that a coordinate, a width or a height may have.
        coordinate_features, size_features: Fourier features of each: half of them cosines.
        prompts: by skill, the text behind the image, with {} for what is asked for.
    """

    hidden: int = 2048
    bins: int = 1024
    coordinate_features: int = 256
    size_features: int = 512
    prompts: Mapping[str, str] = field(default_factory=lambda: dict(PROMPTS), hash=False)

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "prompts"}
        for name, value in sizes.items():
            even = name.endswith("features")
            most = MOST_BINS if name == "bins" else MOST_WIDTH
            if type(value) is not int or not 2 <= value <= most or (even and value % 2):
                raise ConfigError(
                    f"RegionConfig: {name} is {shown(value)}, expected an {'even ' * even}integer "
                    f"from 2 to {most}"
                )
        if not isinstance(self.prompts, Mapping):
            raise ConfigError(
                f"RegionConfig: prompts is {shown(self.prompts)}, expected a text for each of "
                f"{', '.join(PROMPTS)}"
            )
        missing = [name for name in PROMPTS if not isinstance(self.prompts.get(name), str)]
        if missing:
            raise ConfigError(f"RegionConfig: prompts has none for {', '.join(missing)}")

    @property
    def value_ids(self) -> int:
        """Ids behind the vocabulary."""
        return self.bins + self.bins**2

    @property
    def features(self) -> int:
        """Numbers of a value's features, with one for each kind of value, in whole vectors."""
        return -(-(self.coordinate_features + self.size_features + 2) // 8) * 8

    def step_bytes(self, tokens: int, segments: int, itemsize: int) -> int:
        """Device memory of RegionSteps, where a number of the model has `itemsize` bytes."""
        head = 3 * self.bins * (self.hidden + 1 + segments)
        numbers = head + self.features * (self.hidden + tokens)
        return itemsize * numbers + 4 * (self.coordinate_features // 2 + self.size_features)


class RegionHeads(nn.Module):
    """The parameters, float32 for frequencies and `dtype` for the rest. `load_state_dict` fills
    them by name, `load_region` from a file.
    """

    coord_features: Tensor  # [1, coordinate_features / 2]: turns of each wave from 0 to 1
    size_features: Tensor  # [2, size_features / 2]: of width and height

    def __init__(
        self,
        config: RegionConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """With torch's random weights. Raises ConfigError: `config` is no RegionConfig."""
        if not isinstance(config, RegionConfig):
            raise ConfigError(f"config is {shown(config)}; give a RegionConfig")
        super().__init__()
        self.config = config
        coordinate, size = config.coordinate_features, config.size_features
        with torch.device(device):
            self.coord_decoder = nn.Linear(config.hidden, config.bins, dtype=dtype)
            self.size_decoder = nn.Linear(config.hidden, 2 * config.bins, dtype=dtype)
            self.coord_encoder = nn.Linear(coordinate, config.hidden, dtype=dtype)
            self.size_encoder = nn.Linear(size, config.hidden, dtype=dtype)
            self.register_buffer("coord_features", torch.randn(1, coordinate // 2))
            self.register_buffer("size_features", torch.randn(2, size // 2))
        self.requires_grad_(False).eval()


class RegionSteps:
    """What a decoder does with region heads in a step: their weights joined, and buffers of fixed
    addresses.

    Attributes:
        head: of the logits of coordinates, widths and heights.
        nbytes: device memory of all.
    """

    def __init__(
        self, heads: RegionHeads, text_head: Projection, max_tokens: int, max_segments: int
    ) -> None:
        """For steps up to these sizes; `text_head` [vocab, hidden] reads the same hidden state.
        Raises ConfigError: the heads are of another width, or not finite, or there are more ids
        than int32 holds.
        """
        config, weight = heads.config, text_head.weights[0]
        assert text_head.norm is not None
        vocab, hidden, device, dtype = weight.n, weight.k, weight.device, text_head.norm.dtype
        _check_finite(heads, dtype)
        if config.hidden != hidden:
            raise ConfigError(
                f"the region heads are for a decoder of width {config.hidden}, and this one is "
                f"{hidden} wide; give those that were made for it"
            )
        if vocab + config.value_ids >= 2**31:
            raise ConfigError(
                f"a vocabulary of {vocab} leaves no ids for the region heads' {config.bins} bins; "
                "give heads of fewer bins"
            )
        parts = heads.coord_encoder, heads.size_encoder
        encoder = torch.cat(
            [*(part.weight for part in parts), *(part.bias[:, None] for part in parts)], dim=1
        )
        padding = config.features - encoder.shape[1]
        encoder = nn.functional.pad(encoder, (0, padding)).to(device, dtype).contiguous()
        shape = ProjectionShape(("encoder",), (hidden,), config.features, epilogue=Epilogue.ADD)
        self._encoder = Projection(shape, (Weight(encoder),))
        decoders = heads.coord_decoder, heads.size_decoder
        modules, rows = ("coord_decoder", "size_decoder"), (config.bins, 2 * config.bins)
        self.head = Projection(
            ProjectionShape(modules, rows, hidden, bias=True, normed=True),
            (Weight(torch.cat([part.weight for part in decoders]).to(device, dtype)),),
            torch.cat([part.bias for part in decoders]).to(device, dtype),
            text_head.norm,
        )
        self._frequencies = (
            heads.coord_features[0].to(device, torch.float32).contiguous(),
            heads.size_features.to(device, torch.float32).contiguous(),
        )
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        self._features = zeros(max_tokens, config.features)
        self._logits = zeros(max_segments, self.head.shape.n)
        self._ids = vocab, config.bins
        self.nbytes = config.step_bytes(max_tokens, max_segments, dtype.itemsize)

    def embed(self, residual: Tensor, step: StepTensors) -> None:
        """Adds the embeddings of the tokens that are values to `residual` [T, hidden], where the
        embedding op has left zeros for them.
        """
        features = self._features[: len(residual)]
        ops.spatial_features_into(features, step.decode_meta, *self._frequencies, *self._ids)
        self._encoder.add_to(residual, features)

    def logits(self, segments: int) -> Tensor:
        """The buffer of a step's `value_logits`."""
        return self._logits[:segments]


def checked_config(heads: object) -> RegionConfig | None:
    """The shape of what an engine is given as its region heads. Raises ConfigError: they are
    neither None nor RegionHeads, or have modules or parameters of another shape than their config.
    """
    if heads is None:
        return None
    if not isinstance(heads, RegionHeads):
        raise ConfigError(
            f"region is {shown(heads)}; give RegionHeads, for instance those of load_region()"
        )
    _check_shapes(heads)
    return heads.config


def _check_shapes(heads: RegionHeads) -> None:
    """A module may have been replaced, or changed, since they were made."""
    expected = RegionHeads(heads.config, device="meta").state_dict()
    given = heads.state_dict()
    for name in sorted(expected.keys() | given.keys()):
        shapes = [tuple(each[name].shape) if name in each else None for each in (given, expected)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{name} of the region heads is of shape {shapes[0]}, and their config makes it "
                f"{shapes[1]}; give heads as RegionHeads(config) makes them"
            )


def _check_finite(heads: RegionHeads, dtype: torch.dtype) -> None:
    """The encoder adds zeros to each token that is no value, which become NaN by such weights."""
    for name, value in heads.state_dict().items():
        if not value.to(dtype).isfinite().all():
            raise ConfigError(
                f"{name} of the region heads holds NaN or infinity in "
                f"{str(dtype).removeprefix('torch.')}, which all rows of a step would get; give "
                "heads of finite weights"
            )


def load_region(
    path: str | Path,
    config: RegionConfig | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    prefix: str = "model.region.",
) -> RegionHeads:
    """Heads with the weights of a safetensors file: those whose names begin with `prefix`.

    `dtype`: torch's, or its name.

    Raises ModelError: the file cannot be read, or its tensors are not those of the config;
    ConfigError: `config` is no RegionConfig, or the kernels do not know the dtype.
    """
    config = RegionConfig() if config is None else config
    heads = RegionHeads(config, checked_dtype(dtype) or torch.float32, device)
    load_module(heads, path, prefix)
    return heads

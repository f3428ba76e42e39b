"""VisionEncoder: from an image to embeddings in the place of a prompt's tokens.

A vision transformer sees the whole image and, if it is large, tiles of it, each as a grid of
patches. What it says of the tiles is put together to one grid, averaged to the size of the other
one, and a projector makes of both an embedding for each patch of the whole: always as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from photon_ext.checks import check_count
from photon_ext.errors import ConfigError
from photon_ext.models.images import Crops, cut_image, read_image
from photon_ext.models.loading.loader import checked_dtype
from photon_ext.models.loading.module_file import load_module


@dataclass(frozen=True)
class VisionConfig:
    """The shape of an encoder; the defaults are those of Moondream 2. ConfigError: it cannot be.

    Attributes:
        hidden: width of the embeddings: the language model's.
        width, layers, heads, intermediate: of the transformer.
        projector: width between the projector's two linears.
        crop_size, patch: pixels of a side; a crop is a square of whole patches.
        margin: how many patches a tile reaches into its neighbours.
        most_tiles: of an image, besides the whole of it.
    """

    hidden: int = 2048
    width: int = 1152
    layers: int = 27
    heads: int = 16
    intermediate: int = 4304
    projector: int = 8192
    crop_size: int = 378
    patch: int = 14
    margin: int = 4
    most_tiles: int = 12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "margin" else 1
            checked = check_count(f"VisionConfig: {name}", value, least=least)
            object.__setattr__(self, name, checked)
        if self.width % self.heads or self.crop_size % self.patch or self.grid <= 2 * self.margin:
            raise ConfigError(
                f"VisionConfig: heads {self.heads} must divide width {self.width}, patch "
                f"{self.patch} crop_size {self.crop_size}, and two margins of {self.margin} leave "
                f"some of the {self.grid} patches of a side"
            )

    @property
    def grid(self) -> int:
        """Patches of a side."""
        return self.crop_size // self.patch

    @property
    def tokens(self) -> int:
        """Embeddings of an image."""
        return self.grid**2


class VisionEncoder(nn.Module):
    """Encodes images; from any thread. Parameters have the names that Moondream 2 gives them."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """With torch's random weights; `load_vision` reads others."""
        super().__init__()
        self.config = config
        with torch.device(device):
            self.patch_emb = nn.Linear(3 * config.patch**2, config.width)
            self.pos_emb = nn.Parameter(0.02 * torch.randn(1, config.tokens, config.width))
            self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
            self.post_ln = nn.LayerNorm(config.width)
            self.proj_mlp = _Mlp(2 * config.width, config.projector, config.hidden)
        self.to(dtype).requires_grad_(False).eval()

    def encode(self, image: Any) -> Tensor:
        """The embeddings of an image, [tokens, hidden], on the encoder's device: of a PIL image,
        the bytes of a file, or an array of uint8, [height, width, 3]. Raises RequestError: it is no
        such image, or Pillow is missing.
        """
        with torch.no_grad():
            crops = cut_image(read_image(image), self.config)
            return self.project(self.features(crops.pixels), crops)

    def features(self, pixels: Tensor) -> Tensor:
        """The transformer's output for crops [n, 3, size, size]: [n, tokens, width]."""
        size, pixels = self.config.patch, pixels.to(self.pos_emb)
        # n, 3, rows, size, columns, size: a patch has its colours one after the other
        grid = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.patch_emb(patches) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        return self.post_ln(x)  # type: ignore[no-any-return]

    def project(self, features: Tensor, crops: Crops) -> Tensor:
        """From the features of an image's crops to its embeddings."""
        grid = self.config.grid
        tiles = features[1:].unflatten(1, (grid, grid))
        joined = join_tiles(tiles, crops.rows, crops.columns, self.config.margin)
        pooled = functional.adaptive_avg_pool2d(joined.permute(2, 0, 1), grid).flatten(1).t()
        return self.proj_mlp(torch.cat([features[0], pooled], dim=-1))  # type: ignore[no-any-return]


def join_tiles(tiles: Tensor, rows: int, columns: int, margin: int) -> Tensor:
    """Grids of overlapping tiles [rows * columns, grid, grid, width] as one: each without its
    margins, but at the image's own edges.
    """
    grid = tiles.shape[1]
    joined = []
    for row in range(rows):
        top, bottom = margin * (row > 0), grid - margin * (row < rows - 1)
        line = []
        for column in range(columns):
            left, right = margin * (column > 0), grid - margin * (column < columns - 1)
            line.append(tiles[row * columns + column, top:bottom, left:right])
        joined.append(torch.cat(line, dim=1))
    return torch.cat(joined)


class _Mlp(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attn = _Attention(config.width, config.heads)
        self.mlp = _Mlp(config.width, config.intermediate, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


def load_vision(
    path: str | Path,
    config: VisionConfig | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    prefix: str = "model.vision.",
) -> VisionEncoder:
    """An encoder with the weights of a safetensors file: those whose names begin with `prefix`.

    `config`: None: that of Moondream 2. `dtype`: torch's, or its name.

    Raises ModelError: the file cannot be read, or its tensors are not those of the config;
    ConfigError: the kernels do not know the dtype.
    """
    encoder = VisionEncoder(config or VisionConfig(), checked_dtype(dtype) or torch.float32, device)
    load_module(encoder, path, prefix)
    return encoder

"""Weight: a matrix that linears multiply by, as their kernels read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from photon_ext.models.quantization import SCALE_BLOCK, Quantization


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k]: n outputs of k inputs each. How numbers are stored is said here alone;
    `projection.py` hands the tensors to the linear ops.

    Attributes:
        data: [n, k], of the dtype of the model, or float8_e4m3fn with `scale`.
        scale: what the numbers are multiplied by, as `ops.linear_into` takes it; None: nothing.
        scale_name: of a module's scales in a checkpoint.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    scale_name: str = ""

    @classmethod
    def empty(
        cls,
        rows: Sequence[int],
        k: int,
        empty: Callable[..., torch.Tensor],
        quantization: Quantization | None = None,
    ) -> Weight:
        """One without values, of modules of so many outputs each; `empty(*shape)` makes tensors of
        the dtype of the model.
        """
        if quantization is None:
            return cls(empty(sum(rows), k))
        return cls(
            empty(sum(rows), k, dtype=torch.float8_e4m3fn),
            empty(*quantization.scale_shape(rows, k), dtype=torch.float32),
            quantization.scale_name,
        )

    @property
    def n(self) -> int:
        """Outputs."""
        return self.data.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.data.shape[1]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes as it is stored."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def split(self, rows: Sequence[int]) -> Iterator[Weight]:
        """Views of the first rows[0] outputs, then of the next."""
        parts = torch.split(self.data, list(rows))
        if self.scale is None:
            yield from map(Weight, parts)
            return
        by_row = len(self.scale) == self.n
        counts = [count if by_row else -(-count // SCALE_BLOCK) for count in rows]
        for part, scale in zip(parts, torch.split(self.scale, counts), strict=True):
            yield Weight(part, scale, self.scale_name)

    def slots(self, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        """What a loader fills, by its name in a checkpoint."""
        yield f"{module}.weight", self.data
        if self.scale is not None:
            yield f"{module}.{self.scale_name}", self.scale

"""Weight: a matrix that linears multiply by, as their kernels read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k] of the dtype of the model: n outputs of k inputs each.

    How numbers are stored is said here alone. A format of fewer bits adds its tensors (scales) to
    the fields and to the methods; `projection.py` hands them to the linear ops.
    """

    data: torch.Tensor  # [n, k]

    @classmethod
    def empty(cls, n: int, k: int, empty: Callable[..., torch.Tensor]) -> Weight:
        """One without values; `empty(*shape)` makes tensors of the dtype of the model."""
        return cls(empty(n, k))

    @property
    def n(self) -> int:
        """Outputs."""
        return self.data.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.data.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, whose numbers these are."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes as it is stored."""
        return self.data.nbytes

    def split(self, rows: Sequence[int]) -> Iterator[Weight]:
        """Views of the first rows[0] outputs, then of the next."""
        return map(Weight, torch.split(self.data, list(rows)))

    def slots(self, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        """What a loader fills, by its name in a checkpoint."""
        yield f"{module}.weight", self.data

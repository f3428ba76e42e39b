"""Expected: a tensor as a file must have it."""

from __future__ import annotations

from typing import NamedTuple

PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes, as safetensors calls them
AGAIN = "the file is damaged, or config.json is of another checkpoint: download both again"
DAMAGED = "the file is damaged, or was made of a model that is: download it again"


class Expected(NamedTuple):
    """A tensor as a file must have it.

    Attributes:
        counts_ones: dimensions of 1 count, too; of scales they do not.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = PLAIN
    counts_ones: bool = True

    def has(self, shape: list[int]) -> bool:
        """Whether a tensor of this shape is it."""
        if self.counts_ones:
            return tuple(shape) == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

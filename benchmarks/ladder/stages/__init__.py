"""The stages in order, a file each, and what each changes: a Hugging Face model's decode loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

Decode = Callable[..., Iterator[int]]
SHIPPED = {"pipeline": "photon_ext.examples.own_loop"}
"""Stages that are examples of the package, by name."""


@dataclass(frozen=True)
class Stage:
    """One file of the ladder.

    Attributes:
        name: the file, unless the stage is SHIPPED.
        what: what it changes, in a few words.
    """

    name: str
    what: str

    @property
    def decode(self) -> Decode:
        """The loop; imported here, so that a failed import is an error of this stage alone."""
        found: Decode = import_module(SHIPPED.get(self.name, f"{__name__}.{self.name}")).decode
        return found

    @property
    def takes_backend(self) -> bool:
        """Whether its `decode` has the argument `backend`: all kernels of its step are ours."""
        return self.name == "step"


STAGES = (
    Stage("measure", "growing cache, .item()"),
    Stage("preallocate", "static cache, fixed inputs"),
    Stage("carry_over", "token and position on the device"),
    Stage("slots", "two pinned outputs, read a step late"),
    Stage("graph", "one CUDA graph per step"),
    Stage("pipeline", "slots, graphs, stops by the runtime"),
    Stage("attention", "paged_attention_into"),
    Stage("step", "photon_ext's decoder"),
)

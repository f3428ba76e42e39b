"""The stages of each loop in order, and what each changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

Decode = Callable[..., Iterator[int]]
SHIPPED = {("hf", "pipeline"): "photon_ext.examples.own_loop"}
"""Stages that are examples of the package, by loop and name."""


@dataclass(frozen=True)
class Stage:
    """One file of a ladder.

    Attributes:
        loop: "stock" or "hf", the folder.
        name: the file, unless the stage is SHIPPED.
        what: what it changes, in a few words.
    """

    loop: str
    name: str
    what: str

    @property
    def decode(self) -> Decode:
        """The loop; imported here, so that a failed import is an error of this stage alone."""
        own = f"benchmarks.ladder.{self.loop}.{self.name}"
        found: Decode = import_module(SHIPPED.get((self.loop, self.name), own)).decode
        return found

    @property
    def takes_backend(self) -> bool:
        """Whether its `decode` has the argument `backend`: all kernels of its step are ours."""
        return self.name == "step"


STAGES = (
    ("measure", "torch.cat cache, .item()", "growing cache, .item()"),
    ("preallocate", "fixed cache and buffers", "static cache, fixed inputs"),
    ("carry_over", "token and position on the device", None),
    ("slots", "two pinned outputs, read a step late", None),
    ("graph", "one CUDA graph per step", None),
    ("pipeline", "slots, graphs, stops by the runtime", None),
    ("attention", "fused_attention_decode_into", "paged_attention_into"),
    ("step", "photon_ext's decoder", None),
)
"""Name; what changes in the plain loop; in the Hugging Face loop, where that is something else."""
LADDERS = {
    "stock": tuple(Stage("stock", name, what) for name, what, _ in STAGES),
    "hf": tuple(Stage("hf", name, other or what) for name, what, other in STAGES),
}

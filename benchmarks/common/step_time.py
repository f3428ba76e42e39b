"""What a decode step takes, predicted from its bytes and from how often kernels follow each other.

    T = bytes / bandwidth + nodes x e + layers x a

A step reads every weight and the KV of every row once, and pays for each dependency of kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from photon_ext.errors import ConfigError

if TYPE_CHECKING:
    from photon_ext.models.config import ModelConfig
    from photon_ext.models.weights import DecoderWeights

NODE_US = {"plain graph": 3.0, "programmatic launch": 2.5}
"""Microseconds per dependency between two kernels (e), by how kernels follow each other: an
estimate for plain graphs; for programmatic launch the middle of what was measured per kernel at one
token a step on an H200, 2.1 to 2.9."""


@dataclass(frozen=True)
class StepShape:
    """What a decode step reads.

    Attributes:
        weight_bytes: bytes of weights per step, whatever the batch.
        kv_bytes_per_token: bytes of keys and values per token of context, all layers.
        layers: decoder layers.

    Raises:
        ConfigError: one is not above 0.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    layers: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(name, value, above_zero=True)

    @classmethod
    def of(cls, config: ModelConfig, weights: DecoderWeights) -> StepShape:
        """The shape of a model with KV in the dtype of its weights, which may be on torch's meta
        device (`empty_weights`)."""
        return cls(
            weights.bytes_per_step, config.kv_bytes_per_token(weights.dtype.itemsize), config.layers
        )


@dataclass(frozen=True)
class Machine:
    """What a device does.

    Attributes:
        bytes_per_s: measured read bandwidth (`python -m benchmarks.floor`).
        node_us: microseconds per dependency between two kernels, e; see NODE_US.
        layer_us: microseconds per layer that neither bytes nor nodes explain, a: attention's chain
            of softmax and merge, for one.

    Raises:
        ConfigError: bytes_per_s is not above 0, or another is negative or not finite.
    """

    bytes_per_s: float
    node_us: float = NODE_US["plain graph"]
    layer_us: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(name, value, above_zero=name == "bytes_per_s")


@dataclass(frozen=True)
class StepTime:
    """A predicted decode step, milliseconds by cause."""

    weights_ms: float
    kv_ms: float
    nodes_ms: float
    layers_ms: float

    @property
    def floor_ms(self) -> float:
        """Bytes over bandwidth: no step is faster."""
        return self.weights_ms + self.kv_ms

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return self.floor_ms + self.nodes_ms + self.layers_ms


def predict_step(
    shape: StepShape, machine: Machine, rows: int, context: float, nodes: int
) -> StepTime:
    """The time of a decode step.

    Args:
        shape: the model. machine: the device.
        rows: sequences in the batch.
        context: tokens that each attends to, on average.
        nodes: kernels in the step's graph, one after another (`runtime.report.nodes`).

    Raises:
        ConfigError: one of the three is negative or not finite.
    """
    for name, value in (("rows", rows), ("context", context), ("nodes", nodes)):
        _check(name, value)
    per_ms = machine.bytes_per_s / 1e3
    return StepTime(
        weights_ms=shape.weight_bytes / per_ms,
        kv_ms=rows * context * shape.kv_bytes_per_token / per_ms,
        nodes_ms=nodes * machine.node_us / 1e3,
        layers_ms=shape.layers * machine.layer_us / 1e3,
    )


def _check(name: str, value: float, above_zero: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 or (value == 0 and not above_zero))):
        wanted = "a positive number" if above_zero else "a number from 0 on"
        raise ConfigError(f"{name} is {value!r}; give {wanted}")

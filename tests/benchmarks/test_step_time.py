"""The time of a step against figures computed by hand, and against bad input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.common.step_time import NODE_US, Machine, StepShape, predict_step
from photon_ext.errors import ConfigError
from photon_ext.models.shapes import NAMED_SHAPES
from photon_ext.models.weights import empty_weights

H200 = 4.53e12


def shape_of(model: str) -> StepShape:
    config = NAMED_SHAPES[model]
    return StepShape.of(config, empty_weights(config, torch.bfloat16, "meta"))


@pytest.mark.parametrize(
    ("model", "gigabytes", "kib", "floors"),
    [
        ("qwen3-0.6b", 1.192, 112, (0.28, 0.37, 0.68)),
        ("llama-3.2-1b", 2.472, 32, (0.55, 0.58, 0.66)),
        ("qwen3-4b", 8.045, 144, (1.79, 1.91, 2.31)),
        ("qwen3-8b", 15.14, 144, (3.36, 3.47, 3.88)),
    ],
)
def test_bytes_and_floors_are_those_computed_by_hand(
    model: str, gigabytes: float, kib: int, floors: tuple[float, ...]
) -> None:
    shape = shape_of(model)
    assert shape.weight_bytes == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert shape.kv_bytes_per_token == kib * 1024
    for rows, floor in zip((1, 8, 32), floors, strict=True):
        step = predict_step(shape, Machine(H200, node_us=0), rows, 512, nodes=300)
        assert step.floor_ms == step.total_ms == pytest.approx(floor, abs=0.006)


def test_nodes_and_layers_are_paid_for_one_by_one() -> None:
    shape = shape_of("qwen3-0.6b")
    step = predict_step(
        shape, Machine(H200, NODE_US["programmatic launch"], layer_us=4.0), 1, 512, nodes=200
    )
    assert (step.nodes_ms, step.layers_ms) == (pytest.approx(0.5), pytest.approx(28 * 0.004))
    assert step.total_ms == pytest.approx(step.floor_ms + 0.612)


def test_node_times_are_of_what_there_is_and_of_what_was_measured() -> None:
    assert set(NODE_US) == {"plain graph", "programmatic launch"}
    assert (
        2.1 <= NODE_US["programmatic launch"] <= 2.9
    )  # per kernel, four models at one line on an H200


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Machine(0), "bytes_per_s is 0"),
        (lambda: Machine(1e12, node_us=-1), "node_us is -1"),
        (lambda: StepShape(0, 1, 1), "weight_bytes is 0"),
        (lambda: predict_step(StepShape(1, 1, 1), Machine(1e12), -1, 0, 0), "rows is -1"),
    ],
)
def test_wrong_numbers_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()

"""Region heads: their configs, and their weights by names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.region import PROMPTS, RegionConfig, RegionSteps, load_region
from tests.models.regions import random_heads


def test_weights_are_read_by_their_names(tmp_path: Path) -> None:
    heads, path = random_heads(24), tmp_path / "region.safetensors"
    stored = {f"model.region.{name}": value for name, value in heads.state_dict().items()}
    save_file({**stored, "model.other": torch.ones(1)}, path)
    loaded = load_region(path, heads.config, "bfloat16")
    for name, value in heads.state_dict().items():
        kept = torch.float32 if name.endswith("features") else torch.bfloat16
        assert loaded.state_dict()[name].dtype == kept
        assert torch.equal(loaded.state_dict()[name], value.to(kept))
    with pytest.raises(ConfigError, match="dtype is 'int8'; give one of float32"):
        load_region(path, heads.config, "int8")
    whole = {name: value.to(torch.int8) for name, value in stored.items()}
    save_file(whole, path)
    with pytest.raises(ModelError, match=r"model\.region\.\S+ is of torch\.int8, expected float"):
        load_region(path, heads.config)
    del stored["model.region.size_features"]
    save_file(stored, path)
    with pytest.raises(ModelError, match=re.escape(f"{path}: it does not hold the RegionHeads")):
        load_region(path, heads.config)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bins": 1}, "bins is 1, expected an integer from 2 on"),
        ({"bins": 5000}, "bins is 5000, expected 4096 at most"),
        ({"size_features": 7}, "size_features is 7, expected an even integer from 2 on"),
        ({"hidden": "64"}, "hidden is '64', expected an integer"),
        ({"prompts": {**PROMPTS, "point": 3}}, "prompts has none for point"),
        ({"prompts": None}, "prompts is None, expected a text for each of point, detect"),
        ({"prompts": {"point": "{}"}}, "prompts has none for detect, segment"),
    ],
)
def test_a_config_that_cannot_be_says_why(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RegionConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_steps_is_known_before_it_is_taken(dtype: torch.dtype) -> None:
    heads = random_heads(24)
    steps = RegionSteps(heads, 100, 16, 3, torch.zeros(100, 24, dtype=dtype))
    assert steps.nbytes == heads.config.step_bytes(16, 3, dtype.itemsize)

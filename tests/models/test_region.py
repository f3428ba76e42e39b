"""Region heads: their configs, and their weights by names."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.layers.projection import Projection
from photon_ext.models.projections import ProjectionShape
from photon_ext.models.region import (
    PROMPTS,
    RegionConfig,
    RegionHeads,
    RegionSteps,
    checked_config,
    load_region,
)
from photon_ext.weight import Weight
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
        ({"bins": 1}, "bins is 1, expected an integer from 2 to 4096"),
        ({"bins": 5000}, "bins is 5000, expected an integer from 2 to 4096"),
        ({"size_features": 7}, "size_features is 7, expected an even integer from 2 to 16777216"),
        ({"hidden": 2**25}, "hidden is 33554432, expected an integer from 2 to 16777216"),
        ({"hidden": True}, "hidden is True, expected an integer"),
        ({"hidden": "64"}, "hidden is '64', expected an integer"),
        ({"prompts": {**PROMPTS, "point": 3}}, "prompts has none for point"),
        ({"prompts": None}, "prompts is None, expected a text for each of point, detect"),
        ({"prompts": {"point": "{}"}}, "prompts has none for detect, segment"),
    ],
)
def test_a_config_that_cannot_be_says_why(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RegionConfig(**changes)  # type: ignore[arg-type]


def test_configs_are_equal_by_their_values_and_of_their_own_prompts() -> None:
    config = RegionConfig()
    assert (config, hash(config)) == (RegionConfig(), hash(RegionConfig()))
    assert config != RegionConfig(prompts={**PROMPTS, "point": "{}?"})
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.prompts is not PROMPTS


def test_heads_whose_modules_are_not_their_configs_are_refused() -> None:
    heads = random_heads(24)
    heads.size_decoder = nn.Linear(24, 5)
    with pytest.raises(ConfigError, match=r"size_decoder.bias of the region heads is of shape \("):
        checked_config(heads)
    without = random_heads(24)
    without.coord_encoder = nn.Linear(8, 24, bias=False)
    with pytest.raises(ConfigError, match=r"coord_encoder.bias .* shape None, .* \(24,\); give"):
        checked_config(without)


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config is None; give a RegionConfig"):
        RegionHeads(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"config is \{\}; give a RegionConfig"):
        load_region(tmp_path / "none", {})  # type: ignore[arg-type]


def test_a_vocabulary_that_leaves_no_ids_names_the_remedy() -> None:
    few = torch.zeros(1, 24).expand(2**31 - 1000, 24)
    shape = ProjectionShape(("lm_head",), (len(few),), 24, normed=True)
    head = Projection(shape, (Weight(few),), norm=torch.ones(24))
    with pytest.raises(ConfigError, match="no ids for the region heads' 32 bins; give heads of"):
        RegionSteps(random_heads(24), head, 4, 1)

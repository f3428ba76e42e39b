"""The vision encoder against transformers, its tiles, and its weights in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import SiglipVisionConfig, SiglipVisionModel

from photon_ext.errors import ConfigError, ModelError, RequestError
from photon_ext.models.images import cut_image, read_image
from photon_ext.models.vision import VisionConfig, VisionEncoder, join_tiles, load_vision

SHAPE: dict[str, int] = {
    "hidden": 64,
    "width": 48,
    "layers": 3,
    "heads": 4,
    "intermediate": 60,
    "projector": 72,
    "crop_size": 42,
    "patch": 6,
    "margin": 1,
    "most_tiles": 6,
}
CONFIG = VisionConfig(**SHAPE)


def picture(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_encoder() -> VisionEncoder:
    torch.manual_seed(0)
    return VisionEncoder(CONFIG)


def copy_linears(theirs: Any, ours: torch.nn.Module, names: dict[str, str]) -> None:
    for their_name, our_name in names.items():
        theirs.get_submodule(their_name).load_state_dict(ours.get_submodule(our_name).state_dict())


def test_features_are_those_of_a_siglip_transformer() -> None:
    encoder = make_encoder()
    theirs = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=48,
            intermediate_size=60,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=42,
            patch_size=6,
            layer_norm_eps=1e-5,
            vision_use_head=False,
        )
    ).eval()
    theirs = getattr(theirs, "vision_model", theirs)
    theirs.embeddings.patch_embedding.weight.data = encoder.patch_emb.weight.view(48, 3, 6, 6)
    theirs.embeddings.patch_embedding.bias.data = encoder.patch_emb.bias
    theirs.embeddings.position_embedding.weight.data = encoder.pos_emb[0]
    theirs.post_layernorm.load_state_dict(encoder.post_ln.state_dict())
    names = {
        "self_attn.out_proj": "attn.proj",
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    for layer, block in zip(theirs.encoder.layers, encoder.blocks, strict=True):
        copy_linears(layer, block, names)
        weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            linear = layer.self_attn.get_submodule(f"{name}_proj")
            linear.weight.data, linear.bias.data = weight, bias
    pixels = torch.randn(2, 3, 42, 42)
    with torch.no_grad():
        expected = theirs(pixels).last_hidden_state
    torch.testing.assert_close(encoder.features(pixels), expected, rtol=1e-4, atol=1e-5)


def test_tiles_without_their_margins_are_the_whole() -> None:
    whole = torch.arange(12 * 17.0).view(12, 17, 1)
    tiles = [whole[5 * r : 5 * r + 7, 5 * c : 5 * c + 7] for r in range(2) for c in range(3)]
    assert torch.equal(join_tiles(torch.stack(tiles), 2, 3, 1), whole)


def test_an_image_is_as_many_embeddings_whatever_its_size() -> None:
    encoder = make_encoder()
    found = [encoder.encode(picture(*size)) for size in ((1, 1), (42, 42), (90, 300), (300, 90))]
    assert {one.shape for one in found} == {(49, 64)}
    assert all(one.isfinite().all() for one in found)
    assert torch.equal(found[2], encoder.encode(picture(90, 300)))


def test_embeddings_see_the_whole_and_the_tiles() -> None:
    encoder, image = make_encoder(), read_image(picture(120, 200))
    crops = cut_image(image, CONFIG)
    features = encoder.features(crops.pixels)
    expected = encoder.project(features, crops)
    assert torch.equal(encoder.encode(image), expected)
    for changed in (0, 3):
        other = features.clone()
        other[changed] += 1
        assert not torch.allclose(encoder.project(other, crops), expected, atol=1e-3)


def test_weights_come_from_a_file(tmp_path: Path) -> None:
    encoder, path = make_encoder(), tmp_path / "model.safetensors"
    stored = {f"model.vision.{name}": tensor for name, tensor in encoder.state_dict().items()}
    save_file({**stored, "model.text.wte": torch.ones(2)}, path)
    loaded = load_vision(path, CONFIG, "bfloat16")
    image = picture(60, 80)
    assert loaded.encode(image).dtype is torch.bfloat16
    torch.testing.assert_close(
        loaded.encode(image).float(), encoder.encode(image), atol=0.05, rtol=0.05
    )

    with pytest.raises(ConfigError, match="dtype is 'int8'; give one of float32"):
        load_vision(path, CONFIG, "int8")


@pytest.mark.parametrize("damage", ["missing", "shape", "integers", "cut", "absent"])
def test_a_file_that_is_not_the_encoders_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored = {f"model.vision.{name}": t for name, t in make_encoder().state_dict().items()}
    if damage == "missing":
        del stored["model.vision.post_ln.bias"]
    if damage == "shape":
        stored["model.vision.post_ln.bias"] = torch.ones(5)
    if damage == "integers":
        stored["model.vision.post_ln.bias"] = stored["model.vision.post_ln.bias"].to(torch.int8)
    save_file(stored, path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    if damage == "absent":
        path.unlink()
    with pytest.raises(ModelError, match=re.escape(f"{path}: it does not hold the VisionEncoder")):
        load_vision(path, CONFIG)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"heads": 5}, "heads 5 must divide width 48"),
        ({"patch": 5}, "patch 5 crop_size 42"),
        ({"margin": 4}, "two margins of 4 leave some of the 7 patches"),
        ({"layers": 0}, "layers is 0; give an integer from 1 to 2147483647"),
        ({"margin": -1}, "margin is -1; give an integer from 0 to"),
        ({"width": 1.5}, "width is 1.5"),
        ({"most_tiles": True}, "most_tiles is True; give an integer"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        VisionConfig(**{**SHAPE, **changed})


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(RequestError, match=r"the image is 'cat\.png'"):
        make_encoder().encode("cat.png")

"""Adapters of PEFT: what is read of a directory, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from photon_ext.errors import ModelError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loading.lora_file import read_lora
from photon_ext.models.lora import LoraShape

CONFIG = ModelConfig(Family.LLAMA, 16, 2, 4, 2, 8, 24, 31)
SHAPE = LoraShape(CONFIG, 6)
RANK = 4
Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
V = "base_model.model.model.layers.1.self_attn.v_proj.lora_{}.weight"
UP = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"


def tensors() -> dict[str, torch.Tensor]:
    """Adapters of three modules, of 32, 16 and 24 rows."""
    generator = torch.Generator().manual_seed(0)
    return {
        name.format(half): torch.randn(
            *((RANK, 16) if half == "A" else (rows, RANK)), generator=generator
        )
        for name, rows in ((Q, 32), (V, 16), (UP, 24))
        for half in "AB"
    }


def saved(folder: Path, found: dict[str, torch.Tensor], **config: Any) -> Path:
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(found, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path) -> torch.Tensor:
    return read_lora(folder, SHAPE, torch.float32, pin=False)


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 6 / 4), (True, 6 / 2)])
def test_matrices_lie_side_by_side_padded_and_scaled(
    tmp_path: Path, rslora: bool, scaling: float
) -> None:
    found = tensors()
    memory = read(saved(tmp_path, found, use_rslora=rslora))
    assert memory.shape == (SHAPE.words,)
    layers = SHAPE.views(memory)
    expected = [
        {name: (torch.zeros_like(pair.a), torch.zeros_like(pair.b)) for name, pair in layer.items()}
        for layer in layers
    ]
    qkv, gate_up = expected[1]["qkv"], expected[0]["gate_up"]
    assert SHAPE.rank == 8
    qkv[0][:4], qkv[0][16:20] = found[Q.format("A")], found[V.format("A")]
    qkv[1][:32, :4] = scaling * found[Q.format("B")]
    qkv[1][48:, :4] = scaling * found[V.format("B")]
    gate_up[0][8:12] = found[UP.format("A")]
    gate_up[1][24:, :4] = scaling * found[UP.format("B")]
    for layer, wanted in zip(layers, expected, strict=True):
        for name, pair in layer.items():
            torch.testing.assert_close(pair.a, wanted[name][0])
            torch.testing.assert_close(pair.b, wanted[name][1])


def test_slots_lie_in_whole_vectors() -> None:
    """Every matrix begins at a multiple of 8 numbers, whatever the model's widths."""
    shape = LoraShape(ModelConfig(Family.LLAMA, 30, 3, 6, 2, 24, 45, 131), 5)
    memory = torch.zeros(2, shape.words)
    for layer in shape.views(memory):
        for pair in layer.values():
            for matrix in pair:
                assert matrix.storage_offset() % 8 == 0
                assert matrix.stride(0) == shape.words
    assert shape.words % 8 == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected LORA"),
        ({"use_dora": True}, "use_dora is True, which is not supported; train a plain LoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is .*, which is not supported"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is .*, which is not supp"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is .*, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*, which is not supported"),
        ({"bias": "all"}, "bias is 'all', and biases are not adapted"),
        ({"r": 7}, "r is 7, and the engine's slots hold ranks up to 6; make it with lora_rank=7"),
        ({"r": 0}, "r is 0, expected an integer from 1"),
        ({"r": "4"}, "r is '4', expected an integer from 1"),
        ({"r": 3}, r"has shape \[.*\], and with r 3 the model takes"),
        ({"lora_alpha": -1}, "lora_alpha is -1, expected a finite number above 0"),
        ({"use_rslora": 1}, "use_rslora is 1, expected true or false"),
    ],
)
def test_another_kind_of_adapter_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(saved(tmp_path, tensors(), **config))


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda found: found.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found.update({Q.format("A"): torch.ones(RANK, 15)}),
            r"has shape \[4, 15\], and with r 4 the model takes \[4, 16\]",
        ),
        (
            lambda found: found.update({UP.format("B"): torch.ones(32, RANK)}),
            r"has shape \[32, 4\], and with r 4 the model takes \[24, 4\]",
        ),
        (
            lambda found: found.update({Q.replace("1", "2").format("A"): torch.ones(RANK, 16)}),
            "is of layer 2, and the model has 2; it is an adapter of another model",
        ),
        (
            lambda found: found.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4)}),
            "adapts no module that is supported; target_modules may be q_proj, k_proj, v_proj, o_p",
        ),
        (without(V.format("B")), "layer 1 has only one of lora_A and lora_B for a part of qkv"),
        (lambda found: found.clear(), "holds no tensor"),
        (
            lambda found: found.update({Q.format("A"): torch.ones(RANK, 16, dtype=torch.int8)}),
            "is stored as I8; save it in float32",
        ),
        (
            lambda found: found.update({Q.replace("1", "01").format("A"): torch.ones(RANK, 16)}),
            r"layers\.01\..* adapts no module that is supported",
        ),
        (
            lambda found: found.update({Q.replace("1", "9" * 5000).format("A"): torch.ones(1)}),
            r"layers\.9.* adapts no module that is supported",
        ),
        (
            lambda found: found[V.format("A")].__setitem__((1, 2), torch.nan),
            r"v_proj\.lora_A\.weight, scaled, holds NaN, infinity or what is infinite in torch.f",
        ),
        (
            lambda found: found.update({UP.format("B"): torch.full((24, RANK), 3e38)}),
            r"up_proj\.lora_B\.weight, scaled, holds NaN, infinity or what is infinite in torch.f",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    found = tensors()
    change(found)
    with pytest.raises(ModelError, match=message):
        read(saved(tmp_path, found))


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no directory of a PEFT adapter"):
        read(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is no directory of a PEFT adapter"):
        read(tmp_path)
    with pytest.raises(ModelError, match=r"^x{80}.*: cannot be looked for \(File name too long\)"):
        read(Path("x" * 5000))
    with pytest.raises(ModelError, match="the adapter's path is 3; give a directory"):
        read(3)  # type: ignore[arg-type]
    weights = saved(tmp_path, tensors()) / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        read(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="not a readable JSON file"):
        read(tmp_path)

"""Checkpoints with fp8 weights: a directory of plain weights, stored again as a scheme has it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from photon_ext.dequantize import dequantized
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat

FP8 = torch.float8_e4m3fn
LINEARS = re.compile(r".*(_proj|lm_head)\.weight")
BLOCK = 128


def compressed(strategy: str, ignore: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    block = [BLOCK, BLOCK] if strategy == "block" else None
    scheme = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "block_structure": block,
        "dynamic": False,
        "actorder": None,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": scheme, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if ignore is None else ignore,
        "kv_cache_scheme": None,
    }


def blocks(left_out: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    """A `quantization_config` as Qwen3's and DeepSeek's files have it."""
    names = {} if left_out is None else {"modules_to_not_convert": left_out}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        **names,
        **fields,
    }


def scale_name(config: dict[str, Any]) -> str:
    return "weight_scale_inv" if config["quant_method"] == "fp8" else "weight_scale"


def scales_of(weight: torch.Tensor, strategy: str) -> torch.Tensor:
    """So that the largest number of each share is 448."""
    if strategy == "tensor":
        return weight.abs().max().reshape(1) / 448
    if strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / 448
    rows = [part.abs() for part in weight.split(BLOCK)]
    return torch.tensor([[b.max() / 448 for b in part.split(BLOCK, 1)] for part in rows])


def store_fp8(
    plain: Path,
    folder: Path,
    config: dict[str, Any],
    strategy: str = "block",
    left_out: tuple[str, ...] = ("lm_head",),
    scale_dtype: torch.dtype = torch.float32,
) -> None:
    """The model of `plain` in `folder`, its linears in fp8 but those whose names hold one of
    `left_out`; and in `plain` the numbers that these stand for, in float32.
    """
    tensors = load_file(plain / "model.safetensors")
    dense = dict(tensors)
    for name, weight in list(tensors.items()):
        if not LINEARS.fullmatch(name) or any(part in name for part in left_out):
            continue
        scale = scales_of(weight, strategy).to(scale_dtype)
        wide = scale.float().reshape(-1, 1) if strategy != "block" else scale.float()
        wide = wide.expand(len(weight), 1) if strategy == "tensor" else wide
        ones = dequantized(Weight(torch.ones_like(weight).to(FP8), WeightFormat.FP8, wide))
        stored = (weight / ones).clamp(-448, 448).to(FP8)
        tensors[name] = stored
        tensors[f"{name.removesuffix('weight')}{scale_name(config)}"] = scale
        dense[name] = dequantized(Weight(stored, WeightFormat.FP8, wide))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dense, plain / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))

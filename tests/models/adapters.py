"""Adapters as PEFT writes them, and the models that they make when merged."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def adapter_tensors(
    model: PreTrainedModel, rank: int, seed: int, modules: tuple[str, ...] = ALL
) -> dict[str, torch.Tensor]:
    """Random A and B of every linear that is named so, by PEFT's names, large enough to change
    tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        if name.endswith(".weight") and name.split(".")[-2] in modules:
            rows, columns = parameter.shape
            base = PREFIX + name.removesuffix("weight")
            a = torch.randn(rank, columns, generator=generator) * columns**-0.5
            tensors[base + "lora_A.weight"] = a
            tensors[base + "lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.5
    return tensors


def saved_adapter(folder: Path, tensors: dict[str, torch.Tensor], rank: int, **config: Any) -> Path:
    """A directory of PEFT with these tensors."""
    folder.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """The model with the adapter's products added to its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            base = PREFIX + name.removesuffix("weight")
            if base + "lora_A.weight" in tensors:
                a, b = (tensors[f"{base}lora_{half}.weight"] for half in "AB")
                parameter += scaling * (b @ a)
    return changed
